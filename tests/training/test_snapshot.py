"""Snapshots: the same weights in and out, and nothing but a TypedError from strangers' bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import ModelConfig, ObjectiveConfig
from blocktrain.model.block import Block
from blocktrain.model.families import build_block
from blocktrain.training.snapshot import (
    SnapshotError,
    SnapshotFile,
    banded_hash,
    from_safetensors,
    load_into,
    max_snapshot_bytes,
    schema_of,
    tensors_of,
    to_safetensors,
)
from blocktrain.wire.byte_source import FileBytes
from blocktrain.wire.codec import Schema, held
from blocktrain.wire.hashing import snapshot_hash

MODEL = ModelConfig(width=16, heads=2, blocks=1, layers_per_block=1, context=8, condition_width=4)


def block(seed: int = 0) -> Block:
    return build_block(MODEL, ObjectiveConfig(), vocabulary=256, seed=seed)


CONTENT = to_safetensors(tensors_of(block()))
SCHEMA = schema_of(block())


def test_weights_survive_the_file_and_the_block() -> None:
    one, two = block(1), block(2)
    tensors = from_safetensors(to_safetensors(tensors_of(one)), SCHEMA)
    load_into(two, tensors)
    assert snapshot_hash(tensors_of(two)) == snapshot_hash(tensors_of(one))
    assert snapshot_hash(tensors_of(one)) != snapshot_hash(tensors_of(block(2)))


def test_the_file_is_the_one_the_library_writes() -> None:
    assert safetensors.numpy.save(tensors_of(block())) == CONTENT


def test_the_schema_is_in_order_of_name_and_without_buffers() -> None:
    names = [name for name, _ in SCHEMA.tensors]
    assert names == sorted(names)
    assert "logit_scale" in names
    assert not any("rotary" in name for name in names)


def test_a_snapshot_is_a_copy() -> None:
    module = block()
    tensors = tensors_of(module)
    before = snapshot_hash(tensors)
    load_into(module, tensors_of(block(9)))
    assert snapshot_hash(tensors) == before


def altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    tensors = dict(tensors_of(block()))
    change(tensors)
    return to_safetensors(tensors)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        CONTENT[:-1],
        CONTENT + b"x",
        altered(lambda t: t.pop("logit_scale")),
        altered(lambda t: t.update(extra=np.zeros(3, np.float32))),
        altered(lambda t: t.update(logit_scale=np.zeros(1, np.float32))),
        altered(lambda t: t.update(logit_scale=np.float32(np.nan))),
        (2**63).to_bytes(8, "little") + CONTENT[8:],
        CONTENT + bytes(max_snapshot_bytes(SCHEMA)),
    ],
    ids=lambda content: f"{len(content)} bytes {content[:6].hex()}",
)
def test_bytes_that_are_no_snapshot_of_the_block_are_refused(content: bytes) -> None:
    with pytest.raises(SnapshotError):
        from_safetensors(content, SCHEMA)


def test_a_header_that_asks_for_memory_is_refused_before_any_is_taken() -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    with pytest.raises(SnapshotError, match="snapshot of another block"):
        from_safetensors(len(header).to_bytes(8, "little") + header, SCHEMA)


@given(st.data())
def test_a_damaged_file_gives_weights_or_a_typed_error(data: st.DataObject) -> None:
    content = bytearray(CONTENT)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 2500) | st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    try:
        tensors = from_safetensors(bytes(content), SCHEMA)
    except SnapshotError:
        return
    assert schema_of(block()).tensors == tuple((n, t.shape) for n, t in tensors.items())


def test_a_snapshot_read_from_its_file_has_the_same_values_and_hash(tmp_path: Path) -> None:
    tensors, schema = tensors_of(block(1)), schema_of(block(1))
    (tmp_path / "snapshot").write_bytes(to_safetensors(tensors))
    with (tmp_path / "snapshot").open("rb") as opened:
        file = SnapshotFile(FileBytes(opened), schema)
        for name, band in schema.bands():
            assert file.read(name, band).tobytes() == tensors[name].reshape(-1)[band].tobytes()
        assert file.hash() == snapshot_hash(tensors) == banded_hash(schema, held(tensors))


@pytest.mark.parametrize("offsets", [[-4, 0], [0], "0", [0, 10**9], [10**9, 10**9], [0.0, 4.0], None])
def test_a_header_that_points_outside_its_file_is_refused(offsets: object) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    header = json.dumps({"a": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    with pytest.raises(SnapshotError, match="expected 4 bytes"):
        SnapshotFile(np.frombuffer(data, np.uint8), Schema((("a", (1,)),)))
