"""Pictures of loss curves: of a run on one machine, and of a swarm beside end-to-end training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.training.report import TrainingReport
from blocktrain.training.storage import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(report: TrainingReport, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=144, layout="constrained")
    axes = figure.subplots()
    for name, curve in report.curves.items():
        reference = name == "reference"
        steps, losses = [point[0] for point in curve], [point[1] for point in curve]
        label = "end-to-end reference" if reference else name
        axes.plot(
            steps, losses, label=label, color="black" if reference else None, lw=1.6 if reference else 1
        )
    composed, bigram = report.scores.consensus.ce, report.scores.bigram_ce
    axes.axhline(composed, ls="--", color="tab:red", lw=1.2, label=f"composed, held out: {composed:.3f}")
    axes.axhline(bigram, ls=":", color="grey", lw=1.2, label="bigram counts, held out")
    # Cut at a third above the bigram: the first steps start at 5.5 nats and would flatten everything that
    # matters.
    highest = 1.35 * max(bigram, composed)
    axes.set(xlabel="step", ylabel="cross entropy (nats per byte)", ylim=(composed * 0.85, highest))
    axes.set_title(f"{report.name}: each block trained alone, beside end-to-end", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    save(figure, path)


def draw_swarm(
    composed: list[tuple[float, float]],
    end_to_end: list[tuple[int, float]],
    references: dict[str, float],
    path: Path,
) -> None:
    """Held-out loss of the composed model by steps of each block, and of what it is held against."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=144, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*end_to_end, strict=True), color="black", lw=0.8, alpha=0.6, label="end to end, training")
    axes.plot(*zip(*composed, strict=True), color="tab:red", marker="o", lw=1.6, label="swarm, held out")
    for (name, ce), style in zip(references.items(), ("--", ":"), strict=False):
        axes.axhline(ce, ls=style, color="grey", lw=1.2, label=f"{name}, held out: {ce:.3f}")
    lowest = min(ce for _, ce in composed)
    axes.set(xlabel="steps of each block", ylabel="cross entropy (nats per byte)")
    axes.set_ylim(lowest * 0.9, max(lowest * 2.2, *references.values()))
    axes.set_title("Blocks trained by strangers over HTTP, beside the same layers end to end", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    # In memory first: the file is then written whole or not at all, like every other.
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
