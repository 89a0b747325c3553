"""`blocktrain import`: a Hugging Face folder as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.errors import UserError


def import_(
    folder: Annotated[Path, typer.Argument(help="A Llama or Qwen3 folder, or one that `export` wrote.")],
    to: Annotated[Path, typer.Option("--to", help="Checkpoint folder to write; must be new or empty.")],
    parts: Annotated[
        int, typer.Option("--parts", min=1, help="Cut a Llama or Qwen3 model into this many serial parts.")
    ] = 1,
) -> None:
    """Make a checkpoint of a Hugging Face folder, every file checked. Nothing in it is executed."""
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}; expected a Hugging Face folder, or one of `export`")
    from blocktrain.training.exchange import import_checkpoint
    from blocktrain.training.hugging_face import import_folder, is_importable

    if is_importable(folder):
        import_folder(folder, to, parts)
    elif parts != 1:
        raise UserError("--parts is for folders of a Llama or Qwen3 model")
    else:
        import_checkpoint(folder, to)
    typer.echo(f"imported {folder} to {to}\nblocktrain generate {to} --prompt 'The '")
