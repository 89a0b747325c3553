"""The trainer's side of a worker: a block on its device, stepped through assignments.

Goes on from its own weights from one assignment of a block to the next; only another block starts from
a snapshot. Runs in the main thread and touches no network or disk.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from blocktrain.client.snapshots import Base
from blocktrain.data.shards import Shards
from blocktrain.model.block import Block
from blocktrain.training.inner import BlockTrainer, Codebook
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import load_into, tensors_of
from blocktrain.training.update import Weights, move
from blocktrain.wire.messages import Assignment
from blocktrain.worker.decisions import batch_of, may_step, move_share, own_steps
from blocktrain.worker.standing import Standing

WAIT_SECONDS = 0.1
LOSS_SECONDS = 0.5
"""How often the loss is read; reading it waits for a GPU."""


class LocalTraining:
    def __init__(self, setup: Setup, shards: Shards, codebook: Codebook, device: torch.device) -> None:
        self.setup, self.recipe, self.objective, self.shards = setup, setup.recipe, setup.objective, shards
        self.codebook, self.device = codebook, device
        self.standing: Standing | None = None
        self.waiting_seconds = 0.0
        """Time in `run` that was not training: waiting for a snapshot, adding what it brought."""
        self._trainer: BlockTrainer | None = None
        self._frozen: tuple[str, ...] = ()
        """Hashes of the frozen snapshots that the trainer has."""
        self._others: dict[int, Block] = {}

    def begin(self, standing: Standing, total_steps: int, optimizer: dict[str, Tensor] | None) -> None:
        """Make `standing`'s block the one being trained."""
        training = dataclasses.replace(self.recipe.training, steps=total_steps)
        recipe = dataclasses.replace(self.recipe, training=training)
        block = self.setup.initial(standing.block)
        block.to(self.device)
        load_into(block, standing.begin())
        self._trainer = BlockTrainer(
            recipe, self.objective, block, standing.block, self.shards, self.codebook
        )
        self.standing, self._frozen = standing, ()
        if optimizer is not None:
            self._trainer.optimizer.load_state_tensors(optimizer)

    def freeze(self, frozen: Mapping[int, Base]) -> None:
        """Train beside these snapshots of other blocks, which stay in host memory, from now on."""
        assert self._trainer is not None
        hashes = tuple(base.hash for base in frozen.values())
        if hashes != self._frozen:
            self._trainer.freeze([self._loaded(block, base) for block, base in frozen.items()])
            self._frozen = hashes

    def _loaded(self, block: int, base: Base) -> Block:
        if block not in self._others:
            self._others[block] = self.setup.initial(block).eval()
        load_into(self._others[block], base.weights)
        return self._others[block]

    def run(
        self,
        assignment: Assignment,
        stepped: Callable[[int, float | None], None],
        going_on: Callable[[], bool],
    ) -> float | None:
        """All steps of an assignment; the mean loss, or None if it is not to go on."""
        assert self._trainer is not None
        self._trainer.window_end = assignment.first_step + own_steps(assignment)
        total = torch.zeros((), device=self.device)
        last, read_at = 0.0, time.monotonic()
        for step in range(assignment.steps):
            if not self._await_snapshot(assignment, step, going_on):
                return None
            self._pick_up_move(step / assignment.steps)
            ce = self._trainer.step(*batch_of(assignment, step))
            total += ce
            due = time.monotonic() - read_at >= LOSS_SECONDS
            if due:
                last, read_at = float(ce), time.monotonic()
            stepped(step + 1, last if due else None)
            if not going_on():
                return None
        return float(total) / max(1, assignment.steps)

    def _await_snapshot(self, assignment: Assignment, step: int, going_on: Callable[[], bool]) -> bool:
        """Wait where this worker is too far ahead of the block; False if it is not to go on."""
        assert self.standing is not None
        start = time.monotonic()
        while not may_step(
            step=step,
            steps=own_steps(assignment),
            version=self.standing.base.version,
            round_=assignment.round,
            run_ahead=self.recipe.swarm.run_ahead,
        ):
            self.standing.wait_for_version(assignment.round, WAIT_SECONDS)
            if not going_on():
                return False
        self.waiting_seconds += time.monotonic() - start
        return True

    def _pick_up_move(self, share_of_round: float) -> None:
        assert self.standing is not None
        assert self._trainer is not None
        start = time.monotonic()
        ahead = len(self.standing.flights()) + share_of_round
        shift = self.standing.take_move(move_share(ahead))
        if shift is not None:
            move(self._trainer.block, shift)
            self.waiting_seconds += time.monotonic() - start

    def weights(self) -> Weights:
        assert self._trainer is not None
        return tensors_of(self._trainer.block)

    def optimizer_state(self) -> dict[str, Tensor]:
        """A copy on the host, so that it can be written while training goes on."""
        assert self._trainer is not None
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._trainer.optimizer.state_tensors().items()
        }
