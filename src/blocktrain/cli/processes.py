"""Child processes of `blocktrain swarm`: started, watched, and ended by their own pid.

Each child writes to its own log file and lives in its own session, so that Ctrl-C reaches the parent
alone and the children can be ended in order: workers first, which hand their leases back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import BlocktrainError

POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 2000


class ChildError(BlocktrainError):
    """A program of the swarm ended when it should not have."""


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        if self.running:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.running:
            self.process.kill()
        self.process.wait()

    def failure(self) -> ChildError:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        return ChildError(
            f"{self.name} ended with exit code {self.process.returncode}; the end of {self.log}:\n{tail}"
        )


def start_child(
    name: str, verb: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """`blocktrain VERB…` as a process of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *verb],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    return Child(name, process, log)


def await_file(path: Path, child: Child, seconds: float, is_fresh: Callable[[str], bool]) -> str:
    """The text of a file that `child` writes when it is ready."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not child.running:
            raise child.failure()
        text = path.read_text().strip() if path.exists() else ""
        if text and is_fresh(text):
            return text
        time.sleep(POLL_SECONDS)
    raise ChildError(f"{child.name} was not ready after {seconds:.0f} s; see {child.log}")


def end_children(children: Sequence[Child], seconds: float) -> None:
    """Ask every child to end, then make it."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()
