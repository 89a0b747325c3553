"""The seam between model families and everything else: what a block of a recipe is built from.

A family gives a block module with its first weights (model/block.py says what a block can do). Nothing else
asks which family a recipe has: a block says itself which of its parameters are matrices, what its caches
are, and how its logits are made.
"""

from __future__ import annotations

import torch

from blocktrain.config import ModelConfig, ObjectiveConfig
from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block
from blocktrain.model.llama import LlamaAttention, LlamaBlock
from blocktrain.model.qwen3 import Qwen3Attention


def denoises(model: ModelConfig) -> bool:
    """Whether the family's blocks predict embeddings of a codebook and know hints; the others are plain
    causal models with an output map of their own."""
    return model.family == "blocktrain"


def codebook_rows(model: ModelConfig, objective: ObjectiveConfig, vocabulary: int) -> int:
    """None where every block has an output map of its own."""
    return vocabulary if denoises(model) and objective.codebook != "own" else 0


def build_block(
    model: ModelConfig,
    objective: ObjectiveConfig,
    *,
    vocabulary: int,
    seed: int,
    num_layers: int | None = None,
    hints: bool = True,
    upstream: bool = False,
    last: bool = True,
) -> Block:
    """A block with the seeded initial weights that every machine can regenerate. `last`: whether it is the
    end of a model; an inner part of a serial one has no output map."""
    # On the CPU, whose generator gives the same weights on every machine; the caller moves the block.
    # Forked, so that building a block does not move the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not denoises(model):
            return LlamaBlock(
                model,
                vocabulary=vocabulary,
                num_layers=num_layers,
                attention=Qwen3Attention if model.family == "qwen3" else LlamaAttention,
                first=not upstream,
                last=last,
            )
        return AdaptiveBlock(
            model, objective, vocabulary=vocabulary, num_layers=num_layers, hints=hints, upstream=upstream
        )
