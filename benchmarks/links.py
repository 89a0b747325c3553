"""Emulated wide-area links: network namespaces joined by a user-space relay, real kernel TCP on both ends.

Every host has a namespace of its own and one link to the gateway's namespace. The relay moves IP packets
between two TUN devices with a one-way delay, a rate and a bounded queue, so slow start, windows and
retransmission are the kernel's. Needs root and /dev/net/tun; touches nothing outside its own namespaces.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 1500
QUEUE_SECONDS = 0.2
"""What the bottleneck holds back before it drops."""


def available() -> bool:
    return os.geteuid() == 0 and Path("/dev/net/tun").exists()


def gateway_ip(host: int) -> str:
    return f"10.97.{host}.1"


def host_ip(host: int) -> str:
    return f"10.97.{host}.2"


class Wan:
    """A gateway namespace and `num_hosts` others, each one link away."""

    def __init__(self, num_hosts: int, *, rate_mbit: float) -> None:
        self.rate_mbit = rate_mbit
        self.gateway = f"bt-gateway-{os.getpid()}"
        self.hosts = [f"bt-host-{os.getpid()}-{i}" for i in range(num_hosts)]
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Wan:
        for name in (self.gateway, *self.hosts):
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        plan = {"gateway": self.gateway, "hosts": self.hosts, "rate_mbit": self.rate_mbit}
        self._relay = subprocess.Popen(
            [sys.executable, __file__, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "up\n", "the relay did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for name in (self.gateway, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def set_rtt(self, rtt_ms: float) -> None:
        """From the next packet on."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(f"{rtt_ms}\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "set\n"

    @staticmethod
    def inside(namespace: str, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", namespace, *command]


# ---- the relay process ----


@dataclass
class End:
    """One end of a link: its TUN, and packets on their way to the other end."""

    tun: int
    other: int
    queue: collections.deque[tuple[float, bytes]]
    free: float = 0.0
    """When the link has sent everything it has accepted."""


def open_tun(namespace: str, name: str, ip: str, peer: str) -> int:
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(there, CLONE_NEWNET) == 0, "cannot enter the namespace"
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        subprocess.run(["ip", "addr", "add", ip, "peer", peer, "dev", name], check=True)
        subprocess.run(["ip", "link", "set", name, "mtu", str(MTU), "up"], check=True)
    finally:
        assert libc.setns(here, CLONE_NEWNET) == 0
        os.close(here)
        os.close(there)
    return tun


class Relay:
    def __init__(self, gateway: str, hosts: list[str], rate_mbit: float) -> None:
        self.bytes_per_second = rate_mbit * 1e6 / 8
        self.one_way_seconds = 0.0
        self.ends: dict[int, End] = {}
        for i, host in enumerate(hosts):
            near = open_tun(gateway, f"wan{i}", gateway_ip(i), host_ip(i))
            far = open_tun(host, "wan", host_ip(i), gateway_ip(i))
            self.ends[near] = End(near, far, collections.deque())
            self.ends[far] = End(far, near, collections.deque())

    def run(self) -> None:
        poll = select.epoll()
        poll.register(sys.stdin.fileno(), select.EPOLLIN)
        for tun in self.ends:
            poll.register(tun, select.EPOLLIN)
        print("up", flush=True)
        while True:
            for ready, _ in poll.poll(self._deliver()):
                if ready in self.ends:
                    self._take(self.ends[ready])
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if line:
            self.one_way_seconds = float(line) / 2000
            print("set", flush=True)
        return bool(line)

    def _take(self, end: End) -> None:
        """Packets that came in at one end, each with the time it is due at the other."""
        while True:
            try:
                packet = os.read(end.tun, 2 * MTU)
            except BlockingIOError:
                return
            now = time.monotonic()
            begin = max(now, end.free)
            if begin - now <= QUEUE_SECONDS:
                end.free = begin + len(packet) / self.bytes_per_second
                end.queue.append((end.free + self.one_way_seconds, packet))

    def _deliver(self) -> float | None:
        """Send what is due; returns the seconds until the next packet is."""
        now = time.monotonic()
        waits = []
        for end in self.ends.values():
            while end.queue and end.queue[0][0] <= now:
                packet = end.queue.popleft()[1]
                try:
                    os.write(end.other, packet)
                except BlockingIOError:
                    continue
            if end.queue:
                waits.append(end.queue[0][0] - now)
        return max(0.0, min(waits)) if waits else None


if __name__ == "__main__":
    Relay(**json.loads(sys.argv[1])).run()
