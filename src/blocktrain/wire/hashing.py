"""Canonical bytes and their blake3 hashes, the same on every machine and Python version.

Used for snapshot hashes, commits and the ledger chain. Knows nothing of what a ledger entry means.

Covered: mapping order, byte order and memory layout do not change a hash; two different values never
share canonical bytes; NaN and values JSON cannot hold are refused. Not covered: floats in JSON keep
Python's shortest notation, so another language must print them the same way to verify a ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from blocktrain.errors import WireError
from blocktrain.wire.byte_source import ByteSource, pieces

HASH_BYTES = 32
GENESIS_HASH = "00" * HASH_BYTES
"""What the first ledger entry is chained to."""

MAX_DEPTH = 32

_SNAPSHOT_CONTEXT = b"blocktrain snapshot 1\n"


class CanonicalError(WireError):
    """A value that has no canonical bytes."""


def content_hash(payload: bytes | memoryview | ByteSource) -> str:
    """Hex blake3 of a payload as it travels: what a commit promises and a blob is called."""
    if isinstance(payload, bytes | memoryview):
        return blake3(payload).hexdigest()
    hasher = blake3()
    for piece in pieces(payload):
        hasher.update(piece)
    return hasher.hexdigest()


class SnapshotHasher:
    """The hash of a snapshot whose values come band by band, in the order of `Schema.bands`."""

    def __init__(self) -> None:
        # A context first: no payload or ledger entry can have the hash of a snapshot by construction.
        self._blake3 = blake3(_SNAPSHOT_CONTEXT)

    def begin(self, name: str, shape: Sequence[int]) -> None:
        # The shape goes in too: [2, 3] and [3, 2] of the same bytes are different weights.
        self._blake3.update(canonical_json([name, [int(side) for side in shape]]) + b"\n")

    def update(self, values: NDArray[np.float32]) -> None:
        self._blake3.update(np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8).data)

    def hexdigest(self) -> str:
        return self._blake3.hexdigest()


def snapshot_hash(tensors: Mapping[str, NDArray[np.float32]]) -> str:
    """Hex blake3 over every tensor in order of name: name, shape, little-endian fp32 bytes."""
    hasher = SnapshotHasher()
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.dtype != np.float32:
            raise CanonicalError(f"{name}: expected float32 to hash, found {tensor.dtype}; convert it first")
        hasher.begin(name, tensor.shape)
        hasher.update(tensor)
    return hasher.hexdigest()


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces; string keys only, no NaN or infinity."""
    _refuse_ambiguous(value, "value")
    try:
        # As UTF-8 and not as escapes, since a verifier in another language should not have to copy those of
        # Python.
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return text.encode()
    except ValueError as error:
        raise CanonicalError(
            f"value has no canonical JSON: {error}; use finite numbers, valid text"
        ) from None


def chain_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """The ledger's h_n = blake3(h_{n-1} || canonical(entry)), hex in and out."""
    return blake3(bytes.fromhex(previous) + canonical_json(dict(entry))).hexdigest()


def _refuse_ambiguous(value: Any, where: str, depth: int = 0) -> None:
    """json.dumps writes 1 and "1" as the same key, and recurses as deep as it is led."""
    if depth > MAX_DEPTH:
        raise CanonicalError(f"value: expected at most {MAX_DEPTH} levels, found more nested; flatten it")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CanonicalError(f"{where}: expected text as key, found {type(key).__name__}")
            _refuse_ambiguous(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _refuse_ambiguous(item, f"{where}[{position}]", depth + 1)
    # bool passes as an int: JSON keeps the two apart, so nothing is ambiguous.
    elif value is not None and not isinstance(value, str | int | float):
        raise CanonicalError(f"{where}: expected a plain JSON value, found {type(value).__name__}")
