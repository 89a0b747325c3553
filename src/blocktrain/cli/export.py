"""`blocktrain export`: a checkpoint as a Hugging Face folder, uploaded if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import ModelArgument, opened_model


def export(
    checkpoint: ModelArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write; must be new or empty.")],
    report: Annotated[
        Path | None,
        typer.Option("--report", help="report.json for the model card; default: the one beside CHECKPOINT."),
    ] = None,
    upload: Annotated[
        str | None,
        typer.Option("--upload", metavar="OWNER/NAME", help="Also upload to this repository of the Hub."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder: weights, tokenizer, model card. Uploads only if asked."""
    from blocktrain.tracking.hub import logged_in_hub, upload_folder
    from blocktrain.tracking.model_card import find_report, model_card
    from blocktrain.training.checkpoint import Description, read_config
    from blocktrain.training.exchange import export_checkpoint
    from blocktrain.training.hugging_face import ARCHITECTURES, export_folder

    # First: an hour of writing should not end at a missing login.
    hub = logged_in_hub() if upload is not None else None
    with opened_model(checkpoint) as folder:
        described = Description.of(read_config(folder), folder)
        numbers = find_report(folder, report, described)
        # A family that other programs know goes out as they read it.
        write = export_folder if described.recipe.model.family in ARCHITECTURES else export_checkpoint
        write(folder, to, model_card(described, numbers))
    typer.echo(f"exported {checkpoint} to {to}" + ("" if numbers else " (no report beside it)"))
    if hub is not None and upload is not None:
        typer.echo(f"uploaded to {upload_folder(hub, to, upload, private=private)}")
