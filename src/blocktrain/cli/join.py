"""`blocktrain join`: everything a volunteer needs, in one link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import WORKER_DATA_DIR, CorpusOption, DeviceOption
from blocktrain.cli.worker import worker


def join(
    link: Annotated[str, typer.Argument(help="The link, or the address, that the run's host sent.")],
    device: DeviceOption = "auto",
    data_dir: Annotated[
        Path, typer.Option(help="Key, cache and training state; one folder for each worker.")
    ] = WORKER_DATA_DIR,
    corpus: CorpusOption = None,
    label: Annotated[str, typer.Option(help="A name for this worker, shown on the dashboard.")] = "",
    cache_gb: Annotated[float, typer.Option(help="Disk space for everything it keeps.", min=0.1)] = 4.0,
) -> None:
    """Join a run by its link: shows what it will use of this machine, then trains. Ctrl-C leaves politely."""
    from blocktrain.client.coordinator import public_client
    from blocktrain.doctor.machine import read_device, read_disk
    from blocktrain.doctor.plan import joining_plan

    folder = data_dir.expanduser()
    with public_client(link, report=lambda line: typer.echo(line, err=True)) as client:
        plan = joining_plan(
            client.url, client.run(), client.status(), read_device(device), read_disk(folder), cache_gb
        )
    for line in plan:
        typer.echo(line, err=True)
    worker(
        coordinator=link,
        device=device,
        data_dir=data_dir,
        corpus=corpus,
        label=label,
        cache_gb=cache_gb,
    )
