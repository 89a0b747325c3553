"""A volunteer's terms: when a worker works, and what it gave when it leaves.

A pause is a polite leave: the assignment is handed back, what was trained since the last update stays as
error feedback, and the worker comes back as the same one, in the same process. So a pause can do nothing that
Ctrl-C and starting again could not, and other workers never wait for a sleeping one.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType

from blocktrain.errors import StoppedError, UserError
from blocktrain.wording import counted, duration, size

LOOK_SECONDS = 0.5
PAUSE_FILE = "paused"
"""A file and not a signal: it needs no process id, and a worker that is started again stays paused."""
CONTRIBUTION_FILE = "contribution.json"
MINUTES_OF_A_DAY = 24 * 60


class Wish(Enum):
    WORK = "work"
    PAUSE = "pause"
    LEAVE = "leave"


@dataclass(frozen=True)
class Terms:
    hours: tuple[int, int] | None = None
    """From and until, in minutes of the local day; until may be the next morning."""
    max_seconds: float | None = None
    max_rounds: int | None = None


@dataclass
class Contribution:
    """What a worker gave, over all its shifts."""

    seconds: float = 0.0
    computing_seconds: float = 0.0
    steps: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    text_bytes: int = 0
    """Fetched of the run's text; not among the bytes down."""

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(
            *(getattr(self, part.name) + getattr(other, part.name) for part in dataclasses.fields(self))
        )

    def sentence(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.verdicts.items()) or "none"
        return (
            f"contributed {counted(self.verdicts.total(), 'update')} ({outcomes}), "
            f"{counted(self.steps, 'step')} in {duration(self.computing_seconds)} of computing, "
            f"{size(self.bytes_up)} up, {size(self.bytes_down)} down"
            + (f", {size(self.text_bytes)} of the run's text" if self.text_bytes else "")
        )


def parse_hours(text: str) -> tuple[int, int]:
    """`22-7` or `22:30-06:15`."""
    found = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", text)
    if found is not None:
        first, first_minute, last, last_minute = (int(part or 0) for part in found.groups())
        begin, end = 60 * first + first_minute, 60 * last + last_minute
        if begin != end and max(begin, end) <= MINUTES_OF_A_DAY and max(first_minute, last_minute) < 60:
            return begin, end
    raise UserError(f"--hours {text!r}: expected two times of the day, for instance 22-7 or 22:30-06:15")


def decide(
    terms: Terms, *, minute: int, asked_to_pause: str | None, worked_seconds: float, rounds: int
) -> tuple[Wish, str]:
    """What a worker should do now, and why. Leaving goes first: nobody waits for what will not come."""
    if terms.max_rounds is not None and rounds >= terms.max_rounds:
        return Wish.LEAVE, f"{counted(rounds, 'round')} done, as --max-rounds asks"
    if terms.max_seconds is not None and worked_seconds >= terms.max_seconds:
        return Wish.LEAVE, f"{worked_seconds / 3600:.1f} h are done, as --max-hours asks"
    if asked_to_pause is not None:
        return Wish.PAUSE, asked_to_pause
    if terms.hours is not None:
        begin, end = terms.hours
        inside = begin <= minute < end if begin < end else minute >= begin or minute < end
        if not inside:
            return Wish.PAUSE, f"until {begin // 60:02}:{begin % 60:02}, as --hours asks"
    return Wish.WORK, "working"


class Shifts:
    """Runs a worker while its terms allow it. `work` gets the event that ends its shift."""

    def __init__(
        self,
        terms: Terms,
        contribution: Contribution,
        work: Callable[[threading.Event], None],
        say: Callable[[str], None],
        minute: Callable[[], int] = lambda: time.localtime().tm_hour * 60 + time.localtime().tm_min,
        folder: Path | None = None,
    ) -> None:
        """`folder` is the worker's data folder, where `blocktrain pause` leaves a file."""
        self.terms, self.contribution, self.work, self.say, self.minute = (
            terms, contribution, work, say, minute,
        )  # fmt: skip
        self.signalled = False
        # The folder above is that of all workers of one `worker --devices`.
        self.pause_files = [] if folder is None else [one / PAUSE_FILE for one in (folder, folder.parent)]

    def obey_signals(self) -> None:
        """SIGUSR1 pauses, SIGUSR2 resumes; Windows has neither."""

        def pause(_: int, __: FrameType | None) -> None:
            self.signalled = True

        def resume(_: int, __: FrameType | None) -> None:
            self.signalled = False

        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, pause)
            signal.signal(signal.SIGUSR2, resume)

    def run(self, stop: threading.Event) -> None:
        """Until the run is finished, the terms are met or `stop` is set."""
        told = ""
        while not stop.is_set():
            wish, why = self._wish()
            if wish is Wish.LEAVE:
                self.say(f"leaving: {why}")
                return
            if wish is Wish.PAUSE:
                if why != told:
                    self.say(f"paused: {why}")
                told = why
                stop.wait(LOOK_SECONDS)
                continue
            if told:
                self.say("resumed")
            told = ""
            if self._one_shift(stop):
                return

    def _wish(self) -> tuple[Wish, str]:
        given, asked = self.contribution, None
        if self.signalled:
            asked = "asked to by SIGUSR1; SIGUSR2 resumes"
        elif any(file.exists() for file in self.pause_files):
            asked = "asked to by `blocktrain pause`; `blocktrain resume` goes on"
        return decide(
            self.terms,
            minute=self.minute(),
            asked_to_pause=asked,
            worked_seconds=given.seconds,
            rounds=given.verdicts.total(),
        )

    def _one_shift(self, stop: threading.Event) -> bool:
        """True if the worker ended by itself: the run is finished."""
        ended, cut_short = threading.Event(), threading.Event()
        begun, before = time.monotonic(), self.contribution.seconds

        def watch() -> None:
            while not cut_short.is_set():
                self.contribution.seconds = before + time.monotonic() - begun
                if stop.is_set() or self._wish()[0] is not Wish.WORK:
                    cut_short.set()
                    ended.set()
                elif ended.wait(LOOK_SECONDS):
                    return

        watcher = threading.Thread(target=watch, name="shift", daemon=True)
        watcher.start()
        try:
            self.work(ended)
        except StoppedError:
            # Before it had joined. For a pause that is nothing to tell; a stop is the caller's affair.
            if stop.is_set() or not cut_short.is_set():
                raise
        finally:
            by_itself = not cut_short.is_set()
            ended.set()
            watcher.join()
            self.contribution.seconds = before + time.monotonic() - begun
        return by_itself
