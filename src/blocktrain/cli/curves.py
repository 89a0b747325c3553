"""The picture of a run's loss curves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from blocktrain.training.storage import write_file


def draw_curves(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=144, layout="constrained")
    axes = figure.subplots()
    for name, curve in report["curves"].items():
        reference = name == "reference"
        steps, losses = [point[0] for point in curve], [point[1] for point in curve]
        label = "end-to-end reference" if reference else name
        axes.plot(
            steps, losses, label=label, color="black" if reference else None, lw=1.6 if reference else 1
        )
    composed = report["composed"]["consensus"]["ce"]
    axes.axhline(composed, ls="--", color="tab:red", lw=1.2, label=f"composed, held out: {composed:.3f}")
    axes.axhline(report["bigram"]["ce"], ls=":", color="grey", lw=1.2, label="bigram counts, held out")
    highest = max(report["bigram"]["ce"] * 1.35, composed * 1.35)
    axes.set(xlabel="step", ylabel="cross entropy (nats per byte)", ylim=(composed * 0.85, highest))
    axes.set_title(f"{report['name']}: each block trained alone, beside end-to-end", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
