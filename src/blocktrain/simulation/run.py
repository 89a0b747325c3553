"""A whole simulated run: builds the parts, lets virtual time pass, scores the model, reports.

The training is real, so the cross entropy is real; only durations are drawn. The same recipe, network,
policy and seed give the same report, bit for bit, on one machine.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base
from blocktrain.config import Recipe, SwarmConfig
from blocktrain.data.batches import open_batches
from blocktrain.data.corpora import open_text
from blocktrain.errors import BlocktrainError
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.coordinator import BlockState, SimulatedCoordinator
from blocktrain.simulation.networks import STANDS_FOR_PARAMETERS, Machine, Network
from blocktrain.simulation.workers import CarryWorker, DropWorker, Site
from blocktrain.training.evaluation import Evaluation, Evaluator
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.training.snapshot import load_into, schema_of, snapshot_hash, tensors_of
from blocktrain.wire.codec import CodecSpec, frame_length
from blocktrain.worker.training import LocalTraining

Policy = Literal["drop", "carry"]


class SimulationError(BlocktrainError):
    """A simulated run that cannot go on."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    recipe: Recipe
    network: Network
    policy: Policy
    seed: int = 0
    """Of the network's weather and of the training."""
    stands_for: int = STANDS_FOR_PARAMETERS
    evaluate_every: int = 1
    """Rounds between two scores; the last round is always scored."""
    device: torch.device = torch.device("cpu")

    @property
    def swarm(self) -> SwarmConfig:
        return dataclasses.replace(
            self.recipe.swarm, policy=self.policy, drop_deadline_seconds=self.network.deadline_seconds
        )

    @property
    def num_workers(self) -> int:
        return self.recipe.swarm.replicas * self.recipe.model.blocks

    @property
    def seeded_recipe(self) -> Recipe:
        """With the run's seed and the length of the swarm's schedule."""
        seed = derive_seed("simulation", self.recipe.seed, self.seed)
        return dataclasses.replace(with_swarm_schedule(self.recipe), seed=seed)


@dataclass(frozen=True)
class ScoredRound:
    """The assembled model when its slowest block had finished a round."""

    round: int
    seconds: float
    ce: float
    block_ce: tuple[float, ...]


Watcher = Callable[[ScoredRound], None]


class Simulation:
    def __init__(self, scenario: Scenario, watch: Watcher = lambda scored: None) -> None:
        self.scenario, self.watch = scenario, watch
        self.recipe = scenario.seeded_recipe
        self.text = open_text(self.recipe)
        self._build_training()
        self.clock = VirtualClock()
        self.coordinator = self._build_coordinator()
        self.sites = [self._site(index) for index in range(scenario.num_workers)]
        self.workers = [self._worker(site) for site in self.sites]
        self.scored: list[ScoredRound] = []

    # --- building

    def _build_training(self) -> None:
        recipe, device = self.recipe, self.scenario.device
        self.setup = Setup.of_swarm(recipe, self.text.manifest.vocabulary)
        self.objective = self.setup.objective
        self.codebook = self.setup.codebook().to(device)
        self.shards = open_batches(recipe, self.text, device)
        self.evaluator = Evaluator(self.objective, self.codebook(), recipe.evaluation, seed=recipe.seed)
        self.assembled = [self._build_block(b).eval() for b in range(recipe.model.blocks)]

    def _build_block(self, block: int) -> Block:
        return self.setup.initial(block).to(self.scenario.device)

    def _build_coordinator(self) -> SimulatedCoordinator:
        swarm, network, seed = self.scenario.swarm, self.scenario.network, self.scenario.seed
        states, layouts, codec = [], [], CodecSpec.parse(swarm.codec)
        for index, block in enumerate(self.assembled):
            weights, schema = tensors_of(block), schema_of(block)
            first = Base(0, snapshot_hash(weights), weights)
            states.append(BlockState(first))
            layouts.append(Layout(index, codec, schema, frame_length(codec, schema), first.hash))
        machines = [Machine(network, seed, index) for index in range(self.scenario.num_workers)]
        return SimulatedCoordinator(swarm, layouts, self.clock, states, machines, self.objective)

    def _site(self, index: int) -> Site:
        return Site(
            index=index,
            machine=self.coordinator.machines[index],
            clock=self.clock,
            coordinator=self.coordinator,
            training=LocalTraining(self.setup, self.shards, self.codebook, self.scenario.device),
            stands_for=self.scenario.stands_for,
        )

    def _worker(self, site: Site) -> CarryWorker | DropWorker:
        if self.scenario.policy == "carry":
            return CarryWorker(site)
        return DropWorker(site, site.index % self.recipe.model.blocks)

    # --- running

    def run(self) -> dict[str, Any]:
        self.coordinator.watchers.append(self._new_head)
        for worker in self.workers:
            worker.start()
        if not self.clock.run(until=lambda: self.coordinator.finished):
            versions = ", ".join(str(state.version) for state in self.coordinator.blocks)
            raise SimulationError(f"nothing is left to happen with blocks at versions {versions}")
        self._score_if_due()
        return self.report()

    def _new_head(self, block: int) -> None:
        self._score_if_due()

    def _score_if_due(self) -> None:
        round_ = min(state.version for state in self.coordinator.blocks)
        due = round_ % self.scenario.evaluate_every == 0 or self.coordinator.finished
        if due and round_ > (self.scored[-1].round if self.scored else 0):
            self._score(round_)

    def _score(self, round_: int) -> None:
        found = self.score()
        blocks = tuple(score.ce for score in found.blocks)
        self.scored.append(ScoredRound(round_, self.clock.now, found.consensus.ce, blocks))
        self.watch(self.scored[-1])

    def score(self) -> Evaluation:
        """The heads, composed, on the held-out text."""
        for block, state in zip(self.assembled, self.coordinator.blocks, strict=True):
            load_into(block, state.head.weights)
        config = self.recipe.evaluation
        pool = self.text.first_tokens("pooling", config.pooling_bytes)
        valid = self.text.first_tokens("held_out", config.max_bytes)
        weights = self.evaluator.fit_weights(self.assembled, pool)
        return self.evaluator.score(self.assembled, weights, valid, euler=False)

    # --- reporting

    def report(self) -> dict[str, Any]:
        scenario, states = self.scenario, self.coordinator.blocks
        merged = [one for state in states for merge in state.merges for one in merge.inputs]
        assigned = sum(len(shards) for state in states for shards in state.shards.values())
        wall = max(merge.closed for state in states for merge in state.merges)
        ages = Counter(one.age for one in merged)
        return {
            "name": scenario.recipe.name,
            "network": scenario.network.name,
            "policy": scenario.policy,
            "codec": scenario.swarm.codec,
            "seed": scenario.seed,
            "workers": scenario.num_workers,
            "rounds": scenario.swarm.rounds,
            "steps_per_round": scenario.swarm.steps_per_round,
            "final_ce": self.scored[-1].ce,
            "bytes_per_token": self.text.manifest.bytes_per_token("held_out"),
            "ce": [dataclasses.asdict(one) for one in self.scored],
            "participation": participation(ages[0], scenario.swarm.rounds, scenario.num_workers),
            "merged_share": participation(len(merged), scenario.swarm.rounds, scenario.num_workers),
            "assigned": assigned,
            "ages": {str(age): ages[age] for age in sorted(ages)},
            "weight_merged": sum(one.weight for one in merged),
            "empty_rounds": sum(not merge.inputs for state in states for merge in state.merges),
            "refused": sum(
                verdict.outcome.value == "refused" for state in states for _, verdict in state.verdicts
            ),
            "wall_seconds": wall,
            "computing_share": sum(site.seconds_computing for site in self.sites) / wall / len(self.sites),
            "bytes_up": sum(site.num_bytes["up"] for site in self.sites),
            "bytes_down": sum(site.num_bytes["down"] for site in self.sites),
            "stands_for_parameters": scenario.stands_for,
        }


def participation(num_updates: int, rounds: int, num_workers: int) -> float:
    """Share of the (worker, round) pairs of a run that gave an update."""
    return num_updates / (rounds * num_workers)
