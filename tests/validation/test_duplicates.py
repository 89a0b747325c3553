"""Copies are found, honest workers on the same snapshot are not taken for copies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from blocktrain.codec_spec import CodecSpec
from blocktrain.validation.duplicates import SKETCH_VALUES, Sketch, likeness, most_alike, sketch_of
from tests.adversaries.training import partly_moved
from tests.validation.kit import coded, honest

CODECS = ("sparse:64", "sign", "bits:4", "dense")
SPARSE, DENSE = CodecSpec.parse("sparse:64"), CodecSpec.parse("dense")


@pytest.mark.parametrize("codec", CODECS)
def test_honest_workers_are_not_alike(codec: str) -> None:
    sketches = [sketch_of(coded(honest(shard), codec), 7, CodecSpec.parse(codec)) for shard in range(3)]
    for earlier, later in itertools.permutations(sketches, 2):
        assert not likeness(earlier, later).is_copy, likeness(earlier, later)


def test_signs_of_one_size_agree_by_chance_and_are_no_copy() -> None:
    """Small blocks have few chunks: honest updates in `sign` were refused as copies of earlier ones."""
    generator = np.random.default_rng(0)
    first, agreeing, redrawn = (generator.random(3000) for _ in range(3))
    update = np.where(first < 0.5, -1.0, 1.0).astype(np.float32)
    sign = CodecSpec.parse("sign")

    def is_like_it(values: NDArray[np.float32]) -> bool:
        scaled = {"a": np.float32(0.9) * values}
        return likeness(sketch_of({"a": update}, 7, sign), sketch_of(scaled, 7, sign)).is_copy

    assert not is_like_it(np.where(agreeing < 0.6, update, -update))
    drawn_again = np.where(redrawn < 0.5, -1.0, 1.0).astype(np.float32)
    assert is_like_it(np.where(agreeing < 0.4, update, drawn_again))


@pytest.mark.parametrize("codec", CODECS)
def test_a_copy_is_found_also_when_scaled(codec: str) -> None:
    update = coded(honest(0), codec)
    source = sketch_of(update, 7, CodecSpec.parse(codec))
    scaled = {name: np.float32(0.37) * value for name, value in update.items()}
    assert likeness(source, source).equal == 1.0
    assert likeness(source, sketch_of(scaled, 7, CodecSpec.parse(codec))).equal > 0.99


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_partly_moved_copy_is_found(share: float) -> None:
    update = coded(honest(0))
    found = likeness(sketch_of(update, 7, SPARSE), sketch_of(partly_moved(update, share, seed=1), 7, SPARSE))
    assert found.is_copy, found


def test_the_source_of_a_copy_is_named() -> None:
    sketches = [(str(shard), sketch_of(coded(honest(shard)), 7, SPARSE)) for shard in range(3)]
    copy = sketch_of(partly_moved(coded(honest(1)), 0.5, seed=2), 7, SPARSE)
    found = most_alike(copy, sketches)
    assert found is not None
    assert found[0] == "1"
    assert most_alike(copy, []) is None


def test_an_empty_update_is_like_nothing() -> None:
    empty = sketch_of({"a": np.zeros(100, np.float32)}, 1, DENSE)
    assert not likeness(empty, empty).is_copy


def test_a_sketch_survives_storage() -> None:
    sketch = sketch_of(coded(honest(0)), 7, SPARSE)
    again = Sketch.from_bytes(sketch.to_bytes())
    assert np.array_equal(again.places, sketch.places)
    assert np.array_equal(again.values, sketch.values)


@pytest.mark.parametrize("codec", ["sign", "bits:4", "bits:8", "dense"])
def test_codecs_that_send_every_value_are_looked_at_in_4096_places(codec: str) -> None:
    """bits:4 was once taken for a codec that keeps 4 of 4096 values: 1,048,576 places, 0.95 s an update."""
    update = {"a": np.ones(100_000, np.float32)}
    assert len(sketch_of(update, 7, CodecSpec.parse(codec)).places) <= SKETCH_VALUES
