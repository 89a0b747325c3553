"""What people see on a terminal: progress of long work on stderr, and a model's text on stdout.

Strangers trained the model, so its text may hold what a terminal would obey: control characters are replaced.
Where stdout is no terminal (a pipe, a file), text goes out as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from blocktrain.config import Recipe

PLAIN_LINE_SECONDS = 10.0
KEPT = b"\n\t"
# Bytes from 128 on stay: they are parts of UTF-8 characters, which `harmless` would have to see whole.
_BYTES = bytes(ord("?") if (n < 32 and n not in KEPT) or n == 127 else n for n in range(256))
_CHARACTERS = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), *range(127, 160)) if n not in KEPT}


def harmless_bytes(text: bytes) -> bytes:
    return text.translate(_BYTES)


def harmless(text: str) -> str:
    """Without escape sequences, bells and other control characters; line breaks and tabs stay."""
    return text.translate(_CHARACTERS)


def write(text: str) -> None:
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_bytes(text: bytes) -> None:
    """Bytes all the way: a prompt may hold bytes of another encoding, and a sample half a character."""
    sys.stdout.buffer.write(harmless_bytes(text) if sys.stdout.isatty() else text)
    sys.stdout.buffer.flush()


class TrainingProgress:
    """Loss, bytes per second and time left for each unit of a local run: bars on a terminal, else lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.tasks: dict[str, TaskID] = {}
        self.begun: dict[str, tuple[float, int]] = {}
        self.costs: dict[str, float] = {}
        self.done: dict[str, int] = {}
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
                TextColumn("{task.fields[run_left]}"),
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

    def plan(self, costs: Mapping[str, float]) -> None:
        """What one step of each unit costs beside the others: a reference has the layers of all blocks."""
        self.costs = dict(costs)

    def run_left(self, now: float, total: int) -> float | None:
        """Seconds left for everything planned, from what this process has done so far; of the unit at work no
        less than its own speed says, or the run would seem to end before it."""
        made = {unit: self.done[unit] - first for unit, (_, first) in self.begun.items()}
        spent = sum(self.costs.get(unit, 0) * steps for unit, steps in made.items())
        if not spent:
            return None
        ahead = sum(cost * (total - self.done.get(unit, 0)) for unit, cost in self.costs.items())
        by_plan = ahead / spent * (now - min(start for start, _ in self.begun.values()))
        at_work, (start, _) = list(self.begun.items())[-1]
        by_unit = (now - start) / max(made[at_work], 1) * (total - self.done[at_work])
        return max(by_plan, by_unit)

    def started(self, unit: str, step: int, total: int) -> None:
        self.done[unit] = step
        if step >= total:  # a resumed run that had finished this unit
            self.message(f"{unit}: all {total} steps are done")
            return
        self.begun[unit] = (time.monotonic(), step)
        if self.bars is not None:
            self.tasks[unit] = self.bars.add_task(
                unit, total=total, completed=step, ce="  …  ", rate="", run_left=""
            )
        else:
            where = f" from step {step}" if step else ""
            self.console.print(f"training {unit}: {total} steps{where}", highlight=False)

    def stepped(self, unit: str, step: int, total: int, ce: float, tokens: int) -> None:
        now = time.monotonic()
        start, first = self.begun[unit]
        self.done[unit] = step
        run_left = self.run_left(now, total)
        told = "" if run_left is None else f"run_left={run_left:.0f}s"
        # The rate counts the steps of this process only: a resumed run did the others earlier.
        rate = _per_second(tokens * (step - first) / max(now - start, 1e-9))
        if self.bars is not None:
            self.bars.update(self.tasks[unit], completed=step, ce=f"{ce:.3f}", rate=rate, run_left=told)
        elif now - self.last_line >= PLAIN_LINE_SECONDS or step == total:
            self.last_line = now
            left = (now - start) / max(step - first, 1) * (total - step)
            line = f"  {unit} step={step}/{total} loss={ce:.3f} rate={rate} left={left:.0f}s {told}"
            self.console.print(line.rstrip(), highlight=False)

    def message(self, text: str) -> None:
        self.console.print(text, highlight=False)


class ByteProgress:
    """Bytes done, rate and time left of one step after another: a bar on a terminal, else plain lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.step = ""
        self.begun = (0.0, 0)
        self.last_line = 0.0
        self.task: TaskID | None = None
        self.bars = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}  {task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    @contextmanager
    def shown(self) -> Iterator[ByteProgress]:
        with self.bars:
            yield self

    def moved(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if step != self.step:
            # A preparation that goes on begins in the middle; what was done before must not count as speed.
            self.step, self.begun, self.last_line = step, (now, done), now
            self.task = self.bars.add_task(step, total=total or None, completed=done, amount="", rate="")
            return
        start, first = self.begun
        rate = (done - first) / max(now - start, 1e-9)
        amount = f"{done / 1e6:.1f}/{total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
        if self.task is not None and self.console.is_terminal:
            self.bars.update(self.task, completed=done, amount=amount, rate=f"{rate / 1e6:.1f} MB/s")
        elif now - self.last_line >= PLAIN_LINE_SECONDS:
            self.last_line = now
            left = f" left={(total - done) / rate:.0f}s" if total and rate > 0 else ""
            self.console.print(
                f"{step} {amount} rate={rate / 1e6:.1f} MB/s{left}", highlight=False, soft_wrap=True
            )


def step_costs(recipe: Recipe) -> dict[str, float]:
    """Layers that one step of each unit costs: the reference has those of all blocks."""
    model = recipe.model
    costs = {f"block {block}": model.step_cost(block) for block in range(model.blocks)}
    return costs | ({"reference": model.layers_before(model.blocks)} if recipe.training.reference else {})


def _per_second(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}/s"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB/s"
