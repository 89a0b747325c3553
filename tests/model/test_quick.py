"""Rough rows for drafts: near the block's own, one token at a time, over the same cache."""

from __future__ import annotations

import pytest
import torch
from tiny import shaken, some_tokens, tiny_codebook, tiny_objective
from torch import nn

from blocktrain.model.quick import PlainBlock, QuickBlock, is_quickenable, make_stepper

LENGTH = 24


@pytest.mark.parametrize("stepper", [QuickBlock, PlainBlock])
@pytest.mark.parametrize(
    "shape", ["model.convolution=4", "model.convolution=0", "model.mixer=none", "model.layers_per_block=2"]
)
def test_rows_token_by_token_are_near_those_of_the_whole_text(shape: str, stepper: type[QuickBlock]) -> None:
    objective = tiny_objective(shape)
    block, codebook = shaken(objective.build(0, seed=0)), tiny_codebook(objective)
    tokens = some_tokens(1, LENGTH)
    with torch.no_grad():
        expected = block(tokens, codebook).logits_BTV[0].log_softmax(dim=-1)
    cache, quick = block.new_cache(), stepper(block, codebook)
    for i, token in enumerate(tokens[0].tolist()):
        found = quick.step(token, cache).log_softmax(dim=-1)
        assert torch.allclose(found, expected[i], atol=0.05)
    assert cache.length == LENGTH


def test_steps_and_whole_passes_share_one_cache() -> None:
    objective = tiny_objective()
    block, codebook = shaken(objective.build(0, seed=0)), tiny_codebook(objective)
    tokens, cache, quick = some_tokens(1, LENGTH), block.new_cache(), QuickBlock(block, codebook)
    with torch.no_grad():
        expected = block(tokens, codebook).logits_BTV[0, -1].log_softmax(dim=-1)
        block(tokens[:, :10], codebook, cache=cache)
        quick.step(int(tokens[0, 10]), cache)
        quick.step(3, cache)
        cache.truncate(11)
        block(tokens[:, 11:-1], codebook, cache=cache)
    found = quick.step(int(tokens[0, -1]), cache).log_softmax(dim=-1)
    assert torch.allclose(found, expected, atol=0.05)


def test_a_block_with_parts_unknown_to_the_quick_path_takes_the_plain_one() -> None:
    objective = tiny_objective()
    block, codebook = objective.build(0, seed=0), tiny_codebook(objective)
    assert isinstance(make_stepper(block, codebook), QuickBlock)
    block.add_module("something_new", nn.Linear(2, 2))
    assert not is_quickenable(block)
    assert isinstance(make_stepper(block, codebook), PlainBlock)
