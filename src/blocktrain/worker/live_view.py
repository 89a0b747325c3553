"""What a worker tells the person at its terminal: one line per event, and a live view where there is one.

Knows nothing of what the events mean for training. Without a terminal only the lines are written, verb first,
then key=value, so that a log can be read at 3 a.m. and searched.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blocktrain.client.traffic import Traffic
from blocktrain.wording import duration, size
from blocktrain.worker.shifts import Contribution

SHOWN_LINES = 8
LINE_SECONDS = 5.0


class PlainView:
    """Plain lines; `LiveView` adds a table that is redrawn."""

    def __init__(self, worker: str, traffic: Traffic, stream: TextIO | None = None) -> None:
        self.worker, self.traffic, self.stream = worker, traffic, stream or sys.stderr
        self.block: int | None = None
        self.round = self.step = self.steps = self.version = 0
        self.loss: float | None = None
        self.run_seconds_left: float | None = None
        self.note = "starting"
        self.verdicts: Counter[str] = Counter()
        self.given = Contribution()
        self._lock = threading.Lock()
        self._shown_at = 0.0

    def __enter__(self) -> PlainView:
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
        # Asked every second, a waiting worker would otherwise say the same thing every second.
        if self.note != reason:
            self.note = reason
            self.line(f"wait reason={reason!r}")

    def assigned(self, block: int, round_: int, steps: int, reason: str) -> None:
        self.block, self.round, self.steps, self.step, self.note = block, round_, steps, 0, reason
        self.line(f"train block={block} round={round_} steps={steps} reason={reason!r}")

    def stepped(self, step: int, loss: float | None) -> None:
        self.step, self.loss = step, self.loss if loss is None else loss
        now = time.monotonic()
        # A step may take milliseconds; a log of every one would be larger than the snapshots.
        if now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            self._still_training()

    def _still_training(self) -> None:
        left = "" if self.run_seconds_left is None else f" run_left={self.run_seconds_left:.0f}s"
        up, down = self._moved()
        self.line(
            f"step block={self.block} round={self.round} step={self.step}/{self.steps} loss={self._loss()} "
            f"up={up} down={down}{left}"
        )

    def _moved(self) -> tuple[str, str]:
        up, down = (sum(self.traffic.bytes_of(way).values()) for way in ("up", "down"))
        return size(up), size(down)

    def _loss(self) -> str:
        return "-" if self.loss is None else f"{self.loss:.4f}"

    def judged(
        self, block: int, round_: int, outcome: str, age: int, sentence: str, *, told: bool = False
    ) -> None:
        if not told:  # or an update that a pause fell on would be two in the summary, and for --max-rounds
            self.verdicts[outcome] += 1
            self.given.verdicts[outcome] += 1
        elif outcome != "refused":  # the same line stands above the pause
            return
        self.line(f"verdict block={block} round={round_} outcome={outcome} age={age} reason={sentence!r}")

    def rebased(self, block: int, version: int) -> None:
        self.version = version
        self.line(f"rebase block={block} version={version}")


class LiveView(PlainView):
    def __init__(self, worker: str, traffic: Traffic, console: Console) -> None:
        super().__init__(worker, traffic)
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A worker that was refused has nothing to show, and its panel would hide the sentence that says why.
        self._live.transient = self.block is None and not self._lines
        self._live.stop()

    def _write(self, text: str) -> None:
        self._lines.append(text)

    def _still_training(self) -> None:
        """The table shows it already."""

    def _table(self) -> Group:
        filled = 20 * self.step // max(1, self.steps)
        verdicts = ", ".join(f"{count} {outcome}" for outcome, count in self.verdicts.items())
        up, down = self._moved()
        seconds = (f"{value:.0f} {what}" for what, value in self.traffic.seconds().items())
        table = Table.grid(padding=(0, 2))
        table.add_row("worker", self.worker)
        table.add_row("block", "-" if self.block is None else f"{self.block}, round {self.round}")
        table.add_row("step", f"{self.step} of {self.steps} {'█' * filled}{'·' * (20 - filled)}")
        table.add_row("loss", self._loss())
        table.add_row("snapshot", f"version {self.version}")
        if self.run_seconds_left is not None:
            table.add_row("run", f"about {duration(self.run_seconds_left)} left")
        table.add_row("verdicts", verdicts or "none yet")
        table.add_row("traffic", f"{up} up, {down} down")
        table.add_row("seconds", ", ".join(seconds))
        table.add_row("", self.note)
        return Group(table, Text("\n".join(self._lines), style="dim"))


def open_view(worker: str, traffic: Traffic) -> PlainView:
    console = Console(stderr=True)
    # A table that redraws itself makes a mess of a log file.
    return LiveView(worker, traffic, console) if console.is_terminal else PlainView(worker, traffic)
