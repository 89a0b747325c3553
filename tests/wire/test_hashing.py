"""Canonical bytes: equal values hash alike, different ones never do, ambiguous ones are refused."""

from __future__ import annotations

import json
import struct
from enum import StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.wire.hashing import (
    GENESIS_HASH,
    CanonicalError,
    canonical_json,
    chain_hash,
    content_hash,
    snapshot_hash,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


def test_content_hash_is_blake3() -> None:
    assert content_hash(b"").startswith("af1349b9f5f9a1a6")  # the published test vector
    assert content_hash(memoryview(b"abc")) == content_hash(b"abc")


def test_snapshot_hash_ignores_order_and_memory_layout() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1.5], np.float32)
    reference = snapshot_hash({"a": a, "b": b})
    assert snapshot_hash({"b": b, "a": np.asfortranarray(a)}) == reference
    assert snapshot_hash({"a": np.repeat(a, 2, axis=1)[:, ::2], "b": b}) == reference


def test_snapshot_hash_is_the_same_on_every_machine() -> None:
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "scale": np.array(2.0, np.float32)}
    by_hand = b'blocktrain snapshot 1\n["scale",[]]\n' + struct.pack("<f", 2.0)
    by_hand += b'["w",[2,3]]\n' + struct.pack("<6f", *range(6))
    assert snapshot_hash(tensors) == content_hash(by_hand)


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros((3, 2), np.float32)},
        {"a": np.zeros(6, np.float32)},
        {"b": np.zeros((2, 3), np.float32)},
        {"a": -np.zeros((2, 3), np.float32)},
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.float32)},
    ],
)
def test_snapshot_hash_sees_name_shape_and_every_bit(other: dict[str, Any]) -> None:
    assert snapshot_hash(other) != snapshot_hash({"a": np.zeros((2, 3), np.float32)})


def test_snapshot_hash_refuses_other_types() -> None:
    with pytest.raises(CanonicalError, match="expected float32"):
        snapshot_hash({"a": np.zeros(2)})  # type: ignore[dict-item]


@given(json_values)
@settings(max_examples=60, deadline=None)
def test_canonical_json_reads_back_and_is_a_fixed_point(value: Any) -> None:
    encoded = canonical_json(value)
    assert json.loads(encoded) == value
    assert canonical_json(json.loads(encoded)) == encoded


def test_canonical_json_sorts_keys_and_has_no_spaces() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == '{"a":"é","b":[1,2.5,null]}'.encode()


@pytest.mark.parametrize(
    "value", [float("nan"), [float("inf")], {1: "a"}, {"a": b"bytes"}, {"a": {2}}, "\ud800", np.float32(1)]
)
def test_values_without_canonical_json_are_refused(value: Any) -> None:
    with pytest.raises(CanonicalError):
        canonical_json(value)


def test_enum_members_are_written_as_their_values() -> None:
    class Kind(StrEnum):
        MERGE = "merge"

    assert canonical_json({"kind": Kind.MERGE}) == b'{"kind":"merge"}'


def test_value_nested_too_deeply_is_refused() -> None:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CanonicalError, match="nested"):
        canonical_json(value)


def test_chain_depends_on_every_entry_before() -> None:
    first = chain_hash(GENESIS_HASH, {"n": 1})
    assert chain_hash(first, {"n": 2}) != chain_hash(chain_hash(GENESIS_HASH, {"n": 3}), {"n": 2})
    assert chain_hash(first, {"n": 2}) == chain_hash(first, {"n": 2})
