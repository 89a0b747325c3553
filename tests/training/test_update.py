"""Progress is in the snapshot, in the local weights or in the error feedback, and never lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from blocktrain.codec_spec import CodecSpec
from blocktrain.training.merge import MergeInput, assembled, merged_bands
from blocktrain.training.ranks import ALONE
from blocktrain.training.snapshot import schema_of, tensors_of
from blocktrain.training.update import (
    Weights,
    decoded_delta,
    difference,
    encode_update,
    fold_back,
    moved,
)
from blocktrain.wire.codec import decode, held


def small_block(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 70, bias=False))
    block.register_parameter("scale", nn.Parameter(torch.tensor(12.0)))
    return block


def changed(weights: Weights, seed: int) -> Weights:
    generator = np.random.default_rng(seed)
    return {
        name: np.asarray(value + 0.01 * generator.standard_normal(value.shape), dtype=np.float32)
        for name, value in weights.items()
    }


@pytest.mark.parametrize("codec", ["sparse:64", "sign", "bits:4"])
def test_what_a_frame_leaves_out_is_in_the_feedback(codec: str) -> None:
    block = small_block()
    base, schema, spec = tensors_of(block), schema_of(block), CodecSpec.parse(codec)
    zero = {name: np.zeros_like(value) for name, value in base.items()}
    local, feedback = changed(base, 1), changed(zero, 2)
    encoded = encode_update(spec, schema, base=base, origin=base, local=local, feedback=feedback, beta=0.95)
    sent = decode(spec, schema, encoded.payload)
    assert encoded.feedback is not None
    for name in base:
        wanted = base[name] - local[name] + np.float32(0.95) * feedback[name]
        np.testing.assert_allclose(sent[name] + encoded.feedback[name], wanted, atol=1e-7)


@pytest.mark.parametrize("codec", ["sparse:64", "sign", "bits:4", "dense"])
def test_a_refused_update_returns_whole(codec: str) -> None:
    block = small_block()
    base, schema, spec = tensors_of(block), schema_of(block), CodecSpec.parse(codec)
    local = changed(base, 1)
    encoded = encode_update(spec, schema, base=base, origin=base, local=local, feedback=None, beta=0.95)
    delta = decoded_delta(spec, schema, encoded.payload, base)
    feedback = fold_back(encoded.feedback, delta)
    for name in base:
        np.testing.assert_allclose(feedback[name], base[name] - local[name], atol=1e-7)


def test_dense_update_of_one_worker_gives_back_its_weights_bit_for_bit() -> None:
    block = small_block()
    base, schema, dense = tensors_of(block), schema_of(block), CodecSpec.parse("dense")
    local = changed(base, 3)
    local["0.bias"][0] = -0.0
    encoded = encode_update(dense, schema, base=base, origin=base, local=local, feedback=None, beta=0.95)
    assert encoded.feedback is None
    arrived = decode(dense, schema, encoded.payload)
    inputs = [MergeInput(update_id="a", weight=1.0, scale=1.0, values=held(arrived))]
    merged = assembled(schema, merged_bands(dense, schema, held(base), inputs, 1.0))
    for name in base:
        assert merged[name].tobytes() == local[name].tobytes()


def test_dense_update_from_own_weights_is_put_on_the_new_base() -> None:
    block = small_block()
    base, schema, dense = tensors_of(block), schema_of(block), CodecSpec.parse("dense")
    origin = changed(base, 4)
    local = changed(origin, 5)
    encoded = encode_update(dense, schema, base=base, origin=origin, local=local, feedback=None, beta=0.95)
    delta = decoded_delta(dense, schema, encoded.payload, base)
    for name in base:
        np.testing.assert_allclose(delta[name], origin[name] - local[name], atol=1e-6)


def test_a_move_of_zero_leaves_every_bit_alone() -> None:
    block = small_block()
    with torch.no_grad():
        next(p for p in block.parameters() if p.ndim == 2)[0, 0] = -0.0
    before = tensors_of(block)
    ALONE.move(block, {name: np.zeros_like(value) for name, value in before.items()})
    after = tensors_of(block)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_a_move_adds_to_the_weights_and_keeps_the_parameters() -> None:
    block = small_block()
    parameters = list(block.parameters())
    before = tensors_of(block)
    shift = difference(changed(before, 6), before)
    ALONE.move(block, shift)
    assert all(old is new for old, new in zip(parameters, block.parameters(), strict=True))
    for name, value in tensors_of(block).items():
        np.testing.assert_array_equal(value, moved(before, shift)[name])


def test_half_of_an_update_merged_at_half_weight_returns() -> None:
    delta = {"w": np.full(3, 2.0, np.float32)}
    np.testing.assert_array_equal(fold_back(None, delta, 0.5)["w"], np.ones(3, np.float32))
    np.testing.assert_array_equal(fold_back(delta, delta, 0.0)["w"], delta["w"])


@pytest.mark.gpu
def test_updates_work_from_cuda() -> None:
    block = small_block().cuda()
    base, schema = tensors_of(block), schema_of(block)
    shift = {name: np.ones_like(value) for name, value in base.items()}
    ALONE.move(block, shift)
    spec = CodecSpec.parse("sign")
    encoded = encode_update(
        spec, schema, base=base, origin=base, local=tensors_of(block), feedback=None, beta=0.95
    )
    for value in decode(spec, schema, encoded.payload).values():
        np.testing.assert_allclose(value, -1.0, atol=1e-3)
