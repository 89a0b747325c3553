"""The merge gives the same bytes however it is computed, and one dense update gives itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from blocktrain.codec_spec import CodecSpec
from blocktrain.training.merge import MergeInput, assembled, clip_scales, merged_bands, update_norm
from blocktrain.wire import codec as codec_module
from blocktrain.wire.codec import Schema, held
from blocktrain.wire.hashing import snapshot_hash

SPARSE, DENSE = CodecSpec.parse("sparse:64"), CodecSpec.parse("dense")
SHAPES = {"a.weight": (70, 65), "b": (), "c.bias": (5,)}

Weights = dict[str, NDArray[np.float32]]


def weights(seed: int) -> Weights:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def inputs(count: int, **changes: Any) -> list[MergeInput]:
    return [
        MergeInput(
            **{"update_id": f"{i:02}", "weight": 1.0, "scale": 1.0, "values": held(weights(i)), **changes}
        )
        for i in range(1, count + 1)
    ]


def merge(
    codec: CodecSpec,
    base: Weights,
    inputs: Sequence[MergeInput],
    alpha: float,
    executor: Executor | None = None,
) -> Weights:
    schema = Schema.of(base)
    return assembled(schema, merged_bands(codec, schema, held(base), inputs, alpha, executor))


def bits(tensors: Weights) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def test_the_merge_is_the_base_minus_alpha_times_the_mean() -> None:
    found = merge(SPARSE, weights(0), inputs(3), 0.7)
    for name, base in weights(0).items():
        mean = sum(weights(i)[name] for i in (1, 2, 3)) / 3
        np.testing.assert_allclose(found[name], base - 0.7 * mean, rtol=1e-4, atol=1e-6)


def test_weights_and_scales_multiply_and_the_mean_stays_one_over_r() -> None:
    one, two = inputs(2)
    pair = [
        MergeInput(update_id="01", weight=1.0, scale=0.5, values=one.values),
        MergeInput(update_id="02", weight=0.25, scale=1.0, values=two.values),
    ]
    found = merge(SPARSE, weights(0), pair, 1.0)
    for name, base in weights(0).items():
        expected = base - (0.5 * weights(1)[name] + 0.25 * weights(2)[name]) / 2
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", [SPARSE, DENSE])
def test_threads_and_chunks_do_not_change_a_bit(codec: CodecSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = merge(codec, weights(0), inputs(4), 1.3)
    monkeypatch.setattr(codec_module, "BAND_VALUES", 7)
    with ThreadPoolExecutor(3) as threads:
        cut = merge(codec, weights(0), inputs(4), 1.3, threads)
    assert bits(plain) == bits(cut)


def test_the_merge_has_the_same_hash_on_every_machine() -> None:
    """Golden: made of integers, so that not even the random generator may change."""
    base = {"w": (np.arange(9000, dtype=np.float32).reshape(90, 100) / 7).astype(np.float32)}
    parts = [
        MergeInput(update_id=str(i), weight=1 / i, scale=0.3, values=held({"w": np.sqrt(base["w"] + i)}))
        for i in (1, 2, 3)
    ]
    assert snapshot_hash(merge(SPARSE, base, parts, 1.7))[:16] == "0bd8ece79b800fce"
    assert snapshot_hash(merge(DENSE, base, parts, 1.7))[:16] == "111d69630ebfae2c"
    assert update_norm(Schema.of(base), parts[0].values, None).hex() == "0x1.2ce2ced5f0a56p+11"


@given(st.floats(-(2.0**-40), 2.0**-40, width=32), st.floats(-10, 10, width=32))
def test_one_dense_update_at_alpha_one_is_the_result_bit_for_bit(local: float, base: float) -> None:
    """Also where local is so much smaller than base that base - (base - local) is not local."""
    sent = {"w": np.array([local, -0.0, base], np.float32)}
    one = [MergeInput(update_id="1", weight=1.0, scale=1.0, values=held(sent))]
    found = merge(DENSE, {"w": np.full(3, base, np.float32)}, one, 1.0)
    assert bits(found) == bits(sent)


def test_late_dense_updates_count_from_their_own_base() -> None:
    old, base, local, fresh = weights(10), weights(11), weights(12), weights(13)
    parts = [
        MergeInput(update_id="1", weight=0.5, scale=1.0, values=held(local), base=held(old)),
        MergeInput(update_id="2", weight=1.0, scale=1.0, values=held(fresh)),
    ]
    found = merge(DENSE, base, parts, 1.0)
    for name in SHAPES:
        step = (0.5 * (old[name] - local[name]) + (base[name] - fresh[name])) / 2
        np.testing.assert_allclose(found[name], base[name] - step, rtol=1e-4, atol=1e-5)


def test_inputs_out_of_order_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        merge(SPARSE, weights(0), inputs(2)[::-1], 1.0)


def test_norms_are_clipped_to_the_median_and_three_running_medians() -> None:
    assert clip_scales(SPARSE, [1.0, 2.0, 8.0], None) == [1.0, 1.0, 0.25]
    assert clip_scales(SPARSE, [6.0, 6.0, 12.0], 1.0) == [0.5, 0.5, 0.25]
    assert clip_scales(SPARSE, [0.0], 1.0) == [1.0]
    assert clip_scales(SPARSE, [6.0], 1.0) == [0.5]
    assert clip_scales(DENSE, [6.0], 1.0) == [1.0]


def test_the_norm_is_that_of_all_tensors_together() -> None:
    tensors = weights(3)
    expected = np.sqrt(sum(float((t.astype(np.float64) ** 2).sum()) for t in tensors.values()))
    assert update_norm(Schema.of(tensors), held(tensors), None) == pytest.approx(expected, rel=1e-12)
    assert update_norm(Schema.of(tensors), held(tensors), held(tensors)) == 0.0
