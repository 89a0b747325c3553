"""Snapshots and decoded updates in memory, least recently used first to go, bounded in bytes.

Payloads are decoded as they arrive, so that closing a round costs only the mean, the hash and the write;
anything that was dropped, or lost in a restart, is read from the blobs again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from numpy import float32
from numpy.typing import NDArray

from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.blobs import Blobs, payload_key, snapshot_key
from blocktrain.errors import StorageError
from blocktrain.training.snapshot import from_safetensors, snapshot_hash
from blocktrain.wire.codec import decode
from blocktrain.wire.hashing import content_hash

Weights = dict[str, NDArray[float32]]

MAX_CACHE_BYTES = 2 << 30


class WeightCache:
    def __init__(self, run: Run, blobs: Blobs, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._run, self._blobs, self._max_bytes = run, blobs, max_bytes
        self._held: OrderedDict[tuple[int, str], Weights] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def snapshot(self, block: int, wanted: str) -> Weights:
        return self._held_or((block, wanted), lambda: self._load_snapshot(block, wanted))

    def update(self, block: int, payload_hash: str) -> Weights:
        return self._held_or((block, payload_hash), lambda: self._load_payload(block, payload_hash))

    def keep(self, block: int, name: str, weights: Weights) -> None:
        with self._lock:
            self._drop((block, name))
            self._held[block, name] = weights
            self._bytes += _num_bytes(weights)
            while self._bytes > self._max_bytes and len(self._held) > 1:
                self._drop(next(iter(self._held)))

    def forget(self, block: int, name: str) -> None:
        with self._lock:
            self._drop((block, name))

    def _held_or(self, key: tuple[int, str], load: Callable[[], Weights]) -> Weights:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        weights = load()
        self.keep(*key, weights)
        return weights

    def _drop(self, key: tuple[int, str]) -> None:
        weights = self._held.pop(key, None)
        if weights is not None:
            self._bytes -= _num_bytes(weights)

    def _load_snapshot(self, block: int, wanted: str) -> Weights:
        tensors = from_safetensors(self._blobs.get(snapshot_key(wanted)), self._run.schemas[block])
        if snapshot_hash(tensors) != wanted:
            raise StorageError(f"snapshot {wanted} in the blob store has other contents; restore it")
        return tensors

    def _load_payload(self, block: int, payload_hash: str) -> Weights:
        payload = self._blobs.get(payload_key(payload_hash))
        if content_hash(payload) != payload_hash:
            raise StorageError(f"payload {payload_hash} in the blob store has other contents; restore it")
        return decode(self._run.codec, self._run.schemas[block], payload)


def _num_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
