"""`blocktrain fleet`: many workers on machines that another program hands out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import CoordinatorOption, CorpusOption, to_stderr
from blocktrain.cli.worker import CacheOption, LabelOption

fleet_verbs = typer.Typer(help="Many workers on a cluster that Ray manages.", no_args_is_help=True)


@fleet_verbs.command("ray")
def ray(
    coordinator: CoordinatorOption,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Workers to place on the cluster.")],
    address: Annotated[
        str | None,
        typer.Option(
            help="The Ray cluster, such as auto or ray://HOST:10001; default: RAY_ADDRESS, or a new one here."
        ),
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs of a worker; default: one where the cluster has any.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs of a worker.")] = 1.0,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Folder on each machine; every worker has one in it.")
    ] = Path("~/.blocktrain/fleet"),
    corpus: CorpusOption = None,
    invite: Annotated[
        str | None, typer.Option(help="Tokens from the run's operator, one for each worker, joined by +.")
    ] = None,
    label: LabelOption = "",
    cache_gb: CacheOption = 4.0,
) -> None:
    """Run workers as Ray actors: started again where one dies, until the run is finished.

    Every machine of the cluster needs blocktrain installed. Ctrl-C lets all workers leave politely.
    """
    from blocktrain.client.address import RunLink
    from blocktrain.local.ray_fleet import RayFleet, run_fleet

    link = RunLink.parse(coordinator)
    tokens = (invite or link.invite or "").split("+")
    fleet = RayFleet(
        coordinator=str(RunLink(link.url, pin=link.pin)),
        workers=workers,
        folder=data_dir,
        corpus=corpus,
        label=label,
        invites=[token for token in tokens if token],
        cache_bytes=round(cache_gb * 1e9),
        cpus=cpus,
        gpus=gpus,
    )
    run_fleet(fleet, address, to_stderr)
