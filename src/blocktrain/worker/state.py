"""What a worker keeps on disk so that a killed one goes on as if it had only paused.

Per block: error feedback together with the updates that may not have been counted (one file, so they never
disagree), optimizer state, and which snapshot is in the cache. Local weights need no file of their own: at
the end of a round they are the snapshot plus updates on their way, and a stop in the middle of one puts its
progress into error feedback. A damaged file is reported and left out.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors.torch
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from blocktrain.client.cache import LOCK_FILE, BlobCache
from blocktrain.client.snapshots import Base
from blocktrain.errors import CheckpointError, StorageError
from blocktrain.files import locked_file, write_whole
from blocktrain.training.storage import SEAL, read_tensors, seal_is_broken, seal_of
from blocktrain.training.update import Weights
from blocktrain.wire.messages import Receipt
from blocktrain.worker.block_progress import BlockProgress, PendingState, PendingUpdate

SAVING_SHARE = 0.02
RECEIPTS_FILE = "receipts.jsonl"


def saving_is_due(
    *, now: float, saved_at: float | None, cost_seconds: float, least_seconds: float = 0.0
) -> bool:
    """Whether to write to disk again: at first, then after a while, and for a small share of the time."""
    return saved_at is None or now - saved_at >= max(least_seconds, cost_seconds / SAVING_SHARE)


class KeptSnapshot(BaseModel):
    version: int
    hash: str


class _UnsettledUpdate(BaseModel):
    """A formed update in the metadata of a feedback file."""

    assignment_id: str
    payload_hash: str
    base_version: int
    base_hash: str
    loss: float
    told: bool = False


class _Outbox(BaseModel):
    updates: list[_UnsettledUpdate]


class StateFolder:
    def __init__(self, folder: Path, report: Callable[[str], None], cache: BlobCache) -> None:
        """`cache`: what bounds everything that is written here."""
        self.folder, self.report, self._cache = folder, report, cache
        self._saving = threading.Lock()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep a second worker out of this folder."""
        taken = f"another worker is using {self.folder}; give each worker its own --data-dir"
        return locked_file(self.folder / LOCK_FILE, taken)

    # --- error feedback and updates on their way

    def save_progress(self, progress: BlockProgress) -> None:
        """From any thread; the lock keeps an older moment from overwriting a newer one."""
        # Both are read inside the lock: two threads that save at once write moments in order.
        with self._saving:
            self.save_feedback(progress.block, *progress.kept())

    def save_feedback(self, block: int, feedback: Weights | None, updates: Iterable[PendingUpdate]) -> None:
        entries = []
        for update in updates:
            assert update.base is not None
            assert update.loss is not None
            entries.append(
                _UnsettledUpdate(
                    assignment_id=update.assignment_id,
                    payload_hash=update.payload_hash,
                    base_version=update.base.version,
                    base_hash=update.base.hash,
                    loss=update.loss,
                    told=update.told or update.state is PendingState.ACCEPTED,
                )
            )
        metadata = {"outbox": _Outbox(updates=entries).model_dump_json(exclude_defaults=True)}
        tensors = {name: torch.from_numpy(array) for name, array in (feedback or {}).items()}
        self._write_tensors(f"block-{block}.feedback", tensors, metadata)

    def load_feedback(self, block: int) -> tuple[Weights | None, list[PendingUpdate]]:
        """Error feedback, and updates that an earlier process had formed (without payload and weights)."""
        path = self.folder / f"block-{block}.feedback"
        if not path.exists():
            return None, []
        try:
            tensors, metadata = self._read_tensors(path)
            outbox = _Outbox.model_validate_json(metadata.get("outbox", "{}"))
            feedback = {name: tensor.numpy() for name, tensor in tensors.items()}
        except (CheckpointError, ValidationError) as error:
            self.report(f"error feedback in {path} is damaged ({error}); starting without")
            return None, []
        updates = [
            PendingUpdate(
                assignment_id=entry.assignment_id,
                block=block,
                # The file has no round, and none is needed: the assignment is known by its id.
                round=entry.base_version,
                state=PendingState.FORMED,
                loss=entry.loss,
                base=Base(entry.base_version, entry.base_hash, {}),
                payload_hash=entry.payload_hash,
                told=entry.told,
            )
            for entry in outbox.updates
        ]
        return feedback or None, updates

    # --- optimizer, snapshot, the rest

    def save_optimizer(self, block: int, tensors: dict[str, Tensor]) -> None:
        self._write_tensors(f"block-{block}.optimizer", tensors, {})

    def load_optimizer(self, block: int) -> dict[str, Tensor] | None:
        path = self.folder / f"block-{block}.optimizer"
        if not path.exists():
            return None
        try:
            return self._read_tensors(path)[0]
        except CheckpointError as error:
            self.report(f"optimizer state in {path} is damaged ({error}); starting without")
            return None

    def save_snapshot_name(self, block: int, base: Base) -> None:
        kept = KeptSnapshot(version=base.version, hash=base.hash)
        self._write(f"block-{block}.snapshot", kept.model_dump_json().encode())

    def load_snapshot_name(self, block: int) -> KeptSnapshot | None:
        try:
            return KeptSnapshot.model_validate_json((self.folder / f"block-{block}.snapshot").read_text())
        except (OSError, ValueError):
            return None

    def save_last_block(self, block: int) -> None:
        self._write("last-block", str(block).encode())

    def load_last_block(self) -> int | None:
        try:
            return int((self.folder / "last-block").read_text())
        except (OSError, ValueError):
            return None

    def save_receipt(self, receipt: Receipt) -> None:
        """Proof of what the coordinator acknowledged, for `blocktrain ledger verify --receipts`: a JSON
        line."""
        path, line = self.folder / RECEIPTS_FILE, receipt.model_dump_json() + "\n"
        try:
            with self._cache.room(len(line)), path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise _not_written(path, error) from None

    def save_report(self, report: dict[str, object]) -> None:
        self._write("report.json", json.dumps(report, indent=1).encode())

    def _write_tensors(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        sealed = metadata | {SEAL: seal_of(tensors, metadata)}
        self._write(name, safetensors.torch.save(tensors, sealed))

    def _read_tensors(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, metadata = read_tensors(path)
        if seal_is_broken(tensors, metadata):
            raise CheckpointError("it is not what was written")
        return tensors, metadata

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        try:
            with self._cache.room(len(content)):
                # Not worth waiting for the disk: after a power cut an empty file is one that is damaged.
                write_whole(path, content, durable=False)
        except OSError as error:
            raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {error}; free some space or name another --data-dir")
