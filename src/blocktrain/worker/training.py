"""The trainer's side of a worker: a block on its device, stepped through assignments.

Goes on from its own weights from one assignment of a block to the next; only another block starts from a
snapshot. Knows no network, disk or clock: the worker program and the simulation decide when a step is taken.

Where several ranks are one worker, each has a `LocalTraining`. Rank 0 has the progress, and tells the others
by name what all do (`worker/ranks.py`); tensors follow on their own way.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from blocktrain.client.snapshots import Base
from blocktrain.data.batches import Batches
from blocktrain.model.block import Block
from blocktrain.training.frozen import for_host_memory
from blocktrain.training.inner import BlockTrainer, Codebook
from blocktrain.training.ranks import ALONE, RankError, Ranks, SpreadBatches, whole
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import check_names
from blocktrain.training.update import Weights
from blocktrain.worker.block_progress import BlockProgress, PendingUpdate, move_share
from blocktrain.worker.logic import batch_of, own_steps


class LocalTraining:
    def __init__(
        self,
        setup: Setup,
        shards: Batches | None,
        codebook: Codebook,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        """`shards` are None on ranks other than 0, which get their batches from it."""
        self.setup, self.codebook, self.device, self.ranks = setup, codebook, device, ranks
        self.shards = (
            SpreadBatches(shards, setup.recipe, ranks) if shards is None or ranks.size > 1 else shards
        )
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
        self.place(progress.block, total_steps, progress.begin())
        self.progress, self._frozen = progress, ()
        if optimizer is not None:
            shapes = {name: tuple(one.shape) for name, one in optimizer.items()}
            types = {name: str(one.dtype).removeprefix("torch.") for name, one in optimizer.items()}
            self.load_optimizer(shapes, types, optimizer)

    def start_again(self, progress: BlockProgress) -> None:
        """Take the same block's weights from its progress again; the optimizer goes on."""
        self.ranks.load(self.trainer.block, progress.begin())
        self.progress = progress

    def start(self, update: PendingUpdate, frozen: Mapping[int, Base]) -> None:
        """Prepare for the steps of an update, beside the named snapshots of other blocks."""
        assert update.assignment is not None
        hashes = tuple(base.hash for base in frozen.values())
        if hashes != self._frozen:
            self.freeze(list(frozen), frozen)
            self._frozen = hashes
        # Features of frozen blocks are computed for many steps at once: not for more than will be taken.
        end = update.assignment.first_step + own_steps(update.assignment)
        self.schedule(update.assignment.total_steps, end)
        self._losses = torch.zeros((), device=self.device)

    def step(self, update: PendingUpdate) -> Tensor:
        """One step of an update; its loss, on the device."""
        assert update.assignment is not None
        loss = self.train(*batch_of(update.assignment, update.step))
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
            self.move(shift)
        return shift is not None

    def mean_loss(self, update: PendingUpdate) -> float:
        return float(self._losses) / max(1, update.step)

    # --- what all ranks do

    def place(self, block: int, total_steps: int, weights: Weights | None = None) -> None:
        """Bring a block with these weights to the device, with a fresh optimizer."""
        with self._all("place", block=block, total_steps=total_steps):
            training = dataclasses.replace(self.setup.recipe.training, steps=total_steps)
            recipe = dataclasses.replace(self.setup.recipe, training=training)
            module = self.setup.initial(block)
            if self.ranks.sharded:
                self.ranks.shard(module)
            else:
                module.to(self.device)
            if weights is not None:
                check_names(module, weights)
            self.ranks.load(module, weights)
            self.trainer = BlockTrainer(
                recipe, self.setup.objective, module, block, self.shards, self.codebook, ranks=self.ranks
            )

    def load_optimizer(
        self,
        shapes: dict[str, tuple[int, ...]],
        types: dict[str, str],
        state: dict[str, Tensor] | None = None,
    ) -> None:
        with self._all("load_optimizer", shapes=shapes, types=types):
            found = {}
            for name, shape in shapes.items():
                empty = torch.empty(tuple(shape), dtype=getattr(torch, types[name]))
                found[name] = self.ranks.spread(empty if state is None else state[name].contiguous())
            self.trainer.optimizer.load_state_tensors(found)

    def freeze(self, blocks: Sequence[int], bases: Mapping[int, Base] | None = None) -> None:
        with self._all("freeze", blocks=blocks):
            for block in blocks:
                if block not in self._frozen_blocks:
                    # They stay in host memory: the device holds the weights of one block at a time.
                    self._frozen_blocks[block] = for_host_memory(self.setup.initial(block), self.device)
                self.ranks.load(self._frozen_blocks[block], None if bases is None else bases[block].weights)
            self.trainer.freeze([self._frozen_blocks[block] for block in blocks])

    def schedule(self, total_steps: int, end: int) -> None:
        """A run that was extended has a longer schedule than when its block was begun."""
        with self._all("schedule", total_steps=total_steps, end=end):
            optimizer = self.trainer.optimizer
            optimizer.config = dataclasses.replace(optimizer.config, steps=total_steps)
            self.trainer.window_end = end

    def train(self, step: int, shard: int) -> Tensor:
        with self._all("train", step=step, shard=shard):
            return self.trainer.step(step, shard)

    def move(self, shift: Weights | None = None) -> None:
        with self._all("move"):
            self.ranks.move(self.trainer.block, shift)

    def weights(self) -> Weights:
        with self._all("weights" if self.ranks.sharded else None):
            return self.ranks.gather(self.trainer.block)

    def optimizer_state(self) -> dict[str, Tensor]:
        """A copy on rank 0's host, so that it can be written while training goes on."""
        with self._all("optimizer_state" if self.ranks.sharded else None):
            found = {}
            for name, tensor in self.trainer.optimizer.state_tensors().items():
                values = whole(tensor.detach())
                if self.ranks.rank == 0:
                    found[name] = values.to("cpu", copy=True)
            return found

    @contextlib.contextmanager
    def _all(self, act: str | None, **values: object) -> Iterator[None]:
        """Around an act of all ranks; None: this one has all that it takes, also when the others are gone."""
        try:
            with self.ranks.together():
                if act is not None:
                    self.ranks.tell(act, **values)
                yield
        except RankError:
            if self.ranks.sharded:
                # The other ranks' parts are gone with them: there is no block to leave, nor to send.
                self.progress = None
            raise
