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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Recipe, TrainingConfig
from blocktrain.data.batches import Batches
from blocktrain.errors import DeviceError
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, Hint, make_codebook
from blocktrain.model.families import codebook_rows, denoises
from blocktrain.model.objective import Loss, Objective
from blocktrain.training.device import DeviceRoom, autocast
from blocktrain.training.frozen import FrozenOutputs, gradient_behind
from blocktrain.training.memory import fitting_micro_batch
from blocktrain.training.optimizer import Optimizer
from blocktrain.training.ranks import ALONE, Ranks


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
    rows = codebook_rows(recipe.model, recipe.objective, vocabulary)
    table = make_codebook(rows, recipe.model.width, derive_seed("codebook", recipe.seed))
    return Codebook(table, recipe.objective.codebook == "learned")


def training_config(recipe: Recipe, *, reference: bool) -> TrainingConfig:
    """The reference may have learning rates of its own; everything else is the same."""
    config = recipe.training
    if not reference:
        return config
    return dataclasses.replace(
        config,
        matrix_lr=config.reference_matrix_lr or config.matrix_lr,
        other_lr=config.reference_other_lr or config.other_lr,
    )


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
        ranks: Ranks = ALONE,
    ) -> None:
        """With several `ranks`, each has a trainer; a block that they share is sharded before."""
        self.ranks = ranks
        self._trained: Sequence[nn.Parameter] | None = None
        self.recipe, self.objective, self.block, self.index = recipe, objective, block, index
        self.shards, self.codebook = shards, codebook
        block.requires_grad_(True)  # it may have been frozen behind another until now
        self.optimizer = Optimizer(block, training_config(recipe, reference=index is None), ranks)
        self.codebook_optimizer = codebook_optimizer
        self.device = next(block.parameters()).device
        self.room = DeviceRoom(self.device, block)
        self.window_end: int | None = None
        """Frozen outputs are prepared for steps before this one only; None: to the end of training."""
        self.freeze(frozen)
        self.generator = torch.Generator(self.device)
        self._loss: Callable[..., Loss] = objective.loss
        batch, wanted = recipe.training.batch, recipe.training.micro_batch
        if wanted == "auto":
            wanted = fitting_micro_batch(recipe, objective, block, index)
        self.micro_batch = batch if wanted is None else min(wanted, batch)
        if ranks.sharded:
            # A pass needs all ranks, so all must make as many.
            self.micro_batch = ranks.least(self.micro_batch)
        block.recompute = recipe.training.recompute
        compiled = recipe.training.compile
        # Not tried with sharding, whose hooks run inside the layers.
        if not ranks.sharded and (compiled or (compiled is None and self.device.type == "cuda")):
            # Shapes never change within a run, so the compiled code need not allow for others. Small blocks
            # are compiled whole, loss included; a deep one layer by layer, which compiles once for all.
            positions = self.micro_batch * recipe.model.context
            if denoises(recipe.model) and objective.holds_logits(positions) and not block.recompute:
                self._loss = torch.compile(objective.loss, dynamic=False)
            else:
                block.compile_layers()

    def freeze(self, blocks: Sequence[Block], codebook_VD: Tensor | None = None) -> None:
        """Use these frozen blocks (on the CPU, in the order of `objective.frozen`) from the next step, with
        the codebook as it was when they were copied (None: as it is now)."""
        needed = () if self.index is None else self.objective.frozen(self.index)
        assert len(blocks) in (0, len(needed)), f"block {self.index} trains beside blocks {needed}"
        before = 0 if self.index is None else len(self.objective.upstream(self.index))
        self.behind = list(blocks[before:])
        for block in self.behind:
            block.requires_grad_(False)
            block.recompute = self.recipe.training.recompute
        self.frozen = FrozenOutputs(
            blocks[:before],
            self.codebook.copied() if codebook_VD is None else codebook_VD,
            max_host_bytes=self.recipe.training.frozen_host_bytes,
        )

    def step(self, step: int, shard: int) -> Tensor:
        """One optimizer step on batch (shard, step); returns the cross entropy, still on the device."""
        upstream = self._upstream(step, shard)
        while True:
            try:
                ce = self._gradients(step, shard, upstream)
                break
            except torch.OutOfMemoryError:
                self.optimizer.clear_gradients()
                self._shrink()
        if not self.ranks.alone:
            self._add_up(ce)
        self.optimizer.step(step)
        if self.codebook_optimizer is not None:
            self.codebook_optimizer.step(step)
        return ce

    def _gradients(self, step: int, shard: int, upstream: Tensor | None) -> Tensor:
        """Adds up the gradients of this rank's share of a batch, micro-batch by micro-batch; returns what the
        share adds to the batch's cross entropy."""
        table = self.codebook()
        tokens, targets, hint = self._batch(step, shard, table)
        batch, length = len(tokens), self.micro_batch
        # Sequences with a hint come first, those with unknown context before the others of them.
        hinted = 0 if hint is None else len(hint.sigma_P)
        swept = self.objective.num_swept(batch) if hint is not None else 0
        # The cross entropy is that of the sequences without a hint, or of all where all have one.
        reported = batch - hinted if hinted < batch else batch
        ce = torch.zeros((), device=self.device)
        own = self.ranks.share(batch)
        for start in range(own.start, own.stop, length):
            part = slice(start, min(start + length, own.stop))
            count = part.stop - start
            before = upstream[start - own.start : part.stop - own.start] if upstream is not None else None
            if self.behind:
                with torch.no_grad(), autocast(self.device):
                    features = self.block(tokens[part], table, upstream_BTD=before).features_BTD
                place = features, tokens[part], targets[part], table
                part_ce, gradient = gradient_behind(self.objective, self.behind, *place, count / batch)
                # Once more, with what the backward pass needs. Held while the parts behind had their turn, it
                # made a quarter of a model take 0.55 of the whole's memory on an H200.
                with autocast(self.device):
                    features = self.block(tokens[part], table, upstream_BTD=before).features_BTD
                features.backward(gradient)
                ce = ce + part_ce * (count / batch)
                continue
            with autocast(self.device):
                loss = self._loss(
                    self.block,
                    tokens[part],
                    targets[part],
                    table,
                    Hint(hint.z_PTD[part], hint.sigma_P[part])
                    if hint is not None and start < hinted
                    else None,
                    before,
                    min(max(swept - start, 0), count),
                )
            # Under no autocast: gradients take the types of the forward pass. A learned codebook is part of
            # every micro-batch's graph.
            kept = self.codebook.learned and part.stop < batch
            total = loss.total + self._unused() if self.ranks.sharded else loss.total
            (total * (count / batch)).backward(retain_graph=kept)
            plain = count - min(max(hinted - start, 0), count) if hinted < batch else count
            if plain:
                ce = ce + loss.ce * (plain / reported)
        return ce

    def _unused(self) -> Tensor:
        """Nothing, with a gradient of zero for each parameter outside the layers. A rank without hinted
        sequences would send no gradient for those of the hint, and FSDP2 adds up all of a pass or hangs."""
        outside = (one for name, one in self.block.named_parameters() if "layers." not in name)
        return 0.0 * torch.stack([one.flatten()[0] for one in outside]).sum()

    def _add_up(self, ce: Tensor) -> None:
        if self._trained is None:
            # Which parameters have gradients is the same in every step.
            self._trained = self.ranks.trained(self.optimizer.parameters)
        self.ranks.sum_gradients(self._trained)
        dist.all_reduce(ce)

    def _shrink(self) -> None:
        """After running out of memory: half the micro-batch where the recipe leaves it to us."""
        training = self.recipe.training
        if training.micro_batch != "auto" or self.micro_batch == 1 or self.ranks.sharded:
            less = (
                [] if self.micro_batch == 1 else [f"training.micro_batch below {self.micro_batch} (or auto)"]
            )
            less += [] if training.recompute else ["training.recompute = true"]
            raise DeviceError(
                f"{self.device} ran out of memory in a step with {self.micro_batch} sequences at once; set "
                f"{' or '.join([*less, 'a smaller model.layers_per_block or model.width'])}, or close other "
                "programs"
            )
        self.micro_batch = (self.micro_batch + 1) // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

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
        needed = () if self.index is None else self.objective.frozen(self.index)
        have = len(self.frozen.blocks) + len(self.behind)
        assert have == len(needed), f"block {self.index} trains beside blocks {needed}: freeze() them first"
        if not self.frozen:
            return None
        if not self.frozen.prepared(shard, step):
            end = self.recipe.training.steps if self.window_end is None else self.window_end
            steps = range(step, max(end, step + 1))

            def own_tokens(step: int) -> Tensor:
                tokens = self._batch(step, shard, self.codebook())[0]
                return tokens[self.ranks.share(len(tokens))]

            self.frozen.prepare(self.room, shard, steps, own_tokens)
        return self.frozen.features(shard, step)
