"""What a worker keeps on disk so that a killed one goes on as if it had only paused.

Per block: error feedback together with the updates that may not have been counted (one file, so they
never disagree), optimizer state, and which snapshot is in the cache. Local weights need no file of their
own: at the end of a round they are the snapshot plus updates on their way, and a stop in the middle of
one puts its progress into error feedback. A damaged file is reported and left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.numpy
import safetensors.torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blocktrain.errors import StorageError
from blocktrain.files import locked_file
from blocktrain.training.update import Weights
from blocktrain.wire.messages import Receipt

RECEIPTS_FILE = "receipts.jsonl"


class Unsettled(BaseModel):
    """An update whose payload was formed and whose end this worker may not have seen."""

    assignment_id: str
    payload_hash: str
    base_version: int
    base_hash: str
    loss: float


class KeptSnapshot(BaseModel):
    version: int
    hash: str


class _Outbox(BaseModel):
    updates: list[Unsettled]


class StateFolder:
    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder, report
        self._writing = threading.Lock()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep a second worker out of this folder."""
        return locked_file(
            self.folder / "lock",
            f"another worker is using {self.folder}; give each worker its own --data-dir",
        )

    def save_feedback(self, block: int, feedback: Weights | None, updates: Sequence[Unsettled]) -> None:
        outbox = _Outbox(updates=list(updates)).model_dump_json()
        self._replace(
            f"block-{block}.feedback",
            lambda path: safetensors.numpy.save_file(feedback or {}, path, {"outbox": outbox}),
        )

    def has_unsettled(self, block: int) -> bool:
        """Whether there are updates to deliver again, without reading the feedback beside them."""
        path = self.folder / f"block-{block}.feedback"
        try:
            with safe_open(path, "numpy") as file:
                return bool(_Outbox.model_validate_json((file.metadata() or {}).get("outbox", "{}")).updates)
        except (SafetensorError, ValidationError, OSError):
            return False

    def load_feedback(self, block: int) -> tuple[Weights | None, list[Unsettled]]:
        path = self.folder / f"block-{block}.feedback"
        if not path.exists():
            return None, []
        try:
            with safe_open(path, "numpy") as file:
                outbox = _Outbox.model_validate_json((file.metadata() or {}).get("outbox", "{}"))
                feedback = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValidationError, OSError) as error:
            self.report(f"error feedback in {path} is damaged ({error}); starting without")
            return None, []
        return feedback or None, outbox.updates

    def save_optimizer(self, block: int, tensors: dict[str, Tensor]) -> None:
        self._replace(f"block-{block}.optimizer", lambda path: safetensors.torch.save_file(tensors, path))

    def load_optimizer(self, block: int) -> dict[str, Tensor] | None:
        path = self.folder / f"block-{block}.optimizer"
        if not path.exists():
            return None
        try:
            return dict(safetensors.torch.load_file(path))
        except (SafetensorError, OSError) as error:
            self.report(f"optimizer state in {path} is damaged ({error}); starting without")
            return None

    def save_snapshot_name(self, block: int, version: int, snapshot_hash: str) -> None:
        kept = KeptSnapshot(version=version, hash=snapshot_hash).model_dump_json()
        self._replace(f"block-{block}.snapshot", lambda path: path.write_text(kept))

    def load_snapshot_name(self, block: int) -> KeptSnapshot | None:
        try:
            return KeptSnapshot.model_validate_json((self.folder / f"block-{block}.snapshot").read_text())
        except (OSError, ValueError):
            return None

    def save_last_block(self, block: int) -> None:
        self._replace("last-block", lambda path: path.write_text(json.dumps(block)))

    def load_last_block(self) -> int | None:
        try:
            return int(json.loads((self.folder / "last-block").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save_receipt(self, receipt: Receipt) -> None:
        """One JSON line each, in the order they came."""
        try:
            with (self.folder / RECEIPTS_FILE).open("a") as file:
                file.write(receipt.model_dump_json() + "\n")
        except OSError as error:
            raise StorageError(
                f"cannot write {self.folder / RECEIPTS_FILE}: {error}; free some space or name another "
                "--data-dir"
            ) from None

    def save_report(self, report: dict[str, object]) -> None:
        self._replace("report.json", lambda path: path.write_text(json.dumps(report, indent=1)))

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Write beside and rename, so that a kill leaves the old file or the new one."""
        draft = self.folder / f".{name}.new"
        try:
            with self._writing:
                write(draft)
                os.replace(draft, self.folder / name)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"cannot write {self.folder / name}: {error}; free some space or name another --data-dir"
            ) from None
