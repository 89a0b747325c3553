"""Several workers of one machine, one for each device: `blocktrain worker --devices`.

Each is the program that a single worker is, with a key, a folder and a log of its own. One that crashes is
started again; one that ends by itself, or is refused, stays ended while the others go on.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.errors import DeviceError, StoppedError, UserError
from blocktrain.files import locked_file
from blocktrain.local.processes import STABLE_SECONDS, Child, end_children, restart_pause, start_child
from blocktrain.worker.shifts import CONTRIBUTION_FILE, PAUSE_FILE, Contribution

POLL_SECONDS = 0.2
ENDING_SECONDS = 30.0
"""A worker hands its assignment back and keeps its state; a transfer under way may take 5 s."""
MAX_LOG_BYTES = 4_000_000
"""Of a worker's log: then a new log begins, and the one before is kept beside it. A line for each update of a
round is some 100 bytes, so this holds weeks."""
ENDED_BY_ITSELF = (0, UserError.exit_code, StoppedError.exit_code)


def named_devices(text: str, look: Callable[[], tuple[int, str]]) -> list[str]:
    """The devices of `all`, `0,1` or `cuda:0,cpu,cpu`.

    `look` gives the number of GPUs and what to take where there is none. It is asked only if need be, as it
    loads torch: 0.2 GB of memory for a process that only watches.
    """
    if text == "all":
        gpus, best = look()
        return [f"cuda:{number}" for number in range(gpus)] or [best]
    found = [f"cuda:{part}" if part.isdigit() else part for part in text.replace(" ", "").split(",")]
    for device in found:
        number = re.fullmatch(r"cpu|mps|cuda:(\d+)", device)
        if number is None:
            raise DeviceError(
                f"--devices {text!r}: expected all, numbers of GPUs (0,1) or names (cuda:0,cpu), found "
                f"{device!r}"
            )
        if number[1] is not None and int(number[1]) >= (gpus := look()[0]):
            raise DeviceError(f"--devices {text!r}: there is no {device} here, the number of GPUs is {gpus}")
    return found


def folder_names(devices: Sequence[str]) -> list[str]:
    """A name for each, the same at every start: `cuda-0`, `cuda-1`, `cpu`, `cpu-1`."""
    seen: Counter[str] = Counter()
    names = []
    for device in devices:
        again = f"-{seen[device]}" if seen[device] else ""
        names.append(device.replace(":", "-") + again)
        seen[device] += 1
    return names


def restart_after(exit_code: int, quick_failures: int) -> float | None:
    """Seconds until a worker that ended is started again; None if it stays ended."""
    return None if exit_code in ENDED_BY_ITSELF else restart_pause(quick_failures)


@dataclass
class Member:
    name: str
    folder: Path
    verb: Sequence[str]
    environment: Mapping[str, str]
    child: Child | None = None
    started: float = 0.0
    quick_failures: int = 0
    due: float | None = None
    """When to start it again, for one that crashed."""
    ended: bool = False
    """It ended by itself, was refused, or crashed too often."""
    given: Contribution = field(default_factory=Contribution)
    told_bytes: int = 0
    """How much of its log was passed on."""

    @property
    def log(self) -> Path:
        return self.folder / "worker.log"

    @property
    def older_log(self) -> Path:
        return self.folder / "worker.log.old"

    def start(self, now: float) -> None:
        if self.child is None:
            for log in (self.log, self.older_log):  # those of an earlier command
                log.unlink(missing_ok=True)
        else:
            self.child.kill()  # a dead one: this collects it
        self.child = start_child(self.name, self.verb, self.log, self.environment)
        self.started, self.due = now, None

    def lines(self) -> list[str]:
        """What the log has had since the last call, in whole lines: the rest of one comes with the next. A
        log that is full is emptied, and its copy kept."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self.told_bytes)
            told, newline, begun = file.read().rpartition(b"\n")
        self.told_bytes += len(told) + len(newline)
        child = self.child
        # Not the log of one that has ended: its last lines say why. Nor one that ends within a line.
        if self.told_bytes > MAX_LOG_BYTES and not begun and child is not None and child.running:
            # The worker holds the file open and appends, so the file stays and is emptied. What it writes
            # between copy and emptying is lost; it writes a few lines a minute.
            with contextlib.suppress(OSError):  # a full disk must not end work because of a log
                shutil.copyfile(self.log, self.older_log)
            self.log.write_bytes(b"")
            self.told_bytes = child.log_start = 0
        return told.decode(errors="replace").splitlines()

    def collect(self) -> None:
        """Add what a process that has ended gave; one that crashed has left no word of it."""
        file = self.folder / CONTRIBUTION_FILE
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(file.read_text(encoding="utf-8"))
            self.given += Contribution(**{**found, "verdicts": Counter(found["verdicts"])})
        file.unlink(missing_ok=True)


class Crew:
    def __init__(self, folder: Path, members: Sequence[Member], say: Callable[[str], None]) -> None:
        self.folder, self.members, self.say = folder, members, say

    def obey_signals(self) -> None:
        """As a single worker does: SIGUSR1 pauses all, SIGUSR2 resumes them."""
        file = self.folder / PAUSE_FILE
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, lambda *_: file.touch())
            signal.signal(signal.SIGUSR2, lambda *_: file.unlink(missing_ok=True))

    def run(self, stop: threading.Event) -> None:
        """Until every worker has ended by itself, or `stop` is set, which ends them all."""
        taken = f"another command is using {self.folder}; give each its own --data-dir"
        with locked_file(self.folder / "devices.lock", taken):
            try:
                for member in self.members:
                    member.collect()  # nobody's: left by a command that was killed
                    member.given = Contribution()
                    member.start(time.monotonic())
                while not stop.is_set() and self._look(time.monotonic()):
                    stop.wait(POLL_SECONDS)
            finally:
                children = [member.child for member in self.members if member.child is not None]
                end_children(children, ENDING_SECONDS)
                for member in self.members:
                    self._pass_on(member)
                    member.collect()
        total = sum((member.given for member in self.members), Contribution())
        if total.steps or total.verdicts:
            self.say(f"{len(self.members)} workers {total.sentence()}")
        codes = [child.process.returncode for child in children]
        if stop.is_set() and set(codes) == {StoppedError.exit_code}:
            raise StoppedError("stopped before any worker had joined")
        if not stop.is_set() and 0 not in codes:
            raise children[0].failure()

    def _look(self, now: float) -> bool:
        """Pass on what was said and restart what crashed; False once every worker stays ended."""
        for member in self.members:
            self._pass_on(member)
            assert member.child is not None
            if member.ended or member.child.running:
                continue
            if member.due is None:
                member.collect()
                quick = now - member.started < STABLE_SECONDS
                member.quick_failures = member.quick_failures + 1 if quick else 0
                code = member.child.process.returncode
                pause = restart_after(code, member.quick_failures)
                member.ended, member.due = pause is None, now + (pause or 0.0)
                if code:
                    then = "it stays away" if pause is None else "starting it again"
                    self.say(f"{member.name}: ended with exit code {code}; {then}")
            elif now >= member.due:
                member.start(now)
        return not all(member.ended for member in self.members)

    def _pass_on(self, member: Member) -> None:
        for line in member.lines():
            self.say(f"{member.name}: {line}")
