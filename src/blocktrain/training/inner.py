"""The inner loop: one block, its optimizer and its batches, one step at a time.

The same object trains a block in a local run and on a worker. A step is a pure function of the
weights, the optimizer state, the frozen blocks and (seed, shard, step): nothing random is carried from one to
the next, so a run may stop after any step and go on elsewhere with the same result. On the device are the
weights of one block at a time: its own, or that of a frozen one whose outputs are being prepared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Recipe, TrainingConfig
from blocktrain.data.batches import Batches
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, Hint, make_codebook
from blocktrain.model.objective import Loss, Objective
from blocktrain.training.device import DeviceRoom, autocast
from blocktrain.training.frozen import FrozenOutputs
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

    def copied(self) -> Tensor:
        """As it is now, whatever is learned later."""
        return self().detach().clone() if self.learned else self.table


def build_codebook(recipe: Recipe, vocabulary: int) -> Codebook:
    table = make_codebook(vocabulary, recipe.model.width, derive_seed("codebook", recipe.seed))
    return Codebook(table, recipe.objective.codebook == "learned")


def training_config(recipe: Recipe, *, reference: bool) -> TrainingConfig:
    """The reference may have a learning rate of its own; everything else is the same."""
    config = recipe.training
    if reference and config.reference_other_lr is not None:
        return dataclasses.replace(config, other_lr=config.reference_other_lr)
    return config


class BlockTrainer:
    """Trains one block (or, with index None, the end-to-end reference)."""

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        block: Block,
        index: int | None,
        shards: Batches,
        codebook: Codebook,
        *,
        frozen: Sequence[Block] = (),
        codebook_optimizer: Optimizer | None = None,
    ) -> None:
        self.recipe, self.objective, self.block, self.index = recipe, objective, block, index
        self.shards, self.codebook = shards, codebook
        self.optimizer = Optimizer(block, training_config(recipe, reference=index is None))
        self.codebook_optimizer = codebook_optimizer
        self.device = next(block.parameters()).device
        self.room = DeviceRoom(self.device, block)
        self.window_end: int | None = None
        """Frozen outputs are prepared for steps before this one only; None: to the end of training."""
        self.freeze(frozen)
        self.generator = torch.Generator(self.device)
        wanted = recipe.training.compile
        self._loss: Callable[..., Loss] = objective.loss
        if wanted or (wanted is None and self.device.type == "cuda"):
            # Shapes never change within a run, so the compiled code need not allow for others.
            self._loss = torch.compile(objective.loss, dynamic=False)

    def freeze(self, blocks: Sequence[Block], codebook_VD: Tensor | None = None) -> None:
        """Use these frozen blocks (on the CPU, in the order of `objective.upstream`) as input from the next
        step, with the codebook as it was when they were copied (None: as it is now)."""
        needed = () if self.index is None else self.objective.upstream(self.index)
        assert len(blocks) in (0, len(needed)), f"block {self.index} takes input from blocks {needed}"
        self.frozen = FrozenOutputs(
            blocks,
            self.codebook.copied() if codebook_VD is None else codebook_VD,
            max_host_bytes=self.recipe.training.frozen_host_bytes,
        )

    def step(self, step: int, shard: int) -> Tensor:
        """One optimizer step on batch (shard, step); returns the cross entropy, still on the device."""
        upstream = self._upstream(step, shard)
        table = self.codebook()
        tokens, targets, hint = self._batch(step, shard, table)
        with autocast(self.device):
            loss = self._loss(self.block, tokens, targets, table, hint, upstream)
        # Under no autocast: gradients take the types of the forward pass.
        loss.total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(step)
        if self.codebook_optimizer is not None:
            self.codebook_optimizer.step(step)
        return loss.ce

    def _batch(self, step: int, shard: int, table: Tensor) -> tuple[Tensor, Tensor, Hint | None]:
        """What the block may see, what it should predict, and its hint."""
        tokens, targets = self.shards.batch(shard, step, self.index)
        if self.index is None:
            return tokens, targets, None
        # Seeded for each step and never carried on: this makes --resume exact and a step repeatable.
        self.generator.manual_seed(derive_seed("noise", self.recipe.seed, self.index, shard, step))
        hint = self.objective.draw_hint(self.index, targets, table, self.generator)
        return self.objective.hide_context(tokens, self.generator), targets, hint

    def _upstream(self, step: int, shard: int) -> Tensor | None:
        """The features that the block takes as input in this step, computed for a window of steps at once."""
        if not self.frozen:
            needed = () if self.index is None else self.objective.upstream(self.index)
            assert not needed, f"block {self.index} takes input from blocks {needed}: freeze() them first"
            return None
        if not self.frozen.prepared(shard, step):
            end = self.recipe.training.steps if self.window_end is None else self.window_end
            steps = range(step, max(end, step + 1))
            self.frozen.prepare(self.room, shard, steps, lambda s: self._batch(s, shard, self.codebook())[0])
        return self.frozen.features(shard, step)
