"""`blocktrain contributions`: who trained what, signed by the coordinator."""

from __future__ import annotations

import csv
import sys
from typing import Annotated

import typer

from blocktrain.cli.options import UrlArgument
from blocktrain.errors import UserError


def contributions(
    coordinator: UrlArgument,
    as_csv: Annotated[bool, typer.Option("--csv", help="A table instead of the signed JSON.")] = False,
) -> None:
    """Who trained what: JSON signed by the coordinator (checked here), or CSV."""
    from blocktrain.client.coordinator import public_client
    from blocktrain.wire.hashing import canonical_json
    from blocktrain.wire.identity import verify
    from blocktrain.wire.messages import CONTRIBUTIONS_CONTEXT

    with public_client(coordinator) as client:
        answer, key = client.contributions(), bytes.fromhex(client.run().coordinator_key)
        labels = {one.worker_id: one.label for one in client.workers().workers}
    # Checked here and not left to the reader: the file is meant to be shown to others as proof.
    signed = CONTRIBUTIONS_CONTEXT + canonical_json(answer.statement)
    if not verify(key, signed, bytes.fromhex(answer.signature)):
        raise UserError("the statement is not signed by this run's coordinator; do not rely on it")
    if not as_csv:
        typer.echo(answer.model_dump_json(indent=1))
        return
    # Labels are what workers call themselves: no part of the signed statement, and the last column.
    rows = [{**row, "label": labels.get(row["worker_id"], "")} for row in answer.statement["workers"]]
    columns = ["worker_id", "public_key", "merged", "merged_weight", "tokens", "gain", "label"]
    writer = csv.DictWriter(sys.stdout, columns)
    writer.writeheader()
    writer.writerows(rows)
