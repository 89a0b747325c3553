"""`blocktrain import`: an exported folder back as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    folder: Annotated[Path, typer.Argument(help="A folder that `export` wrote.")],
    to: Annotated[Path, typer.Option("--to", help="Checkpoint folder to write; must be new or empty.")],
) -> None:
    """Read an exported folder back into a checkpoint, every file checked. Nothing in it is executed."""
    from blocktrain.training.exchange import import_checkpoint

    import_checkpoint(folder, to)
    typer.echo(f"imported {folder} to {to}\nblocktrain generate {to} --prompt 'The '")
