"""Stages and a gateway as processes of one machine: started, watched, restarted, ended by their own pid.

It starts the same programs that hosts of a network run, and knows them by their command line and the line
each prints when it is ready. A program that dies is started again at the same address, so that the others
find it where it was. Nothing here loads a model.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.errors import BlocktrainError
from blocktrain.training.checkpoint import read_config

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
READY_SECONDS = 120.0
"""Loading torch and a large block from a cold disk."""
END_SECONDS = 15.0
POLL_SECONDS = 0.1
STABLE_SECONDS = 30.0
"""A program that has run for this long is not failing at its start."""
MAX_QUICK_FAILURES = 5


class LaunchError(BlocktrainError):
    """A program did not start, or cannot be kept running."""


def block_groups(num_blocks: int, num_stages: int, *, chained: bool = False) -> list[list[int]]:
    """Which blocks each stage holds: neighbours, as evenly as possible; stages beyond the number of
    blocks are spares, and blocks that feed each other stay together."""
    if chained:
        return [list(range(num_blocks)) for _ in range(num_stages)]
    parts = min(num_blocks, num_stages)
    edges = [round(i * num_blocks / parts) for i in range(parts + 1)]
    groups = [list(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    return [groups[i % parts] for i in range(num_stages)]


def restart_pause(quick_failures: int) -> float | None:
    """Seconds to wait before starting a program again; None when it fails again and again at its start."""
    if quick_failures > MAX_QUICK_FAILURES:
        return None
    return 0.0 if quick_failures == 0 else 0.25 * 2 ** (quick_failures - 1)


@dataclass
class Program:
    """A program to keep running. `ready` finds its address in the line it prints when it is up."""

    name: str
    arguments: Callable[[str], list[str]]
    """Its command line at an address; an address that ends in :0 takes a free port."""
    ready: re.Pattern[str]
    address: str
    process: subprocess.Popen[str] | None = None
    started: float = 0.0
    quick_failures: int = 0
    _lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    def start(self, now: float) -> None:
        """A session of its own keeps Ctrl-C for the launcher, which ends the programs in order."""
        self._lines = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *self.arguments(self.address)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started = now
        reader = threading.Thread(target=_read, args=(self.process, self._lines), daemon=True)
        reader.start()
        log.info("started %s pid=%d", self.name, self.process.pid)

    def await_ready(self, deadline: float, stop: threading.Event) -> None:
        """Until it says where it listens; KeyboardInterrupt when told to stop before."""
        while not stop.is_set():
            if time.monotonic() > deadline:
                raise LaunchError(f"{self.name} was not ready after {READY_SECONDS:.0f} s")
            try:
                line = self._lines.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if line is None:
                raise LaunchError(f"{self.name} ended at its start with exit code {self.wait()}")
            if found := self.ready.search(line):
                self.address = found.group(1)
                return
        raise KeyboardInterrupt

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(END_SECONDS)

    def end(self, deadline: float) -> None:
        """SIGTERM, then SIGKILL for what has not ended by the deadline."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line)
    lines.put(None)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    checkpoint: Path
    num_stages: int
    host: str = LOOPBACK
    port: int = 8000
    gateway_options: tuple[str, ...] = ()
    """More flags for `blocktrain gateway`."""
    stage_options: tuple[str, ...] = ()
    """More flags for `blocktrain stage`."""


def stage_programs(config: LaunchConfig) -> list[Program]:
    described = read_config(config.checkpoint)
    num_blocks = len(described.get("blocks", []))
    chained = described.get("recipe", {}).get("objective", {}).get("kind") == "chain"
    threads = max(1, (os.cpu_count() or 1) // config.num_stages)
    groups = block_groups(num_blocks, config.num_stages, chained=chained)
    return [_stage_program(config, number, blocks, threads) for number, blocks in enumerate(groups)]


def _stage_program(config: LaunchConfig, number: int, blocks: Sequence[int], threads: int) -> Program:
    named = ",".join(map(str, blocks))
    fixed = ["stage", str(config.checkpoint), "--blocks", named, "--threads", str(threads)]
    return Program(
        f"stage {number} (blocks {named})",
        lambda address: [*fixed, "--listen", address, *config.stage_options],
        re.compile(r"^stage ready listen=(\S+)"),
        f"{LOOPBACK}:0",
    )


def gateway_program(config: LaunchConfig, stages: Sequence[Program]) -> Program:
    addresses = ",".join(stage.address for stage in stages)
    fixed = ["gateway", str(config.checkpoint), "--stages", addresses, *config.gateway_options]

    def arguments(address: str) -> list[str]:
        host, _, port = address.removeprefix("http://").rpartition(":")
        return [*fixed, "--host", host.strip("[]"), "--port", port]

    return Program(
        "gateway", arguments, re.compile(r"^gateway ready url=(\S+)"), f"{config.host}:{config.port}"
    )


class Launcher:
    """All programs of one `blocktrain serve`, from their start to their end."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.model = str(read_config(config.checkpoint).get("recipe", {}).get("name"))
        self.stages = stage_programs(config)
        self.gateway: Program | None = None

    @property
    def programs(self) -> list[Program]:
        return [*self.stages, *([self.gateway] if self.gateway is not None else [])]

    @property
    def gateway_pid(self) -> int | None:
        return None if self.gateway is None else self.gateway.pid

    def start(self, stop: threading.Event) -> str:
        """Start everything and wait until it is ready; gives the gateway's URL."""
        deadline = time.monotonic() + READY_SECONDS
        for stage in self.stages:
            stage.start(time.monotonic())
        for stage in self.stages:
            stage.await_ready(deadline, stop)
        self.gateway = gateway_program(self.config, self.stages)
        self.gateway.start(time.monotonic())
        self.gateway.await_ready(deadline, stop)
        return self.gateway.address

    def watch(self, stop: threading.Event) -> None:
        """Keep every program running until `stop`. A stage takes its time to come back; nobody waits."""
        due: dict[str, float] = {}
        while not stop.wait(POLL_SECONDS):
            now = time.monotonic()
            for program in self.programs:
                if program.exit_code() is None:
                    continue
                if program.name not in due:
                    due[program.name] = now + self._pause(program, now)
                if now >= due[program.name]:
                    del due[program.name]
                    program.start(now)

    def _pause(self, program: Program, now: float) -> float:
        quick = now - program.started < STABLE_SECONDS
        program.quick_failures = program.quick_failures + 1 if quick else 0
        pause = restart_pause(program.quick_failures)
        code = program.exit_code()
        if pause is None:
            raise LaunchError(f"{program.name} keeps ending at its start, last with exit code {code}")
        log.warning("restarting %s exit_code=%s pause_seconds=%g", program.name, code, pause)
        return pause

    def end(self) -> None:
        """The gateway first, so that its answers can still be completed; then the stages."""
        for program in reversed(self.programs):
            program.end(time.monotonic() + END_SECONDS)
