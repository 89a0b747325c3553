"""`blocktrain ledger verify`: replay what a coordinator wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

ledger_verbs = typer.Typer(help="Check what a coordinator wrote down.", no_args_is_help=True)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a ledger from its payloads to the same snapshots; exit 1 names the first entry that is wrong."""
    from blocktrain.judge.ledger_check import read_receipts, verify_place

    held = read_receipts(receipts.expanduser()) if receipts is not None else []
    found = verify_place(source, held, against, key)
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
    # For scripts: a ledger that does not replay is a failure, whatever was printed.
    if not found.ok:
        raise typer.Exit(1)
