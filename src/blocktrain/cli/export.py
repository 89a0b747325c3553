"""`blocktrain export`: a checkpoint as a Hugging Face folder, uploaded if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.options import ModelArgument, opened_model
from blocktrain.errors import BlocktrainError, UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from blocktrain.tracking.model_card import AnyReport
    from blocktrain.training.checkpoint import Description

MAX_REPORT_BYTES = 64 << 20


class UploadError(BlocktrainError):
    """The Hub cannot be reached, or refused."""


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
    from blocktrain.tracking.model_card import model_card
    from blocktrain.training.checkpoint import Description, read_config
    from blocktrain.training.exchange import export_checkpoint
    from blocktrain.training.hugging_face import ARCHITECTURES, export_folder

    # First: an hour of writing should not end at a missing login.
    hub = logged_in_hub() if upload is not None else None
    with opened_model(checkpoint) as folder:
        described = Description.of(read_config(folder), folder)
        numbers = find_report(folder, report, described)
        card = model_card(described.recipe, described.corpus_sha256, numbers)
        # A family that other programs know goes out as they read it.
        write = export_folder if described.recipe.model.family in ARCHITECTURES else export_checkpoint
        write(folder, to, card)
    typer.echo(f"exported {checkpoint} to {to}" + ("" if numbers else " (no report beside it)"))
    if hub is not None and upload is not None:
        typer.echo(f"uploaded to {upload_folder(hub, to, upload, private=private)}")


def find_report(checkpoint: Path, named: Path | None, described: Description) -> AnyReport | None:
    """The report of this checkpoint; a neighbour that belongs to another run is left out."""
    from blocktrain.training.report import TrainingReport

    path = named or checkpoint.absolute().parent / "report.json"
    try:
        # A report holds 200 points of each curve and a sample; nothing that is one comes near this size.
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise UserError(f"{path} is longer than any report")
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named is None:
            return None
        raise UserError(f"no report at {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if belongs(report, described):
        return TrainingReport.of_json(report) if "composed" in report else dict(report)
    if named is None:
        return None
    raise UserError(f"{path} is not the report of {checkpoint}: another run's name or text")


def belongs(report: Any, described: Description) -> bool:
    if not isinstance(report, dict) or report.get("name") != described.recipe.name:
        return False
    if "composed" in report:
        # The name alone does not tell runs apart: every run of a recipe has the same one.
        return bool(report.get("corpus_sha256") == described.corpus_sha256)
    return isinstance(report.get("final"), dict)


def logged_in_hub() -> HfApi:
    """Asked for before anything is written, so that a missing login costs nothing."""
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        raise UserError("--upload needs the package huggingface_hub: pip install 'blocktrain[hub]'") from None
    if get_token() is None:
        raise UserError("--upload needs a login: run `hf auth login`, or set HF_TOKEN")
    return HfApi()


def upload_folder(hub: HfApi, folder: Path, repository: str, *, private: bool) -> str:
    """The address of the uploaded model."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        made = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Export of blocktrain")
    # The name is the person's mistake (exit 2), everything else the network's or the Hub's.
    except HFValidationError as error:
        raise UserError(f"--upload {repository}: {error}") from None
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UploadError(
            f"{folder} is written, but the upload to {repository} failed: {reason}; check the network, the "
            "name and your rights, then upload the folder with `hf upload`"
        ) from None
    return str(made)
