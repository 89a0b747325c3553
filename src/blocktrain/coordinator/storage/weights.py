"""Snapshots and decoded updates in memory, least recently used first to go, bounded in bytes.

Payloads are decoded as they arrive, so that closing a round costs only the mean, the hash and the write;
anything that was dropped, or lost in a restart, is read from the blobs again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from numpy import float32
from numpy.typing import NDArray

from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.blobs import Blobs, payload_key, snapshot_key
from blocktrain.errors import StorageError
from blocktrain.training.snapshot import from_safetensors, snapshot_hash
from blocktrain.wire.codec import decode
from blocktrain.wire.hashing import content_hash

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
        held = self._held_weights(block, wanted)
        if held is None:
            held = from_safetensors(self._blobs.get(snapshot_key(wanted)), self._run.schemas[block])
            # The blobs are the operator's to lose, not to change: weights are used only under their own hash.
            if snapshot_hash(held) != wanted:
                raise StorageError(f"snapshot {wanted} in the blob store has other contents; restore it")
            self.keep(block, wanted, held)
        return held

    def update(self, block: int, payload_hash: str) -> Weights:
        held = self._held_weights(block, payload_hash)
        if held is None:
            payload = self._blobs.get(payload_key(payload_hash))
            if content_hash(payload) != payload_hash:
                raise StorageError(f"payload {payload_hash} in the blob store has other contents; restore it")
            held = decode(self._run.codec, self._run.schemas[block], payload)
            self.keep(block, payload_hash, held)
        return held

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


def _num_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
