"""The memory foretold for a block is the allocator's peak on a GPU, within a tenth."""

from __future__ import annotations

import gc

import pytest
import torch
from large_blocks import Shape, built, recipe_of

from blocktrain.training.memory import fitting_micro_batch, training_bytes

SHAPES = {
    "wide": Shape("wide", 2048, 16, 4, 6, 5632, 1024, 32768, 16, 16, 4),
    "deep": Shape("deep", 1024, 16, 16, 24, 2816, 1024, 16384, 32, 16, 8),
    "large vocabulary": Shape("large vocabulary", 1024, 8, 2, 8, 4096, 2048, 128256, 8, 8, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_memory_foretold_is_the_peak(name: str, recompute: bool) -> None:
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trainer = built(recipe_of(SHAPES[name], recompute=recompute), SHAPES[name].vocabulary, device)
    for step in range(2):
        trainer.step(step, 0)
    peak = torch.cuda.max_memory_allocated(device) - before
    foretold = training_bytes(trainer.recipe, trainer.objective, "cuda")
    print(f"{name}, recompute {recompute}: foretold {foretold / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB")
    assert foretold == pytest.approx(peak, rel=0.1)
    assert fitting_micro_batch(trainer.recipe, trainer.objective, device, 0) >= 1
