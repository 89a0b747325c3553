"""`blocktrain worker`: train blocks for a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import (
    WORKER_DATA_DIR,
    CoordinatorOption,
    CorpusOption,
    DeviceOption,
    NiceOption,
    ThreadsOption,
)
from blocktrain.local.processes import stop_on_signals
from blocktrain.starting import limit_processor

BYTES_PER_MBIT = 1e6 / 8


def worker(
    coordinator: CoordinatorOption,
    device: DeviceOption = "auto",
    key: Annotated[
        Path | None, typer.Option(help="Key file that makes this machine the same worker again.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(help="Key, cache and training state; one folder for each worker.")
    ] = WORKER_DATA_DIR,
    corpus: CorpusOption = None,
    invite: Annotated[
        str | None, typer.Option(help="Token from the run's operator, if it asks for one.")
    ] = None,
    label: Annotated[str, typer.Option(help="A name for this worker, shown on the dashboard.")] = "",
    cache_gb: Annotated[
        float, typer.Option(help="Disk space for everything it keeps, training state too.", min=0.1)
    ] = 4.0,
    max_up: Annotated[
        float | None, typer.Option("--max-up", metavar="MBIT", help="Send at most so many Mbit/s.", min=0.05)
    ] = None,
    max_down: Annotated[
        float | None,
        typer.Option("--max-down", metavar="MBIT", help="Receive at most so many Mbit/s.", min=0.05),
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(metavar="FROM-UNTIL", help="Work at these times of the day only: 22-7, 22:30-06:15."),
    ] = None,
    max_hours: Annotated[
        float | None, typer.Option(help="Leave after so many hours of work; pauses do not count.", min=0.01)
    ] = None,
    max_rounds: Annotated[int | None, typer.Option(help="Leave after so many updates.", min=1)] = None,
    threads: ThreadsOption = None,
    nice: NiceOption = 0,
) -> None:
    """Train blocks for a coordinator. Makes outbound connections only; Ctrl-C leaves politely.

    SIGUSR1 pauses it, SIGUSR2 resumes it.
    """
    limit_processor(threads, nice)
    from blocktrain.client.address import RunLink
    from blocktrain.training.device import find_device
    from blocktrain.worker.program import WorkerOptions, run_worker
    from blocktrain.worker.shifts import Contribution, Shifts, Terms, parse_hours

    link = RunLink.parse(coordinator)
    options = WorkerOptions(
        coordinator=str(RunLink(link.url, pin=link.pin)),
        data_dir=data_dir.expanduser(),
        key=key,
        device=find_device(device),
        cache_bytes=round(cache_gb * 1e9),
        corpus=corpus,
        invite=invite or link.invite,
        label=label,
        max_up=max_up and max_up * BYTES_PER_MBIT,
        max_down=max_down and max_down * BYTES_PER_MBIT,
    )
    terms = Terms(
        hours=parse_hours(hours) if hours else None,
        max_seconds=max_hours and 3600 * max_hours,
        max_rounds=max_rounds,
    )
    given = Contribution()
    shifts = Shifts(
        terms, given, lambda stop: run_worker(options, stop, given), lambda line: typer.echo(line, err=True)
    )
    shifts.obey_signals()
    try:
        shifts.run(stop_on_signals())
    finally:
        if given.steps or given.verdicts:
            typer.echo(given.sentence(), err=True)
