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

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from blocktrain.errors import WireError
from blocktrain.wire.codec import Schema, Tensors
from blocktrain.wire.hashing import snapshot_hash

__all__ = [
    "SnapshotError",
    "Tensors",
    "blank_file",
    "from_safetensors",
    "load_into",
    "max_snapshot_bytes",
    "schema_of",
    "snapshot_hash",
    "tensors_of",
    "to_safetensors",
]

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


@torch.no_grad()
def load_into(block: nn.Module, tensors: Tensors) -> None:
    """Set every parameter of the block; the tensors must be those of its schema."""
    parameters = dict(block.named_parameters())
    if sorted(parameters) != sorted(tensors):
        raise SnapshotError(_difference(sorted(parameters), sorted(tensors)))
    for name, parameter in parameters.items():
        # In place: the optimizer holds these very parameters.
        parameter.copy_(torch.from_numpy(np.asarray(tensors[name], order="C")))


def max_snapshot_bytes(schema: Schema) -> int:
    """No safetensors file of this schema is longer; a download may be cut off here."""
    return 8 + HEADER_BYTES_PER_TENSOR * (1 + len(schema.tensors)) + 4 * schema.num_values


def blank_file(schema: Schema) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.float32]]]:
    """A safetensors file still to be filled, and its tensors as views into it.

    A merge writes into the views, so that 64 MB of weights are neither copied nor allocated twice.
    """
    entries, end = {}, 0
    for name, shape in schema.tensors:
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    # To a multiple of 8, so that the values lie aligned and numpy can view them as fp32 in place.
    header += b" " * (-len(header) % 8)
    file = np.empty(8 + len(header) + end, np.uint8)
    file[: 8 + len(header)] = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    values = file[8 + len(header) :].view("<f4")
    views, start = {}, 0
    for name, shape in schema.tensors:
        size = math.prod(shape)
        views[name] = values[start : start + size].reshape(shape)
        start += size
    return file, views


def to_safetensors(tensors: Tensors) -> bytes:
    file, views = blank_file(Schema.of({name: tensors[name] for name in sorted(tensors)}))
    for name, view in views.items():
        view[...] = tensors[name]
    return file.tobytes()


def from_safetensors(data: bytes, schema: Schema) -> dict[str, NDArray[np.float32]]:
    """The tensors of a snapshot file, checked against the schema, or SnapshotError."""
    if len(data) > max_snapshot_bytes(schema):
        raise SnapshotError(
            f"expected a snapshot of at most {max_snapshot_bytes(schema)} bytes, found {len(data)}"
        )
    _check_header(data, schema)
    try:
        tensors: dict[str, NDArray[np.float32]] = safetensors.numpy.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise SnapshotError(f"not a safetensors file: {error}; download it again") from None
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise SnapshotError(f"{name}: expected finite values, found NaN or infinity")
    return {name: tensors[name] for name, _ in schema.tensors}


def _check_header(data: bytes, schema: Schema) -> None:
    """Names, shapes and types before any tensor is made, so that a header cannot ask for memory."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise SnapshotError(f"not a safetensors file: {len(data)} bytes cannot hold its header")
    try:
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SnapshotError("not a safetensors file: its header is not the expected JSON") from None
    expected = {name: ("F32", shape) for name, shape in schema.tensors}
    if found != expected:
        raise SnapshotError(_difference(list(expected.items()), list(found.items())))


def _difference(expected: Sequence[object], found: Sequence[object]) -> str:
    missing = [item for item in expected if item not in found]
    extra = [item for item in found if item not in expected]
    return (
        f"snapshot of another block: expected {len(expected)} tensors, found {len(found)}; "
        f"missing {str(missing[:3])[:200]}, unexpected {str(extra[:3])[:200]}"
    )
