"""The verbs of trust: `judge`, `invite`, `workers ls|ban|rm`, `ledger verify`, `contributions`.

An operator is who holds coordinator.key of the coordinator's data folder; requests are signed with it.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blocktrain.cli.options import DeviceOption, find_device
from blocktrain.errors import UserError

if TYPE_CHECKING:
    from blocktrain.client.coordinator import CoordinatorClient
    from blocktrain.wire.identity import Identity

DataDirOption = Annotated[
    Path, typer.Option("--data-dir", help="The coordinator's data folder, with its key.")
]
UrlOption = Annotated[str, typer.Option("--coordinator", help="Address of the run, http(s)://HOST[:PORT].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
WorkerArgument = Annotated[str, typer.Argument(help="Worker id, 32 hex digits.")]

worker_verbs = typer.Typer(help="See, ban and remove workers.", no_args_is_help=True)
ledger_verbs = typer.Typer(help="Check what a coordinator wrote down.", no_args_is_help=True)


def judge(
    coordinator: UrlOption,
    key: Annotated[Path, typer.Option(help="Key file; its id must be in the coordinator's judges.txt.")],
    device: DeviceOption = "auto",
    corpus: Annotated[
        str | None, typer.Option(help="Where the run's text lies on this machine, if elsewhere.")
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Private held-out text, where the run is judged on such.")
    ] = None,
) -> None:
    """Score updates for a coordinator, beside its own judge and others. May be killed at any time."""
    from blocktrain.client.coordinator import CoordinatorClient
    from blocktrain.client.traffic import Traffic
    from blocktrain.judge.judge import Judge
    from blocktrain.local.signals import stop_on_signals
    from blocktrain.threads import Stopped
    from blocktrain.wire.identity import load_or_create

    stop = stop_on_signals()
    identity = load_or_create(key.expanduser())

    def say(line: str) -> None:
        typer.echo(line, err=True)

    say(f"judge id={identity.worker_id}")
    client = CoordinatorClient(coordinator, identity, Traffic(), stop, say)
    try:
        Judge(client, find_device(device), corpus, held_out, say).run(stop)
    except Stopped:
        pass
    finally:
        client.close()


def invite(
    data_dir: DataDirOption,
    hours: Annotated[float, typer.Option(help="How long it may be used.", min=0.01)] = 168.0,
    count: Annotated[int, typer.Option(help="How many to print, one a line.", min=1, max=1000)] = 1,
) -> None:
    """Print invitations, each good for one worker; pass it on as `blocktrain worker --invite`."""
    from blocktrain.wire.tokens import make_invite

    identity = _operator_key(data_dir)
    for _ in range(count):
        typer.echo(make_invite(identity, time.time() + 3600 * hours))


@worker_verbs.command("ls")
def list_workers(
    coordinator: Annotated[str, typer.Argument(help="Address of the run.")], as_json: JsonOption = False
) -> None:
    """Standing and contribution of every worker."""
    from blocktrain.judge.ledger_check import public_client

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
    coordinator: UrlOption,
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
def remove_worker(worker_id: WorkerArgument, coordinator: UrlOption, data_dir: DataDirOption) -> None:
    """Forget a worker: its leases are free again, and it may join anew, on probation."""
    receipt = _operator(coordinator, data_dir).remove(_worker_id(worker_id)).receipt
    typer.echo(f"removed {worker_id} (ledger entry {receipt.sequence})")


@ledger_verbs.command("verify")
def verify_ledger(
    source: Annotated[str, typer.Argument(help="A coordinator's data folder, or its address.")],
    receipts: Annotated[
        Path | None, typer.Option(help="A worker's data folder: what it was promised must be there.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Another copy, folder or address: both must tell the same.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The coordinator's public key, hex, if you know it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a ledger from its payloads to the same snapshots; exit 1 names the first entry that is wrong."""
    from blocktrain.judge.ledger_check import open_source, read_receipts, verify_source

    held = read_receipts(receipts.expanduser()) if receipts is not None else []
    found = verify_source(open_source(source), held, open_source(against) if against else None, key)
    report = found.report
    if as_json:
        result = {
            "ok": found.ok,
            "entries": report.entries,
            "merges": report.merges,
            "head": report.head_hash,
        }
        blocks = {str(block): digest for block, digest in report.heads.items()}
        typer.echo(
            json.dumps({**result, "first_bad": report.first_bad, "reason": report.reason, "blocks": blocks,
                        "problems": found.problems, "receipts": found.receipts})
        )  # fmt: skip
    else:
        typer.echo(f"{report.entries} entries, {report.merges} merges replayed: {report.reason}")
        for line in found.problems:
            typer.echo(line)
        if found.receipts and not found.problems:
            typer.echo(f"{found.receipts} receipts agree")
    if not found.ok:
        raise typer.Exit(1)


def contributions(
    coordinator: Annotated[str, typer.Argument(help="Address of the run.")],
    as_csv: Annotated[bool, typer.Option("--csv", help="A table instead of the signed JSON.")] = False,
) -> None:
    """Who trained what: JSON signed by the coordinator (checked here), or CSV."""
    from blocktrain.judge.ledger_check import public_client
    from blocktrain.wire.hashing import canonical_json
    from blocktrain.wire.identity import verify
    from blocktrain.wire.messages import CONTRIBUTIONS_CONTEXT

    client = public_client(coordinator)
    answer, key = client.contributions(), bytes.fromhex(client.run().coordinator_key)
    signed = CONTRIBUTIONS_CONTEXT + canonical_json(answer.statement)
    if not verify(key, signed, bytes.fromhex(answer.signature)):
        raise UserError("the statement is not signed by this run's coordinator; do not rely on it")
    if not as_csv:
        typer.echo(answer.model_dump_json(indent=1))
        return
    columns = ["worker_id", "public_key", "merged", "merged_weight", "tokens", "gain"]
    writer = csv.DictWriter(sys.stdout, columns)
    writer.writeheader()
    writer.writerows(answer.statement["workers"])


def _operator_key(data_dir: Path) -> Identity:
    from blocktrain.coordinator.service import KEY_FILE
    from blocktrain.wire.identity import load_or_create

    path = data_dir.expanduser() / KEY_FILE
    if not path.exists():
        raise UserError(f"no {KEY_FILE} in {data_dir}: expected the --data-dir of the coordinator")
    return load_or_create(path)


def _operator(url: str, data_dir: Path) -> CoordinatorClient:
    from blocktrain.judge.ledger_check import public_client

    client = public_client(url, _operator_key(data_dir))
    client.audience = client.run().run_id
    return client


def _worker_id(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise UserError(f"{text!r} is no worker id: expected 32 hex digits, see `blocktrain workers ls`")
    return text
