"""Processes of one machine: children that are started, watched and ended by their own pid, and signals.

Each child writes to its own log file and lives in its own session, so that Ctrl-C reaches the parent alone
and the children can be ended in order: workers first, which hand their leases back; a gateway before its
stages. No child outlives its parent: the parent holds the writing end of the child's stdin and never writes,
so when the parent is gone, killed with SIGKILL or not, the kernel closes it and the child reads the end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from blocktrain.errors import BlocktrainError, UserError

ENDS_WITH_STDIN = "BLOCKTRAIN_ENDS_WITH_STDIN"
"""Set for a child whose stdin is a pipe that its parent holds."""
ORPHAN_SECONDS = 20.0
"""How long a child whose parent is gone may take to end: a stage finishes its answers, a worker hands its
lease back."""
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LINE_POLL_SECONDS = 0.05
LOG_TAIL_BYTES = 2000
STABLE_SECONDS = 30.0
"""A program that has run for this long is not failing at its start."""
MAX_QUICK_FAILURES = 5
COMPLAINT = "blocktrain: "
"""How the command line begins its one sentence about what went wrong."""


class ChildError(BlocktrainError):
    """A program did not start, or ended when it should not have; misuse stays misuse."""

    def __init__(self, sentence: str, exit_code: int = BlocktrainError.exit_code) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Length of the log before this process, when it goes on with an older one."""

    def output(self) -> str:
        with self.log.open("rb") as file:
            # Without this the ready line of an earlier process would count for the new one.
            file.seek(self.log_start)
            return file.read().decode(errors="replace")

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
        # Collected even if it was dead already: no zombies.
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def failure(self) -> ChildError:
        code, tail = self.process.returncode, self.output()[-LOG_TAIL_BYTES:].strip()
        last = tail.rpartition("\n")[2]
        # A child that explains itself in one sentence needs no tail of a log around it.
        if last.startswith(COMPLAINT):
            misuse = code == UserError.exit_code
            told = f"{self.name}: {last.removeprefix(COMPLAINT)}" + ("" if misuse else f" (log: {self.log})")
            return ChildError(told, code if misuse else BlocktrainError.exit_code)
        return ChildError(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{tail}")


def start_child(
    name: str, verb: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """`blocktrain VERB…` as a process of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        start = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", *verb],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {}), ENDS_WITH_STDIN: "1"},
            start_new_session=True,
        )
    return Child(name, process, log, start)


def await_line(child: Child, pattern: str, seconds: float, stop: threading.Event) -> str:
    """The first group of the line that `child` writes when it is ready."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop.is_set():
        if not child.running:
            raise child.failure()
        found = re.search(pattern, child.output())
        if found is not None:
            return found.group(1)
        stop.wait(LINE_POLL_SECONDS)
    raise ChildError(f"{child.name} was not ready after {seconds:.0f} s; see {child.log}")


def end_children(children: Sequence[Child], seconds: float) -> None:
    """Ask every child to end, then make it."""
    for child in children:
        # All are asked before any is waited for: they end side by side.
        child.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()


def restart_pause(quick_failures: int) -> float | None:
    """Seconds to wait before starting a program again; None when it fails again and again at its start."""
    if quick_failures > MAX_QUICK_FAILURES:
        return None
    # The first restart at once: a stage that was killed should be back before its clients give up.
    return 0.0 if quick_failures == 0 else 0.25 * 2 ** (quick_failures - 1)


# --- this process


def end_with_parent() -> None:
    """Called first in every process of the command line; does nothing unless a parent asked for it."""

    def end_after_parent() -> None:
        # A pipe and not prctl(PR_SET_PDEATHSIG): it works on macOS too, and follows the process and not its
        # thread.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(ORPHAN_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.pop(ENDS_WITH_STDIN, None) is not None:
        threading.Thread(target=end_after_parent, name="parent-watch", daemon=True).start()


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set; the second signal ends the process at once."""

    def end(number: int) -> None:
        os._exit(128 + number)

    stop = threading.Event()
    for number in STOPPING_SIGNALS:
        signal.signal(number, _handler(stop, end))
    return stop


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """The same inside a `with`; the second signal interrupts, so that what was started can be ended."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    stop = threading.Event()
    handler = _handler(stop, interrupt)
    before = {number: signal.signal(number, handler) for number in STOPPING_SIGNALS}
    try:
        yield stop
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _handler(stop: threading.Event, second: Callable[[int], None]) -> Callable[[int, FrameType | None], None]:
    asked = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked:
            second(number)
        asked = True
        # A handler runs in the main thread, perhaps while that thread holds the event's own lock in
        # `wait`; setting the event here would then deadlock (seen once, under load). A thread sets it.
        threading.Thread(target=stop.set, daemon=True).start()

    return on_signal
