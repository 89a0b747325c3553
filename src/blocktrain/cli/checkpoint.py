"""`blocktrain checkpoint`: take the model out of a run, while it trains or after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import RunArgument


def checkpoint(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; must be new or empty.")],
) -> None:
    """Take the newest model out of a run, during it or after, checked against its signed ledger."""
    from blocktrain.local.assembly import save_model

    found = save_model(run, to.expanduser())
    typer.echo(f"wrote {to}: {found}")
