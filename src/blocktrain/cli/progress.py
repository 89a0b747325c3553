"""Live progress of long work: a bar on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_LINE_SECONDS = 10.0


class TrainingProgress:
    """Watches a local run. Loss, bytes per second and time left for each unit."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tasks: dict[str, TaskID] = {}
        self.begun: dict[str, tuple[float, int]] = {}
        self.last_line = 0.0
        self.bars: Progress | None = None
        if console.is_terminal:
            self.bars = Progress(
                TextColumn("{task.description:<10}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
                TextColumn("loss {task.fields[ce]}  {task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )

    def __enter__(self) -> TrainingProgress:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars is not None:
            self.bars.stop()

    def started(self, unit: str, step: int, total: int) -> None:
        self.begun[unit] = (time.monotonic(), step)
        if self.bars is not None:
            self.tasks[unit] = self.bars.add_task(unit, total=total, completed=step, ce="  …  ", rate="")
        else:
            where = f" from step {step}" if step else ""
            self.console.print(f"training {unit}: {total} steps{where}", highlight=False)

    def stepped(self, unit: str, step: int, total: int, ce: float, tokens: int) -> None:
        now = time.monotonic()
        start, first = self.begun[unit]
        rate = tokens * (step - first) / max(now - start, 1e-9)
        if self.bars is not None:
            self.bars.update(self.tasks[unit], completed=step, ce=f"{ce:.3f}", rate=f"{_bytes(rate)}/s")
        elif now - self.last_line >= PLAIN_LINE_SECONDS or step == total:
            self.last_line = now
            left = (now - start) / max(step - first, 1) * (total - step)
            self.console.print(
                f"  {unit} step={step}/{total} loss={ce:.3f} rate={_bytes(rate)}/s left={left:.0f}s",
                highlight=False,
            )

    def message(self, text: str) -> None:
        self.console.print(text, highlight=False)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
