"""Stages and a gateway as processes of one machine: started, watched, restarted, ended by their own pid.

It starts the same programs that hosts of a network run, and knows them by their command line and the line
each writes when it is ready. A program that dies is started again at the same address, so that the others
find it where it was. Nothing here loads a model.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blocktrain.local.processes import (
    STABLE_SECONDS,
    Child,
    ChildError,
    await_line,
    end_children,
    restart_pause,
    start_child,
)
from blocktrain.serving.versions import current_checkpoint
from blocktrain.training.checkpoint import Description, read_config

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
READY_SECONDS = 120.0
"""Loading torch and a large block from a cold disk."""
END_SECONDS = 15.0
POLL_SECONDS = 0.1


def block_groups(num_blocks: int, num_stages: int, *, together: bool = False) -> list[list[int]]:
    """Which blocks each stage holds: neighbours, as evenly as possible; stages beyond the number of
    blocks are spares, and blocks of a chain stay together."""
    if together:
        return [list(range(num_blocks)) for _ in range(num_stages)]
    parts = min(num_blocks, num_stages)
    # Neighbours, since a sweep goes from block to block: fewer stages on its way mean fewer round trips.
    edges = [round(i * num_blocks / parts) for i in range(parts + 1)]
    groups = [list(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    return [groups[i % parts] for i in range(num_stages)]


@dataclass
class Program:
    """A program to keep running. `ready` finds its address in the line it writes when it is up."""

    name: str
    arguments: Callable[[str], list[str]]
    """Its command line at an address; an address that ends in :0 takes a free port."""
    ready: str
    address: str
    log: Path
    child: Child | None = None
    started: float = 0.0
    quick_failures: int = 0

    def start(self, now: float) -> None:
        # Also a dead one: `kill` collects it and closes its stdin, or a zombie stays behind each restart.
        if self.child is not None:
            self.child.kill()
        self.child = start_child(self.name, self.arguments(self.address), self.log)
        self.started = now
        log.info("started %s pid=%d", self.name, self.child.process.pid)

    def await_ready(self, seconds: float, stop: threading.Event) -> None:
        """Until it says where it listens; KeyboardInterrupt when told to stop before."""
        assert self.child is not None
        try:
            self.address = await_line(self.child, self.ready, seconds, stop)
        except ChildError:
            if stop.is_set():
                raise KeyboardInterrupt from None
            raise

    @property
    def pid(self) -> int | None:
        return None if self.child is None else self.child.process.pid

    def exit_code(self) -> int | None:
        return None if self.child is None else self.child.process.poll()


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    checkpoint: Path
    """Or a folder of them, of which one is served at a time (`serving.versions`)."""
    num_stages: int
    logs: Path
    """Each program writes to a file of its own in this folder."""
    host: str = LOOPBACK
    port: int = 8000
    gateway_options: tuple[str, ...] = ()
    """More flags for `blocktrain gateway`."""
    stage_options: tuple[str, ...] = ()
    """More flags for `blocktrain stage`."""


def stage_programs(config: LaunchConfig) -> list[Program]:
    checkpoint = current_checkpoint(config.checkpoint)
    described = Description.of(read_config(checkpoint), checkpoint)
    objective, num_blocks = described.setup().objective, described.recipe.model.blocks
    # A block of a chain needs the features of those before it; only parts of a serial model hand them on from
    # stage to stage.
    together = any(map(objective.upstream, range(num_blocks))) and not objective.is_serial
    threads = max(1, (os.cpu_count() or 1) // config.num_stages)
    groups = block_groups(num_blocks, config.num_stages, together=together)
    return [_stage_program(config, number, blocks, threads) for number, blocks in enumerate(groups)]


def _stage_program(config: LaunchConfig, number: int, blocks: Sequence[int], threads: int) -> Program:
    named = ",".join(map(str, blocks))
    fixed = ["stage", str(config.checkpoint), "--blocks", named, "--threads", str(threads)]
    return Program(
        f"stage {number} (blocks {named})",
        lambda address: [*fixed, "--listen", address, *config.stage_options],
        r"stage ready listen=(\S+)",
        f"{LOOPBACK}:0",
        config.logs / f"stage-{number}.log",
    )


def gateway_program(config: LaunchConfig, stages: Sequence[Program]) -> Program:
    addresses = ",".join(stage.address for stage in stages)
    fixed = ["gateway", str(config.checkpoint), "--stages", addresses, *config.gateway_options]

    def arguments(address: str) -> list[str]:
        host, _, port = address.removeprefix("http://").rpartition(":")
        return [*fixed, "--host", host.strip("[]"), "--port", port]

    return Program(
        "gateway",
        arguments,
        r"gateway ready url=(\S+)",
        f"{config.host}:{config.port}",
        config.logs / "gateway.log",
    )


class Launcher:
    """All programs of one `blocktrain serve`, from their start to their end."""

    def __init__(self, config: LaunchConfig) -> None:
        self.config = config
        self.model = str(read_config(current_checkpoint(config.checkpoint)).get("recipe", {}).get("name"))
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
        # All started before any is waited for: each spends seconds on importing torch.
        for stage in self.stages:
            stage.start(time.monotonic())
        for stage in self.stages:
            stage.await_ready(READY_SECONDS, stop)
        # Only now are the addresses of the stages known.
        self.gateway = gateway_program(self.config, self.stages)
        self.gateway.start(time.monotonic())
        self.gateway.await_ready(READY_SECONDS, stop)
        return self.gateway.address

    def watch(self, stop: threading.Event) -> None:
        """Keep every program running until `stop`. A stage takes its time to come back; nobody waits."""
        # A pause per program and no sleep: one that keeps failing does not keep the others from being
        # restarted.
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
            assert program.child is not None
            raise program.child.failure()
        log.warning("restarting %s exit_code=%s pause_seconds=%g", program.name, code, pause)
        return pause

    def end(self) -> None:
        """The gateway first, so that its answers can still be completed; then the stages."""
        for programs in ([self.gateway] if self.gateway is not None else [], self.stages):
            end_children([program.child for program in programs if program.child is not None], END_SECONDS)
