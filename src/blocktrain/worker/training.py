"""The trainer's side of a worker: a block on its device, stepped through assignments.

Goes on from its own weights from one assignment of a block to the next; only another block starts from a
snapshot. Knows no network, disk or clock: the worker program and the simulation decide when a step is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from blocktrain.client.snapshots import Base
from blocktrain.data.batches import Batches
from blocktrain.model.block import Block
from blocktrain.training.frozen import for_host_memory
from blocktrain.training.inner import BlockTrainer, Codebook
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import load_into, tensors_of
from blocktrain.training.update import Weights, move
from blocktrain.worker.block_progress import BlockProgress, PendingUpdate, move_share
from blocktrain.worker.logic import batch_of, own_steps


class LocalTraining:
    def __init__(self, setup: Setup, shards: Batches, codebook: Codebook, device: torch.device) -> None:
        self.setup, self.shards, self.codebook, self.device = setup, shards, codebook, device
        self.progress: BlockProgress | None = None
        """The block being trained."""
        self.trainer: BlockTrainer
        """There is one once `begin` was called."""
        self._losses = torch.zeros((), device=device)
        self._frozen: tuple[str, ...] = ()
        """Hashes of the frozen snapshots that the trainer has."""
        self._frozen_blocks: dict[int, Block] = {}

    def begin(
        self, progress: BlockProgress, total_steps: int, optimizer: dict[str, Tensor] | None = None
    ) -> None:
        """Make this block the one being trained; `total_steps` is the length of its schedule."""
        training = dataclasses.replace(self.setup.recipe.training, steps=total_steps)
        recipe = dataclasses.replace(self.setup.recipe, training=training)
        block = self.setup.initial(progress.block).to(self.device)
        load_into(block, progress.begin())
        objective = self.setup.objective
        self.trainer = BlockTrainer(recipe, objective, block, progress.block, self.shards, self.codebook)
        self.progress, self._frozen = progress, ()
        if optimizer is not None:
            self.trainer.optimizer.load_state_tensors(optimizer)

    def start_again(self, progress: BlockProgress) -> None:
        """Take the same block's weights from its progress again; the optimizer goes on."""
        load_into(self.trainer.block, progress.begin())
        self.progress = progress

    def start(self, update: PendingUpdate, frozen: Mapping[int, Base]) -> None:
        """Prepare for the steps of an update, beside the named snapshots of other blocks."""
        assert update.assignment is not None
        # A run that was extended has a longer schedule than when this block was begun.
        optimizer, total_steps = self.trainer.optimizer, update.assignment.total_steps
        optimizer.config = dataclasses.replace(optimizer.config, steps=total_steps)
        hashes = tuple(base.hash for base in frozen.values())
        if hashes != self._frozen:
            others = []
            for block, base in frozen.items():
                if block not in self._frozen_blocks:
                    # They stay in host memory: the device holds the weights of one block at a time.
                    self._frozen_blocks[block] = for_host_memory(self.setup.initial(block), self.device)
                load_into(self._frozen_blocks[block], base.weights)
                others.append(self._frozen_blocks[block])
            self.trainer.freeze(others)
            self._frozen = hashes
        # Features of frozen blocks are computed for many steps at once: not for more than will be taken.
        self.trainer.window_end = update.assignment.first_step + own_steps(update.assignment)
        self._losses = torch.zeros((), device=self.device)

    def step(self, update: PendingUpdate) -> Tensor:
        """One step of an update; its loss, on the device."""
        assert update.assignment is not None
        loss = self.trainer.step(*batch_of(update.assignment, update.step))
        # Added up on the device: reading each loss would make a GPU wait for Python.
        self._losses += loss
        update.step += 1
        return loss

    def pick_up_move(self, update: PendingUpdate | None) -> bool:
        """Add what a new snapshot brought to the local weights; whether there was anything.

        `update` is the one being trained, if any: the further it has gone on without the snapshot, the
        smaller the share of the move that is applied at once.
        """
        assert self.progress is not None
        # In rounds: finished updates that the snapshot lacks, and the done share of the one under way.
        ahead = float(len(self.progress.pending()))
        if update is not None and update.assignment is not None:
            ahead += update.step / update.assignment.steps
        shift = self.progress.take_move(move_share(ahead))
        if shift is not None:
            move(self.trainer.block, shift)
        return shift is not None

    def mean_loss(self, update: PendingUpdate) -> float:
        return float(self._losses) / max(1, update.step)

    def weights(self) -> Weights:
        return tensors_of(self.trainer.block)

    def optimizer_state(self) -> dict[str, Tensor]:
        """A copy on the host, so that it can be written while training goes on."""
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.trainer.optimizer.state_tensors().items()
        }
