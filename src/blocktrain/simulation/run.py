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

from blocktrain.config import Recipe, SwarmConfig
from blocktrain.data.batches import open_batches
from blocktrain.data.corpora import open_text
from blocktrain.ids import derive_seed
from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.coordinator import SimulatedCoordinator, SimulationError
from blocktrain.simulation.networks import STANDS_FOR_PARAMETERS, Machine, Network
from blocktrain.simulation.workers import CarryWorker, DropWorker, Site
from blocktrain.training.evaluation import Evaluation, Evaluator
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.training.snapshot import load_into
from blocktrain.worker.training import LocalTraining

Policy = Literal["drop", "carry"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    recipe: Recipe
    network: Network
    policy: Policy
    seed: int = 0
    """Seeds the network's weather and the training."""
    stands_for: int = STANDS_FOR_PARAMETERS
    evaluate_every: int = 1
    """Rounds between two scores; the last round is always scored."""
    device: torch.device = torch.device("cpu")
    judged: bool = False
    """With the recipe's judge, guard, probation and bans. Off by default, even where the recipe names a
    judge: the published tables are about networks and policies alone."""

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
        self.scenario, self.watch, device = scenario, watch, scenario.device
        self.recipe = recipe = scenario.seeded_recipe
        self.text = open_text(recipe)
        setup = Setup.of_swarm(recipe, self.text.manifest.vocabulary)
        codebook, shards = setup.codebook().to(device), open_batches(recipe, self.text, device)
        self.evaluator = Evaluator(setup.objective, codebook(), recipe.evaluation, seed=recipe.seed)
        self.assembled = [setup.initial(b).to(device).eval() for b in range(recipe.model.blocks)]

        self.clock = VirtualClock()
        machines = [Machine(scenario.network, scenario.seed, n) for n in range(scenario.num_workers)]
        self.coordinator = SimulatedCoordinator(
            dataclasses.replace(recipe, swarm=scenario.swarm),
            self.text,
            self.clock,
            machines,
            judged=scenario.judged,
        )
        # Text and codebook are shared by all workers; each has weights and an optimizer of its own.
        self.sites = [
            Site(
                index=index,
                machine=machine,
                clock=self.clock,
                coordinator=self.coordinator,
                training=LocalTraining(setup, shards, codebook, device),
                stands_for=scenario.stands_for,
            )
            for index, machine in enumerate(machines)
        ]
        # The litepaper's workers have fixed seats; ours go where the scheduler sends them.
        self.workers: list[CarryWorker | DropWorker] = [
            CarryWorker(site)
            if scenario.policy == "carry"
            else DropWorker(site, site.index % recipe.model.blocks)
            for site in self.sites
        ]
        self.scored: list[ScoredRound] = []

    # --- running

    def run(self) -> dict[str, Any]:
        self.coordinator.watchers.append(self._new_head)
        for worker in self.workers:
            worker.start()
        if not self.clock.run(until=lambda: self.coordinator.finished):
            versions = ", ".join(str(state.head.version) for state in self.coordinator.blocks)
            raise SimulationError(f"nothing is left to happen with blocks at versions {versions}")
        self._score_if_due()
        return self.report()

    def _new_head(self, block: int) -> None:
        self._score_if_due()

    def _score_if_due(self) -> None:
        round_ = min(state.head.version for state in self.coordinator.blocks)
        due = round_ % self.scenario.evaluate_every == 0 or self.coordinator.finished
        # Blocks do not wait for one another: a round's model exists when its slowest block has closed it.
        if due and round_ > (self.scored[-1].round if self.scored else 0):
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
        # Pooling weights are fitted on text of their own, so the score is of text that nothing has seen.
        special = self.recipe.data.own_share > 0
        pooling = self.evaluator.fit_pooling(self.assembled, pool, follow_text=special)
        return self.evaluator.score(self.assembled, pooling, valid, euler=False)

    # --- reporting

    def report(self) -> dict[str, Any]:
        scenario, states = self.scenario, self.coordinator.blocks
        merges = [merge for state in states for merge in state.merges]
        merged = [one for merge in merges for one in merge.inputs]
        # A merge into version v was due on base v - 1; an older base makes the update that much late.
        ages = Counter(merge.version - 1 - one.base_version for merge in merges for one in merge.inputs)
        # The run ends with the last merge; what is still being trained or sent then is in no table.
        wall = max(closed for state in states for closed in state.closed)
        refused = self.coordinator.refusals()
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
            "assigned": self.coordinator.num_assigned(),
            "ages": {str(age): ages[age] for age in sorted(ages)},
            "weight_merged": sum(one.weight for one in merged),
            "empty_rounds": sum(not merge.inputs for merge in merges),
            "judged": scenario.judged,
            "refused": sum(refused.values()),
            "refused_for": refused,
            "wall_seconds": wall,
            "computing_share": sum(site.seconds_computing for site in self.sites) / wall / len(self.sites),
            "bytes_up": sum(site.num_bytes["up"] for site in self.sites),
            "bytes_down": sum(site.num_bytes["down"] for site in self.sites),
            "stands_for_parameters": scenario.stands_for,
        }


def participation(num_updates: int, rounds: int, num_workers: int) -> float:
    """Share of the (worker, round) pairs of a run that gave an update."""
    return num_updates / (rounds * num_workers)
