"""`blocktrain train`: a whole run on one machine."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import (
    DeviceOption,
    FromOption,
    NiceOption,
    RecipeArgument,
    SetOption,
    ThreadsOption,
    TrackOption,
    opened_model,
)
from blocktrain.config import find_recipe, load_recipe
from blocktrain.local.processes import stop_on_signals
from blocktrain.starting import limit_processor

if TYPE_CHECKING:
    from rich.table import Table

    from blocktrain.training.report import TrainingReport


def train(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder for checkpoint, report, curves and sample.")],
    device: DeviceOption = "auto",
    set_: SetOption = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    from_: FromOption = None,
    track: TrackOption = [],  # noqa: B006
    threads: ThreadsOption = None,
    nice: NiceOption = 0,
) -> None:
    """Train every block alone, then the end-to-end reference, and report both."""
    limit_processor(threads, nice)
    from rich.console import Console

    from blocktrain.local.terminal import TrainingProgress
    from blocktrain.tracking.curves import draw_curves
    from blocktrain.tracking.trackers import METRICS_FILE, RecordedSteps, recording
    from blocktrain.training.device import find_device
    from blocktrain.training.local import LocalRun
    from blocktrain.training.memory import check_fits
    from blocktrain.training.setup import Setup

    resolved = load_recipe(find_recipe(recipe), set_)
    chosen = find_device(device)
    check_fits(Setup.of(resolved), chosen)
    console = Console(stderr=True)
    with (
        opened_model(from_) if from_ is not None else nullcontext() as start,
        recording(out, track, resolved.name, resolved.to_dict()) as recorder,
        TrainingProgress(console) as progress,
    ):
        observer = RecordedSteps(progress, recorder)
        run = LocalRun(resolved, out, chosen, observer, stop_on_signals(), start)
        progress.plan({unit.name: unit.block.num_layers for unit in run.units})
        run.train(resume=resume)
        report = run.finish()
        recorder.report(report)
    # Last: a machine without a working matplotlib still has checkpoint and report.
    draw_curves(report, out / "curves.png")
    Console().print(results_table(report))
    console.print(f"\nreport      {out / 'report.json'}\ncurves      {out / 'curves.png'}", highlight=False)
    console.print(f"checkpoint  {out / 'checkpoint'}\nsample      {out / 'sample.txt'}", highlight=False)
    console.print(f"metrics     {out / METRICS_FILE}", highlight=False)


def results_table(report: TrainingReport) -> Table:
    """Everything scored on the same held-out text, best composed model last but one."""
    from rich.table import Table

    scores = report.scores
    table = Table(title=f"{report.name}: cross entropy on {scores.scored_tokens:,} held-out bytes")
    table.add_column("model")
    for column in ("nats/byte", "perplexity", "bits/byte"):
        table.add_column(column, justify="right")
    # The bigram first, as the floor: a model that is not below it has learned nothing.
    rows = [("bigram counts", scores.bigram_ce)]
    rows += [(f"block {i} alone", score.ce) for i, score in enumerate(scores.blocks)]
    if scores.euler is not None:
        rows.append(("composed: euler (from noise)", scores.euler.ce))
    rows.append(("composed: consensus", scores.consensus.ce))
    if scores.reference is not None:
        rows.append(("end-to-end reference", scores.reference.ce))
    for name, ce in rows:
        style = "bold" if "consensus" in name else None
        table.add_row(name, f"{ce:.4f}", f"{math.exp(ce):.2f}", f"{ce / math.log(2):.3f}", style=style)
    if scores.gap is not None:
        table.caption = f"gap of the best composed model to end-to-end: {scores.gap:+.4f} nats/byte"
    return table
