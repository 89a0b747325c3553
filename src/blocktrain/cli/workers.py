"""`blocktrain workers ls|ban|rm`: see workers and keep them out.

The operator holds coordinator.key of the data folder; requests are signed with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.options import CoordinatorOption, DataDirOption, UrlArgument
from blocktrain.errors import UserError

if TYPE_CHECKING:
    from blocktrain.client.coordinator import CoordinatorClient
    from blocktrain.wire.identity import Identity
    from blocktrain.wire.messages import WorkerSummary

WorkerArgument = Annotated[
    str, typer.Argument(help="Worker id, the beginning of one, or a label; it must fit one worker only.")
]

worker_verbs = typer.Typer(help="See, ban and remove workers.", no_args_is_help=True)


@worker_verbs.command("ls")
def list_workers(
    coordinator: UrlArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Standing and contribution of every worker."""
    from rich.console import Console
    from rich.table import Table

    from blocktrain.client.coordinator import public_client
    from blocktrain.local.status_view import verdict_counts

    with public_client(coordinator) as client:
        answer = client.workers()
    if as_json:
        typer.echo(answer.model_dump_json())
        return
    # A scale, or an honest newcomer's 0.125 reads as a bad mark. With two digits it was 0.12 here and 0.13 on
    # the page, as JavaScript rounds.
    scale = f"reputation is from 0 to 1; newcomers begin at {answer.newcomer_reputation:.3g}"
    table = Table(
        "worker", "label", "state", "reputation", "rating", "assigned", "uptime", "updates", "merged", "gain",
        caption=scale if answer.judged else "this run judges nothing, so nobody has a reputation",
        caption_justify="left",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for one in answer.workers:
        state = "banned" if one.ban else "probation" if one.probation else "live" if one.live else "away"
        table.add_row(
            one.worker_id, one.label, state, f"{one.reputation:.2f}" if answer.judged else "-",
            f"{one.rating:.2f}", f"{one.assigned_versus_other:+.2f}", f"{one.uptime:.0%}",
            verdict_counts(one), str(one.merged), f"{one.gain:.3f}",
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
    with operator_client(coordinator, data_dir) as client:
        found, name = found_worker(worker_id, client.workers().workers)
        receipt = client.ban(found, request).receipt
    done = f"banned {name} for {hours:g} h" if hours else f"lifted the ban of {name}"
    typer.echo(f"{done} (ledger entry {receipt.sequence})")


@worker_verbs.command("rm")
def remove_worker(worker_id: WorkerArgument, coordinator: CoordinatorOption, data_dir: DataDirOption) -> None:
    """Forget a worker: its leases are free again, and it may join again, on probation."""
    with operator_client(coordinator, data_dir) as client:
        found, name = found_worker(worker_id, client.workers().workers)
        receipt = client.remove(found).receipt
    typer.echo(f"removed {name} (ledger entry {receipt.sequence})")


def operator_key(data_dir: Path) -> Identity:
    from blocktrain.coordinator.operator_notes import KEY_FILE
    from blocktrain.wire.identity import load_or_create

    path = data_dir.expanduser() / KEY_FILE
    if not path.exists():
        raise UserError(f"no {KEY_FILE} in {data_dir}: expected the --data-dir of the coordinator")
    return load_or_create(path)


@contextlib.contextmanager
def operator_client(url: str, data_dir: Path) -> Iterator[CoordinatorClient]:
    from blocktrain.client.coordinator import public_client

    with public_client(url, operator_key(data_dir)) as client:
        # The operator's key signs for one run, so that nobody can replay a ban elsewhere.
        client.audience = client.run().run_id
        yield client


def found_worker(text: str, workers: Sequence[WorkerSummary]) -> tuple[str, str]:
    """The id that a person means, and how to call that worker: an id is typed by its first digits, or as the
    label that stands beside it everywhere. A whole id is taken as it is: it may be banned before it joins."""
    by_label = [one for one in workers if one.label == text]
    by_id = [one for one in workers if one.worker_id.startswith(text)]
    found = by_label or (by_id if text else [])
    if len(found) == 1:
        one = found[0]
        return one.worker_id, f"{one.worker_id} ({one.label})" if one.label else one.worker_id
    if re.fullmatch(r"[0-9a-f]{32}", text):
        return text, text
    if found:
        shown = ", ".join(f"{one.worker_id[:12]} {one.label}".rstrip() for one in found[:5])
        raise UserError(f"{text!r} fits {len(found)} workers ({shown}); give more digits of the id")
    raise UserError(
        f"{text!r} is no worker of this run: expected a label, or an id by its first digits, see `blocktrain "
        "workers ls`"
    )
