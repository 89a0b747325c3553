"""What a worker tells the person at its terminal: one line per event, and a live view where there is one.

Knows nothing of what the events mean for training. Without a terminal only the lines are written, verb
first, then key=value, so that a log can be read at 3 a.m. and searched.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blocktrain.client.traffic import Traffic

SHOWN_LINES = 8
LINE_SECONDS = 5.0


@dataclass
class Doing:
    """What the trainer is at."""

    block: int | None = None
    round: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    base_version: int = 0
    note: str = "starting"
    verdicts: Counter[str] = field(default_factory=Counter)


class Progress:
    """Plain lines; `LiveProgress` adds a view that is redrawn."""

    def __init__(self, worker: str, traffic: Traffic, stream: TextIO | None = None) -> None:
        self.worker, self.traffic = worker, traffic
        self.stream = stream or sys.stderr
        self.doing = Doing()
        self._lock = threading.Lock()
        self._shown_at = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        """An event worth keeping."""
        with self._lock:
            self._write(f"{time.strftime('%H:%M:%S')} {text}")

    def _write(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def waiting(self, reason: str) -> None:
        if self.doing.note != reason:
            self.doing.note = reason
            self.line(f"wait reason={reason!r}")

    def assigned(self, block: int, round_: int, steps: int, reason: str) -> None:
        self.doing.block, self.doing.round, self.doing.steps, self.doing.step = block, round_, steps, 0
        self.doing.note = reason
        self.line(f"train block={block} round={round_} steps={steps} reason={reason!r}")

    def stepped(self, step: int, loss: float | None) -> None:
        self.doing.step = step
        self.doing.loss = loss if loss is not None else self.doing.loss
        now = time.monotonic()
        if now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            self._still_training()

    def _still_training(self) -> None:
        doing = self.doing
        loss = "-" if doing.loss is None else f"{doing.loss:.4f}"
        self.line(
            f"step block={doing.block} round={doing.round} step={doing.step}/{doing.steps} loss={loss} "
            f"up={_size(self._up())} down={_size(self._down())}"
        )

    def judged(self, block: int, round_: int, outcome: str, age: int, sentence: str) -> None:
        self.doing.verdicts[outcome] += 1
        self.line(f"verdict block={block} round={round_} outcome={outcome} age={age} reason={sentence!r}")

    def rebased(self, block: int, version: int) -> None:
        self.doing.base_version = version
        self.line(f"rebase block={block} version={version}")

    def _up(self) -> int:
        return sum(self.traffic.bytes_up().values())

    def _down(self) -> int:
        return sum(self.traffic.bytes_down().values())


class LiveProgress(Progress):
    def __init__(self, worker: str, traffic: Traffic, console: Console) -> None:
        super().__init__(worker, traffic)
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._live = Live(console=console, get_renderable=self._view, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _write(self, text: str) -> None:
        self._lines.append(text)

    def _still_training(self) -> None:
        """The live view shows it already."""

    def _view(self) -> Group:
        doing, seconds = self.doing, self.traffic.seconds()
        table = Table.grid(padding=(0, 2))
        table.add_row("worker", self.worker)
        table.add_row("block", "-" if doing.block is None else f"{doing.block}, round {doing.round}")
        table.add_row("step", f"{doing.step} of {doing.steps} {_bar(doing.step, doing.steps)}")
        table.add_row("loss", "-" if doing.loss is None else f"{doing.loss:.4f}")
        table.add_row("snapshot", f"version {doing.base_version}")
        table.add_row(
            "verdicts", ", ".join(f"{n} {what}" for what, n in doing.verdicts.items()) or "none yet"
        )
        table.add_row("traffic", f"{_size(self._up())} up, {_size(self._down())} down")
        table.add_row("seconds", ", ".join(f"{value:.0f} {what}" for what, value in seconds.items()))
        table.add_row("", doing.note)
        return Group(table, Text("\n".join(self._lines), style="dim"))


def make_progress(worker: str, traffic: Traffic) -> Progress:
    console = Console(stderr=True)
    return LiveProgress(worker, traffic, console) if console.is_terminal else Progress(worker, traffic)


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = width * done // max(1, total)
    return "█" * filled + "·" * (width - filled)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
