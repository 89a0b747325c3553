"""Snapshots and decoded updates in memory, least recently used first to go, bounded in bytes.

What a judge needs is held whole: a head, and the updates that it will score. A merge takes what is held, and
reads the rest from the blobs band by band, so that a run without a judge holds no block at all.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from numpy import float32
from numpy.typing import NDArray

from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.blobs import Blobs, payload_key, snapshot_key
from blocktrain.errors import StorageError
from blocktrain.training.snapshot import SnapshotFile, from_safetensors
from blocktrain.wire.codec import UpdateFrame, Values, held
from blocktrain.wire.hashing import content_hash, snapshot_hash

Weights = dict[str, NDArray[float32]]

# A block of 27 M parameters is 108 MB: its head and four decoded updates are 540 MB, and three such blocks
# fit.
MAX_CACHE_BYTES = 2 << 30


class WeightCache:
    def __init__(self, run: Run, blobs: Blobs, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._run, self._blobs, self._max_bytes = run, blobs, max_bytes
        self._held: OrderedDict[tuple[int, str], Weights] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def snapshot(self, block: int, wanted: str) -> Weights:
        weights = self._held_weights(block, wanted)
        if weights is None:
            weights = from_safetensors(self._blobs.get(snapshot_key(wanted)), self._run.schemas[block])
            # The blobs are the operator's to lose, not to change: weights are used only under their own hash.
            if snapshot_hash(weights) != wanted:
                raise changed_snapshot(wanted)
            self.keep(block, wanted, weights)
        return weights

    def update(self, block: int, payload_hash: str) -> Weights:
        weights = self._held_weights(block, payload_hash)
        if weights is None:
            with self.opened_update(block, payload_hash) as values:
                weights = {
                    name: values(name, slice(0, math.prod(shape))).reshape(shape)
                    for name, shape in self._run.schemas[block].tensors
                }
            self.keep(block, payload_hash, weights)
        return weights

    @contextmanager
    def opened_snapshot(self, block: int, wanted: str, *, checked: bool = False) -> Iterator[Values]:
        """The snapshot's values, from memory or from its file. `checked`: the caller compares the hash of
        what it read with `wanted`; else the whole file is hashed first."""
        weights = self._held_weights(block, wanted)
        if weights is not None:
            yield held(weights)
            return
        with self._blobs.opened(snapshot_key(wanted)) as source:
            file = SnapshotFile(source, self._run.schemas[block])
            if not checked and file.hash() != wanted:
                raise changed_snapshot(wanted)
            yield file.read

    @contextmanager
    def opened_update(self, block: int, payload_hash: str) -> Iterator[Values]:
        """The update's values, from memory or decoded band by band."""
        weights = self._held_weights(block, payload_hash)
        if weights is not None:
            yield held(weights)
            return
        with self._blobs.opened(payload_key(payload_hash)) as source:
            if content_hash(source) != payload_hash:
                raise StorageError(
                    f"payload {payload_hash} in the blob store is not what was written; put back a backup"
                )
            yield UpdateFrame(self._run.codec, self._run.schemas[block], source).read

    def keep(self, block: int, name: str, weights: Weights) -> None:
        with self._lock:
            self._drop((block, name))
            self._held[block, name] = weights
            self._bytes += _num_bytes(weights)
            # The newest stays whatever its size: it is about to be used.
            while self._bytes > self._max_bytes and len(self._held) > 1:
                self._drop(next(iter(self._held)))

    def forget(self, block: int, name: str) -> None:
        with self._lock:
            self._drop((block, name))

    def _held_weights(self, block: int, name: str) -> Weights | None:
        with self._lock:
            weights = self._held.get((block, name))
            if weights is not None:
                self._held.move_to_end((block, name))
            return weights

    def _drop(self, key: tuple[int, str]) -> None:
        weights = self._held.pop(key, None)
        if weights is not None:
            self._bytes -= _num_bytes(weights)


def changed_snapshot(wanted: str) -> StorageError:
    return StorageError(f"snapshot {wanted} in the blob store is not what was written; put back a backup")


def _num_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
