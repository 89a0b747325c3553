"""Writing so that a crash or a full disk leaves the old file or the new one, never a torn one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from blocktrain.errors import CheckpointError, StorageError, UserError
from blocktrain.files import write_whole


@contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another --out, "
            "then run again with --resume"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    with explained_errors(path):
        write_whole(path, content)


def write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, safetensors.torch.save(contiguous, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is truncated or not safetensors: {error}") from None


def stored_run(path: Path) -> dict[str, Any]:
    """A folder's run.json: the recipe it was begun with, and what else its writer put there."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); choose another --out") from None
    if not isinstance(stored, dict) or not isinstance(stored.get("recipe"), dict):
        raise UserError(f"{path} is damaged (no recipe in it); choose another --out")
    return stored


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A fresh folder that takes the place of `path` only if the body succeeds."""
    # Beside the target, since a rename is atomic only within one file system; with the pid, since two may
    # try.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            shutil.rmtree(path, ignore_errors=True)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
