"""Writing so that a crash or a full disk leaves the old file or the new one, never a torn one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from blocktrain.errors import CheckpointError, UserError
from blocktrain.files import explained_errors, write_whole


def write_file(path: Path, content: bytes) -> None:
    with explained_errors(path):
        write_whole(path, content)


def write_json(path: Path, value: Any) -> None:
    write_file(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    if isinstance(tensors, LazyTensors):
        _write_one_by_one(path, tensors, metadata)
        return
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


SEAL = "sha256"
"""Key in the metadata of state files. Unlike a checkpoint's files, nothing else names their hash, and a
flipped bit in weights or momenta would go on into the run unseen."""


def seal_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A hash of everything in a safetensors file but its layout, which may differ between versions."""
    digest = hashlib.sha256()
    for key in sorted(metadata.keys() - {SEAL}):
        digest.update(f"{key}\0{metadata[key]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def seal_is_broken(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bool:
    """False for files of before there were seals."""
    return SEAL in metadata and metadata[SEAL] != seal_of(tensors, metadata)


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


class LazyTensors(Mapping[str, Tensor]):
    """Tensors whose shapes are known and whose values are read when they are asked for, in fp32."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], load: Callable[[str], Tensor]) -> None:
        self.shapes = {name: list(shape) for name, shape in shapes.items()}
        self._load = load

    def __getitem__(self, name: str) -> Tensor:
        return self._load(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def num_bytes(self, name: str) -> int:
        return 4 * math.prod(self.shapes[name])


def _write_one_by_one(path: Path, tensors: LazyTensors, metadata: dict[str, str] | None) -> None:
    """A safetensors file with one tensor in memory at a time; the folder it lies in takes its name later."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, shape in tensors.shapes.items():
        start, end = end, end + tensors.num_bytes(name)
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with explained_errors(path), path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in tensors:
            file.write(tensors[name].contiguous().numpy().astype("<f4", copy=False).data)
        file.flush()
        os.fsync(file.fileno())
