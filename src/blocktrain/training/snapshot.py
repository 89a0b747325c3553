"""A block's weights as a snapshot: its schema, its canonical hash, and safetensors bytes in and out.

A snapshot is the block's parameters (no buffers) in fp32, ordered by name. The hash covers names, shapes
and values and not the file, so a snapshot rebuilt from updates and one downloaded have the same name.

Covered: bytes from a network must have the length, names, shapes and type of the block's schema and hold
finite numbers, or SnapshotError; nothing in them is executed. Not covered: whether the weights are any
good; compare `snapshot_hash` with the hash you asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from blocktrain.errors import WireError
from blocktrain.wire.byte_source import ByteSource
from blocktrain.wire.codec import Schema, Tensors, Values
from blocktrain.wire.hashing import SnapshotHasher

HEADER_BYTES_PER_TENSOR = 512
"""Room for one tensor's name, shape and offsets in a safetensors header; names are shorter than 256."""


class SnapshotError(WireError):
    """Bytes that are no snapshot of this block."""


def schema_of(block: nn.Module) -> Schema:
    # Sorted by name: torch's order is that of the source, and moving a line must not change a hash.
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    return Schema(tuple((name, shapes[name]) for name in sorted(shapes)))


def tensors_of(block: nn.Module) -> dict[str, NDArray[np.float32]]:
    """A copy of the block's parameters in order of name, on the CPU."""
    parameters = dict(block.named_parameters())
    return {
        name: parameters[name].detach().to("cpu", torch.float32, copy=True).numpy()
        for name in sorted(parameters)
    }


def check_names(block: nn.Module, tensors: Tensors) -> None:
    """Refuse tensors that are not those of the block's schema."""
    names = sorted(name for name, _ in block.named_parameters())
    if names != sorted(tensors):
        raise SnapshotError(_difference(names, sorted(tensors)))


@torch.no_grad()
def load_into(block: nn.Module, tensors: Tensors) -> None:
    """Set every parameter of the block; the tensors must be those of its schema."""
    check_names(block, tensors)
    for name, parameter in block.named_parameters():
        # In place: the optimizer holds these very parameters.
        parameter.copy_(torch.from_numpy(np.asarray(tensors[name], order="C")))


def max_snapshot_bytes(schema: Schema) -> int:
    """No safetensors file of this schema is longer; a download may be cut off here."""
    return 8 + HEADER_BYTES_PER_TENSOR * (1 + len(schema.tensors)) + 4 * schema.num_values


def file_layout(schema: Schema) -> tuple[bytes, dict[str, int]]:
    """How every snapshot file of this schema begins, and the byte at which each tensor's values start."""
    entries, starts, end = {}, {}, 0
    for name, shape in schema.tensors:
        start, end = end, end + 4 * math.prod(shape)
        starts[name] = start
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    # To a multiple of 8, so that the values lie aligned and numpy can view them as fp32 in place.
    header += b" " * (-len(header) % 8)
    places = {name: 8 + len(header) + start for name, start in starts.items()}
    return len(header).to_bytes(8, "little") + header, places


def to_safetensors(tensors: Tensors) -> bytes:
    names = sorted(tensors)
    header, _ = file_layout(Schema.of({name: tensors[name] for name in names}))
    values = (np.ascontiguousarray(tensors[name], "<f4").reshape(-1).view(np.uint8) for name in names)
    return b"".join([header, *(one.data for one in values)])


class SnapshotFile:
    """A snapshot that stays in its file: bands are read when they are asked for.

    Covered: the header's names, types, shapes and places, before a value is read. Not covered: the values;
    compare `hash` with the hash you asked for.
    """

    def __init__(self, source: ByteSource, schema: Schema) -> None:
        self._source, self._schema = source, schema
        begin, entries = _checked_header(source, schema)
        self._places: dict[str, int] = {}
        for name, shape in schema.tensors:
            found, size = entries[name].get("data_offsets"), 4 * math.prod(shape)
            first = found[0] if isinstance(found, list) and found else None
            # The end follows from the start: a file that says otherwise is not one of ours.
            if type(first) is not int or not 0 <= first <= len(source) - begin - size:
                raise SnapshotError(f"{name}: expected {size} bytes inside the file, found {found}")
            if found != [first, first + size]:
                raise SnapshotError(f"{name}: expected {size} bytes, found {found}")
            self._places[name] = begin + first

    def read(self, name: str, band: slice) -> NDArray[np.float32]:
        place = self._places[name]
        return self._source[place + 4 * band.start : place + 4 * band.stop].view("<f4")

    def hash(self) -> str:
        return banded_hash(self._schema, self.read)


def banded_hash(schema: Schema, values: Values) -> str:
    """`snapshot_hash` of a block of any size in a few megabytes."""
    hasher, shapes = SnapshotHasher(), dict(schema.tensors)
    for name, band in schema.bands():
        if band.start == 0:
            hasher.begin(name, shapes[name])
        hasher.update(values(name, band))
    return hasher.hexdigest()


def from_safetensors(data: bytes, schema: Schema) -> dict[str, NDArray[np.float32]]:
    """The tensors of a snapshot file, checked against the schema, or SnapshotError."""
    if len(data) > max_snapshot_bytes(schema):
        raise SnapshotError(
            f"expected a snapshot of at most {max_snapshot_bytes(schema)} bytes, found {len(data)}"
        )
    _checked_header(np.frombuffer(data, np.uint8), schema)
    try:
        tensors: dict[str, NDArray[np.float32]] = safetensors.numpy.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise SnapshotError(f"not a safetensors file: {error}; download it again") from None
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise SnapshotError(f"{name}: expected finite values, found NaN or infinity")
    return {name: tensors[name] for name, _ in schema.tensors}


def _checked_header(source: ByteSource, schema: Schema) -> tuple[int, dict[str, Any]]:
    """Names, shapes and types before any tensor is made, so that a header cannot ask for memory; where the
    values begin, and the header's entries."""
    length = int.from_bytes(source[0:8].tobytes(), "little")
    if len(source) < 8 or length > min(len(source), max_snapshot_bytes(schema)) - 8:
        raise SnapshotError(f"not a safetensors file: {len(source)} bytes cannot hold its header")
    try:
        header = json.loads(source[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SnapshotError("not a safetensors file: its header is not the expected JSON") from None
    expected = {name: ("F32", shape) for name, shape in schema.tensors}
    if found != expected:
        raise SnapshotError(_difference(list(expected.items()), list(found.items())))
    return 8 + length, header


def _difference(expected: Sequence[object], found: Sequence[object]) -> str:
    missing = [item for item in expected if item not in found]
    extra = [item for item in found if item not in expected]
    return (
        f"snapshot of another block: expected {len(expected)} tensors, found {len(found)}; "
        f"missing {str(missing[:3])[:200]}, unexpected {str(extra[:3])[:200]}"
    )
