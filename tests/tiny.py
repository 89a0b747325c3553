"""The smallest real parts: recipes, blocks and text that a test can train in milliseconds."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block, make_codebook
from blocktrain.model.objective import Objective

VOCABULARY = 16
"""Fewer symbols than the width, so that the codebook is orthonormal and sums over targets are cheap."""

WORDS = (
    b"the a one block of layers noise learns each token from every worker alone and then they agree on "
    b"what comes next while nobody holds all state so small machines may train large models together"
).split()

RECIPE: dict[str, dict[str, Any]] = {
    "model": {
        "width": 32,
        "heads": 2,
        "blocks": 2,
        "layers_per_block": 1,
        "context": 32,
        "condition_width": 8,
    },
    "training": {"steps": 6, "batch": 4, "warmup_steps": 2},
    "evaluation": {
        "max_bytes": 700,
        "pooling_bytes": 500,
        "noise_draws": 2,
        "batch": 8,
        "sample_bytes": 20,
    },
}


def tiny_recipe(*overrides: str) -> Recipe:
    """The tiny recipe, changed as `--set` would."""
    return resolve_recipe(copy.deepcopy(RECIPE), overrides)


def tiny_objective(*overrides: str) -> Objective:
    recipe = tiny_recipe(*overrides)
    return Objective(recipe.model, recipe.objective, vocabulary=VOCABULARY)


def adaptive(block: Block) -> AdaptiveBlock:
    """A block of the family `blocktrain`, with its parts."""
    assert isinstance(block, AdaptiveBlock)
    return block


def shaken(block: Block, seed: int = 0) -> Block:
    """The block with noise on every weight: output maps start at zero, which would hide every leak."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return block.eval()


def shaken_blocks(objective: Objective) -> list[Block]:
    return [shaken(objective.build(b, seed=b), seed=b) for b in range(objective.model.blocks)]


def tiny_codebook(objective: Objective) -> Tensor:
    return make_codebook(VOCABULARY, objective.model.width, seed=7)


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def some_noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prose(num_bytes: int, seed: int = 0) -> bytes:
    """Words in an order that never changes: something to learn, the same on every machine."""
    order = hashlib.shake_128(f"prose {seed}".encode()).digest(num_bytes // 2)
    return b" ".join(WORDS[byte % len(WORDS)] for byte in order)[:num_bytes]
