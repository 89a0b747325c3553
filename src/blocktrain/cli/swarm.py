"""The verbs of a swarm: `worker`, `swarm` and `status`. Each reads its options, wires objects, runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from blocktrain.cli.options import DeviceOption, RecipeArgument, SetOption, find_device, find_recipe
from blocktrain.config import load_recipe
from blocktrain.local.signals import stop_on_signals
from blocktrain.tracking.trackers import TrackOption, recording

DEFAULT_DATA_DIR = Path("~/.blocktrain/worker")


def worker(
    coordinator: Annotated[str, typer.Option(help="Address of the run, http(s)://HOST[:PORT].")],
    device: DeviceOption = "auto",
    key: Annotated[
        Path | None, typer.Option(help="Key file that makes this machine the same worker again.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Key, cache and training state; one folder for each worker.")
    ] = DEFAULT_DATA_DIR,
    corpus: Annotated[
        str | None, typer.Option(help="Where the run's text lies on this machine, if elsewhere.")
    ] = None,
    invite: Annotated[
        str | None, typer.Option(help="Token from the run's operator, if it asks for one.")
    ] = None,
    label: Annotated[str, typer.Option(help="A name for this worker, shown on the dashboard.")] = "",
    cache_gb: Annotated[float, typer.Option(help="Disk space for snapshots and payloads.", min=0.1)] = 4.0,
) -> None:
    """Train blocks for a coordinator. Makes outbound connections only; Ctrl-C leaves politely."""
    from blocktrain.worker.program import WorkerOptions, run_worker

    options = WorkerOptions(
        coordinator=coordinator,
        data_dir=data_dir.expanduser(),
        key=key,
        device=find_device(device),
        cache_bytes=round(cache_gb * 1e9),
        corpus=corpus,
        invite=invite,
        label=label,
    )
    run_worker(options, stop_on_signals())


def swarm(
    recipe: RecipeArgument,
    workers: Annotated[int, typer.Option(help="Worker processes to start.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, report, logs and state.")] = Path(
        "runs/swarm"
    ),
    device: DeviceOption = "auto",
    set_: SetOption = [],  # noqa: B006
    track: TrackOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the report on stdout.")] = False,
) -> None:
    """Run a coordinator and its workers on this machine, to a checkpoint and a report."""
    import json

    from blocktrain.local.assembly import save_final_checkpoint
    from blocktrain.local.swarm import SwarmOptions, run_swarm

    file = find_recipe(recipe).absolute()
    resolved = load_recipe(file, set_)
    settings = resolved.to_dict()
    options = SwarmOptions(file, workers, out.absolute(), tuple(set_), device, settings)
    with recording(options.out, track, resolved.name, settings) as recorder:
        stop = stop_on_signals()
        report = run_swarm(options, Console(stderr=True), stop, save_final_checkpoint, recorder.status)
    if as_json:
        typer.echo(json.dumps(report))


def status(
    url: Annotated[str, typer.Argument(help="Address of the coordinator.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Show how a run is doing."""
    from blocktrain.cli.status_view import status_tables
    from blocktrain.client.coordinator import CoordinatorClient
    from blocktrain.client.traffic import Traffic
    from blocktrain.wire.identity import Identity

    client = CoordinatorClient(
        url, Identity.generate(), Traffic(), threading.Event(), lambda line: typer.echo(line, err=True), 2
    )
    answer = client.status()
    if as_json:
        typer.echo(answer.model_dump_json())
    else:
        Console().print(status_tables(answer))
