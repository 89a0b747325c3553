"""Uploading an exported folder to the Hugging Face Hub, where somebody asked for that.

Every other verb works without the package huggingface_hub, so it is imported only here, when it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.errors import BlocktrainError, UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class UploadError(BlocktrainError):
    """The Hub cannot be reached, or refused."""


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
