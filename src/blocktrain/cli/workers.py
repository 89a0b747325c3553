"""`blocktrain workers ls|ban|rm`: see workers and keep them out.

The operator is whoever holds coordinator.key of the coordinator's data folder; requests are signed with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import CoordinatorOption, DataDirOption, UrlArgument
from blocktrain.errors import UserError

if TYPE_CHECKING:
    from blocktrain.client.coordinator import CoordinatorClient
    from blocktrain.wire.identity import Identity

WorkerArgument = Annotated[str, typer.Argument(help="Worker id, 32 hex digits.")]

worker_verbs = typer.Typer(help="See, ban and remove workers.", no_args_is_help=True)


@worker_verbs.command("ls")
def list_workers(
    coordinator: UrlArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Standing and contribution of every worker."""
    from rich.console import Console
    from rich.table import Table

    from blocktrain.client.coordinator import public_client

    answer = public_client(coordinator).workers()
    if as_json:
        typer.echo(answer.model_dump_json())
        return
    table = Table(
        "worker", "state", "reputation", "rating", "assigned", "uptime", "verdicts", "merged", "gain"
    )
    table.columns[0].no_wrap = True
    for one in answer.workers:
        state = "banned" if one.ban else "probation" if one.probation else "live" if one.live else "away"
        table.add_row(
            one.worker_id, state, f"{one.reputation:.2f}", f"{one.rating:.2f}",
            f"{one.assigned_versus_other:+.2f}", f"{one.uptime:.0%}", f"{one.good_verdicts}/{one.verdicts}",
            str(one.merged), f"{one.gain:.3f}",
        )  # fmt: skip
    console = Console()
    wide = console.options.update(max_width=1000)
    console.width = max(console.width, console.measure(table, options=wide).maximum)  # ids are to be copied
    console.print(table)


@worker_verbs.command("ban")
def ban_worker(
    worker_id: WorkerArgument,
    coordinator: CoordinatorOption,
    data_dir: DataDirOption,
    reason: Annotated[str, typer.Option(help="Shown to the worker and written to the ledger.")],
    hours: Annotated[float, typer.Option(help="Length of the ban; 0 lifts it.", min=0)] = 24.0,
) -> None:
    """Keep a worker out for some time; what it has waiting for a merge is taken back."""
    from pydantic import ValidationError

    from blocktrain.wire.messages import BanRequest

    try:
        request = BanRequest(reason=reason, seconds=3600 * hours)
    except ValidationError as error:
        raise UserError(f"--reason or --hours: {error.errors()[0]['msg']}") from None
    receipt = _operator(coordinator, data_dir).ban(_worker_id(worker_id), request).receipt
    typer.echo(f"banned {worker_id} for {hours:g} h (ledger entry {receipt.sequence})")


@worker_verbs.command("rm")
def remove_worker(worker_id: WorkerArgument, coordinator: CoordinatorOption, data_dir: DataDirOption) -> None:
    """Forget a worker: its leases are free again, and it may join again, on probation."""
    receipt = _operator(coordinator, data_dir).remove(_worker_id(worker_id)).receipt
    typer.echo(f"removed {worker_id} (ledger entry {receipt.sequence})")


def operator_key(data_dir: Path) -> Identity:
    from blocktrain.coordinator.service import KEY_FILE
    from blocktrain.wire.identity import load_or_create

    path = data_dir.expanduser() / KEY_FILE
    if not path.exists():
        raise UserError(f"no {KEY_FILE} in {data_dir}: expected the --data-dir of the coordinator")
    return load_or_create(path)


def _operator(url: str, data_dir: Path) -> CoordinatorClient:
    from blocktrain.client.coordinator import public_client

    client = public_client(url, operator_key(data_dir))
    # The operator's key signs for one run, so that nobody can replay a ban elsewhere.
    client.audience = client.run().run_id
    return client


def _worker_id(text: str) -> str:
    # Checked here, since the id becomes part of a path.
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise UserError(f"{text!r} is no worker id: expected 32 hex digits, see `blocktrain workers ls`")
    return text
