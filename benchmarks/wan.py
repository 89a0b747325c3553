"""A slow, distant network on one machine: two namespaces joined by a relay in user space.

Each namespace has a TUN device; the relay reads packets from one and writes them to the other, after the
time they would need on a link of the given rate and delay, with a bounded queue (tail drop). Real kernel
TCP runs at both ends, so slow start and congestion control are real. Needs root and /dev/net/tun.

As a program it is the relay; `Wan` starts it and cleans up.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 1500
QUEUE_SECONDS = 0.1
"""Queue in front of the bottleneck, as time at its rate."""


def open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def set_up(namespace: str, device: str, address: str, peer: str) -> None:
    """Move the device into the namespace and give it its address there."""
    _ip("link", "set", "dev", device, "netns", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "addr", "add", address, "peer", peer, "dev", device)
    _ip("-n", namespace, "link", "set", device, "mtu", str(MTU), "txqueuelen", "1000", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@dataclass
class Direction:
    """Packets on their way from one end to the other."""

    source: int
    target: int
    bytes_per_second: float
    delay_seconds: float
    waiting: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    free_at: float = 0.0
    dropped: int = 0

    def take(self, now: float) -> None:
        """Read what is there; each packet leaves when the link has sent everything before it."""
        for _ in range(256):
            try:
                packet = os.read(self.source, MTU + 100)
            except BlockingIOError:
                return
            if self.free_at - now > QUEUE_SECONDS:
                self.dropped += 1
                continue
            self.free_at = max(now, self.free_at) + len(packet) / self.bytes_per_second
            self.waiting.append((self.free_at + self.delay_seconds, packet))

    def deliver(self, now: float) -> None:
        while self.waiting and self.waiting[0][0] <= now:
            try:
                os.write(self.target, self.waiting.popleft()[1])
            except BlockingIOError:
                self.dropped += 1

    def next_delivery(self) -> float | None:
        return self.waiting[0][0] if self.waiting else None


def relay(directions: list[Direction]) -> None:
    poll = select.epoll()
    by_source = {direction.source: direction for direction in directions}
    for source in by_source:
        poll.register(source, select.EPOLLIN)
    while True:
        times = [at for direction in directions if (at := direction.next_delivery()) is not None]
        timeout = max(0.0, min(times) - time.monotonic()) if times else -1
        for source, _ in poll.poll(timeout):
            by_source[source].take(time.monotonic())
        for direction in directions:
            direction.deliver(time.monotonic())


@dataclass
class Wan:
    """Two namespaces at the ends of one link, for the time of a `with`."""

    megabits_per_second: float
    round_trip_seconds: float
    near: str = field(default_factory=lambda: f"bt{os.getpid()}a")
    far: str = field(default_factory=lambda: f"bt{os.getpid()}b")
    near_address: str = "10.77.0.1"
    far_address: str = "10.77.0.2"
    process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Wan:
        _ip("netns", "add", self.near)
        _ip("netns", "add", self.far)
        arguments = [self.near, self.far, self.near_address, self.far_address]
        rates = [str(self.megabits_per_second), str(self.round_trip_seconds)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments, *rates], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "up":
            self.__exit__()
            raise SystemExit("the relay did not start; it needs root and /dev/net/tun")
        return self

    def inside(self, namespace: str, command: list[str]) -> list[str]:
        """The command line that runs `command` at one end."""
        return ["ip", "netns", "exec", namespace, *command]

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()
        for namespace in (self.near, self.far):
            _ip("netns", "del", namespace)


def main() -> None:
    parser = argparse.ArgumentParser(description="Relay packets between two namespaces.")
    for name in ("near", "far", "near_address", "far_address"):
        parser.add_argument(name)
    parser.add_argument("megabits_per_second", type=float)
    parser.add_argument("round_trip_seconds", type=float)
    options = parser.parse_args()
    near, far = open_tun(f"{options.near}0"), open_tun(f"{options.far}0")
    set_up(options.near, f"{options.near}0", options.near_address, options.far_address)
    set_up(options.far, f"{options.far}0", options.far_address, options.near_address)
    rate, delay = options.megabits_per_second * 1e6 / 8, options.round_trip_seconds / 2
    print("up", flush=True)
    relay([Direction(near, far, rate, delay), Direction(far, near, rate, delay)])


if __name__ == "__main__":
    main()
