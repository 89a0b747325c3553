"""Blocks with matrices laid out for a few rows compute what the blocks themselves compute."""

from __future__ import annotations

import pytest
import torch

from blocktrain.model import packed as packing
from blocktrain.model.packed import PackedLinear, is_packable, packed
from tests.tiny import shaken, some_tokens, tiny_codebook, tiny_objective


@pytest.mark.parametrize("few_products", [0, packing.FEW_PRODUCTS])
@pytest.mark.parametrize("length", [1, 2, 17, 24])
@pytest.mark.parametrize("shape", ["model.convolution=4", "model.mixer=none"])
def test_a_packed_block_gives_the_blocks_rows_over_the_same_parameters(
    shape: str, length: int, few_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "FEW_PRODUCTS", few_products)
    objective = tiny_objective(shape)
    block, codebook = shaken(objective.build(0, seed=0)), tiny_codebook(objective)
    other = packed(block)
    tokens = some_tokens(1, length)
    with torch.inference_mode():
        expected = block(tokens, codebook).logits_BTV
        found = other(tokens, codebook).logits_BTV
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert any(isinstance(module, PackedLinear) for module in other.modules())
    assert not any(isinstance(module, PackedLinear) for module in block.modules())
    # All but the hint's.
    addresses = {part.data_ptr() for name, part in block.named_parameters() if name != "hint.weight"}
    assert {parameter.data_ptr() for parameter in other.parameters()} == addresses


def test_a_block_in_another_precision_is_left_as_it_is() -> None:
    block = tiny_objective().build(0, seed=0)
    assert is_packable(block)
    assert not is_packable(block.double())
