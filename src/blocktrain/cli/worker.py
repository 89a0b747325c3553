"""`blocktrain worker`: train blocks for a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import WORKER_DATA_DIR, CoordinatorOption, CorpusOption, DeviceOption
from blocktrain.local.processes import stop_on_signals
from blocktrain.training.device import find_device


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
        float, typer.Option(help="Disk space for text, snapshots and payloads.", min=0.1)
    ] = 4.0,
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
