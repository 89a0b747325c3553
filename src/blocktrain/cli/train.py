"""`blocktrain train`: a whole run on one machine."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

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

    from blocktrain import api
    from blocktrain.local.status_view import results_table
    from blocktrain.local.terminal import TrainingProgress, step_costs
    from blocktrain.tracking.curves import draw_curves
    from blocktrain.tracking.trackers import METRICS_FILE

    resolved = load_recipe(find_recipe(recipe), set_)
    console = Console(stderr=True)
    with (
        opened_model(from_) if from_ is not None else nullcontext() as start,
        TrainingProgress(console) as progress,
    ):
        progress.plan(step_costs(resolved))
        report = api.train(
            resolved,
            out,
            device=device,
            resume=resume,
            start=start,
            observer=progress,
            stop=stop_on_signals(),
            track=track,
        )
    # Last: a machine without a working matplotlib still has checkpoint and report.
    draw_curves(report, out / "curves.png")
    Console().print(results_table(report))
    console.print(f"\nreport      {out / 'report.json'}\ncurves      {out / 'curves.png'}", highlight=False)
    console.print(f"checkpoint  {out / 'checkpoint'}\nsample      {out / 'sample.txt'}", highlight=False)
    console.print(f"metrics     {out / METRICS_FILE}", highlight=False)
