"""The inner loop: one block, its optimizer and its batches, one step at a time.

The same object trains a block in a local run and on a worker. A step is a pure function of the
weights, the optimizer state and (seed, shard, step): nothing random is carried from one to the next,
so a run may stop after any step and go on elsewhere with the same result.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Recipe, TrainingConfig
from blocktrain.data.shards import Shards
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, make_codebook
from blocktrain.model.objective import Loss, Objective
from blocktrain.training.optimizer import Optimizer


class Codebook(nn.Module):
    """The target embeddings: a seeded constant, or one learned table shared by all blocks."""

    table: Tensor

    def __init__(self, table_VD: Tensor, learned: bool) -> None:
        super().__init__()
        self.learned = learned
        if learned:
            self.table = nn.Parameter(table_VD)
        else:
            self.register_buffer("table", table_VD)

    def forward(self) -> Tensor:
        return F.normalize(self.table, dim=-1) if self.learned else self.table


def build_codebook(recipe: Recipe, vocabulary: int) -> Codebook:
    table = make_codebook(vocabulary, recipe.model.width, derive_seed("codebook", recipe.seed))
    return Codebook(table, recipe.objective.codebook == "learned")


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 matrix products on CUDA, plain fp32 elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def training_config(recipe: Recipe, *, reference: bool) -> TrainingConfig:
    """The reference may have a learning rate of its own; everything else is the same."""
    config = recipe.training
    if reference and config.reference_other_lr is not None:
        return dataclasses.replace(config, other_lr=config.reference_other_lr)
    return config


@dataclass
class Frozen:
    """Other blocks' weights, used forward only, in the order they run."""

    blocks: Sequence[Block]
    codebook: Codebook

    @torch.no_grad()
    def features(self, tokens_BT: Tensor) -> Tensor | None:
        upstream = None
        for block in self.blocks:
            upstream = block(tokens_BT, self.codebook(), upstream_BTD=upstream).features_BTD
        return upstream


class BlockTrainer:
    """Trains one block (or, with index None, the end-to-end reference)."""

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        block: Block,
        index: int | None,
        shards: Shards,
        codebook: Codebook,
        *,
        frozen: Sequence[Block] = (),
        codebook_optimizer: Optimizer | None = None,
    ) -> None:
        self.recipe, self.objective, self.block, self.index = recipe, objective, block, index
        self.shards, self.codebook = shards, codebook
        self.optimizer = Optimizer(block, training_config(recipe, reference=index is None))
        self.codebook_optimizer = codebook_optimizer
        self.frozen = Frozen(frozen, codebook)
        self.device = next(block.parameters()).device
        self.generator = torch.Generator(self.device)
        self._loss = self._loss_function()

    def _loss_function(self) -> Callable[..., Loss]:
        wanted = self.recipe.training.compile
        if wanted or (wanted is None and self.device.type == "cuda"):
            return torch.compile(self.objective.loss, dynamic=False)
        return self.objective.loss

    def step(self, step: int, shard: int) -> Tensor:
        """One optimizer step on batch (shard, step); returns the cross entropy, still on the device."""
        tokens, targets = self.shards.batch(shard, step)
        table = self.codebook()
        hint = None
        if self.index is not None:
            self.generator.manual_seed(derive_seed("noise", self.recipe.seed, self.index, shard, step))
            hint = self.objective.draw_hint(self.index, targets, table, self.generator)
            tokens = self.objective.hide_context(tokens, self.generator)
        z, sigma = (hint.z_PTD, hint.sigma_P) if hint is not None else (None, None)
        with autocast(self.device):
            upstream = self.frozen.features(tokens)
            loss = self._loss(self.block, tokens, targets, table, z, sigma, upstream)
        loss.total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(step)
        if self.codebook_optimizer is not None:
            self.codebook_optimizer.step(step)
        return loss.ce
