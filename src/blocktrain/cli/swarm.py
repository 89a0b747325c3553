"""`blocktrain swarm`: a coordinator and its workers on this machine."""

from __future__ import annotations

import json
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
)
from blocktrain.config import find_recipe, load_recipe
from blocktrain.local.processes import stop_on_signals
from blocktrain.starting import limit_processor


def swarm(
    recipe: RecipeArgument,
    workers: Annotated[int, typer.Option(help="Worker processes to start.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, report, logs and state.")] = Path(
        "runs/swarm"
    ),
    device: DeviceOption = "auto",
    from_: FromOption = None,
    set_: SetOption = [],  # noqa: B006
    track: TrackOption = [],  # noqa: B006
    threads: ThreadsOption = None,
    nice: NiceOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report on stdout.")] = False,
) -> None:
    """Run a coordinator and its workers on this machine, to a checkpoint and a report.

    `--threads` counts for each worker; without it they share the cores evenly.
    """
    limit_processor(threads, nice)  # inherited by the coordinator and the workers
    from rich.console import Console

    from blocktrain.local.swarm import SwarmOptions, run_swarm
    from blocktrain.tracking.trackers import recording

    # Absolute: the coordinator is another process and need not share our folder.
    file = find_recipe(recipe).absolute()
    resolved = load_recipe(file, set_)
    start = () if from_ is None else ("--from", from_)
    options = SwarmOptions(file, workers, out.absolute(), tuple(set_), device, resolved, start)
    with recording(options.out, track, resolved.name, resolved.to_dict()) as recorder:
        stop = stop_on_signals()
        report = run_swarm(options, Console(stderr=True), stop, recorder.status)
    if as_json:
        typer.echo(json.dumps(report))
