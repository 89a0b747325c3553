"""A judged coordinator with real text, and peers that really train, or only pretend to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.config import Recipe, TrustConfig
from blocktrain.wire.codec import encode
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import Assignment, Outcome, Verdict
from tests.adversaries.training import Training
from tests.coordinator.conftest import Running, served
from tests.coordinator.peer import Peer
from tests.validation.kit import RECIPE, Weights, corpus

torch.set_num_threads(1)


def judged_recipe(swarm: dict[str, Any] | None = None, **trust: Any) -> Recipe:
    changes = {"steps_per_round": 20, "rounds": 6, "replicas": 1, "codec": "sparse:64", **(swarm or {})}
    return dataclasses.replace(
        RECIPE,
        swarm=dataclasses.replace(RECIPE.swarm, **changes),
        trust=TrustConfig(**{"stamp_bits": 0, **trust}),
    )


def judged(folder: Path, recipe: Recipe) -> AbstractContextManager[Running]:
    return served(folder, recipe, corpus=corpus())


class Trainer:
    """Does what a worker does with an assignment, without error feedback."""

    def __init__(self, running: Running, recipe: Recipe, peer: Peer | None = None) -> None:
        self.running = running
        self.peer = peer or running.peer()
        self._training = Training(recipe, corpus())

    def train(
        self,
        assignment: Assignment,
        frozen: Mapping[int, Weights] | None = None,
    ) -> Weights:
        """Beside the frozen snapshots that the assignment names, or beside others."""
        base = self.peer.snapshot(assignment.block, assignment.base_hash)
        return self._training.delta(
            assignment.block,
            base,
            assignment.shard,
            assignment.first_step,
            assignment.steps,
            frozen=self.named(assignment) if frozen is None else frozen,
        )

    def named(self, assignment: Assignment) -> dict[int, Weights]:
        return {one.block: self.peer.snapshot(one.block, one.hash) for one in assignment.frozen}

    def send(self, assignment: Assignment, delta: Weights) -> Verdict:
        """Commit, reveal, and wait for the judge."""
        payload = encode(self.peer.codec, self.peer.schema(assignment.block), delta)
        first = self.peer.reveal(self.peer.commit(assignment, payload), payload)
        return first if first.outcome is not Outcome.PENDING else self.wait(payload)

    def wait(self, payload: bytes) -> Verdict:
        from blocktrain.wire.hashing import content_hash

        path = f"/v1/updates/{content_hash(payload)}/verdict"

        def now() -> Verdict:
            return Verdict.model_validate_json(self.peer.call("GET", path).content)

        self.running.wait_for(lambda: now().outcome is not Outcome.PENDING)
        return now()

    def round(self) -> Verdict:
        assignment = self.peer.lend()
        return self.send(assignment, self.train(assignment))


def flipped(delta: Weights) -> Weights:
    return {name: np.asarray(-value) for name, value in delta.items()}


def operator(running: Running, folder: Path) -> Peer:
    from blocktrain.wire.identity import load_or_create

    return running.peer(load_or_create(folder / "coordinator.key"), join=False)


def stranger(running: Running) -> Peer:
    return running.peer(Identity.generate(), join=False)
