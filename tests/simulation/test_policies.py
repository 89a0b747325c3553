from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from blocktrain.errors import RecipeError
from blocktrain.simulation.networks import NETWORKS
from blocktrain.simulation.run import Simulation, participation
from blocktrain.simulation.workers import CarryWorker, Site, TimedSteps
from blocktrain.training.setup import Setup
from blocktrain.training.update import Weights, decoded_delta, difference, fold_back
from blocktrain.wire.messages import Assignment, Outcome
from blocktrain.worker.block_progress import PendingUpdate
from tests.simulation.simulation_kit import LATE, MakeRecipe, MakeScenario


def same(left: Weights, right: Weights) -> bool:
    return all(np.allclose(left[name], right[name], atol=1e-5) for name in left)


@pytest.mark.parametrize("policy", ["drop", "carry"])
def test_the_same_seed_gives_the_same_report(policy: str, make_scenario: MakeScenario) -> None:
    sections = {"model": {"blocks": 1}, "swarm": {"rounds": 2}}
    first, second, other = (
        Simulation(make_scenario("bad-edge", policy, seed, **sections)).run() for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", ["drop", "carry"])
def test_every_network_runs_to_the_last_round(network: str, policy: str, make_scenario: MakeScenario) -> None:
    report = Simulation(make_scenario(network, policy, model={"blocks": 1}, swarm={"rounds": 2})).run()
    assert report["ce"][-1]["round"] == report["rounds"]
    assert 0 <= report["participation"] <= report["merged_share"]
    assert report["wall_seconds"] > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_blocks_of_another_family_are_simulated(family: str, make_scenario: MakeScenario) -> None:
    report = Simulation(make_scenario("lockstep", "carry", model={"family": family, "blocks": 1})).run()
    assert report["participation"] == 1.0
    # 256 bytes, all alike, are 5.545 nats: it has learned something.
    assert report["final_ce"] < 5.5


def test_without_delays_both_policies_do_the_same(make_scenario: MakeScenario) -> None:
    reports = [
        Simulation(make_scenario("lockstep", policy, swarm={"rounds": 2})).run()
        for policy in ("drop", "carry")
    ]
    assert [report["participation"] for report in reports] == [1.0, 1.0]
    assert reports[0]["final_ce"] == pytest.approx(reports[1]["final_ce"], abs=1e-3)


def test_participation_counts_pairs_of_worker_and_round(make_scenario: MakeScenario) -> None:
    assert participation(12, rounds=4, num_workers=6) == 0.5
    simulation = Simulation(make_scenario(LATE, "drop"))
    report = simulation.run()
    merges = [merge for state in simulation.coordinator.blocks for merge in state.merges]
    merged = sum(len(merge.inputs) for merge in merges)
    assert report["participation"] == merged / (4 * 4)
    assert report["assigned"] == 4 * 4
    assert len(merges) == 4 * 2


def test_drop_loses_what_is_late(make_scenario: MakeScenario) -> None:
    """The head holds the sum of what was on time, and nothing of what was not."""
    scenario = make_scenario(LATE, "drop", model={"blocks": 1}, swarm={"rounds": 8})
    simulation = Simulation(scenario)
    initial = simulation.coordinator.blocks[0].head.weights
    revealed = watch_reveals(simulation)
    simulation.run()
    (state,) = simulation.coordinator.blocks
    late = [update for _, update, outcome, _ in revealed if outcome is Outcome.REFUSED]
    assert late
    assert all(
        one.base_version == merge.version - 1 and one.weight == 1.0
        for merge in state.merges
        for one in merge.inputs
    )
    merged = {one.payload_hash for merge in state.merges for one in merge.inputs}
    assert not merged & {update.payload_hash for update in late}
    empty = [merge.version for merge in state.merges if not merge.inputs]
    if len(empty) < len(state.merges):
        assert not same(initial, state.head.weights)


Revealed = tuple[int, PendingUpdate, Outcome, float]


def watch_reveals(simulation: Simulation) -> list[Revealed]:
    """Every update that arrives, with its worker, outcome and weight."""
    seen: list[Revealed] = []
    coordinator = simulation.coordinator
    judge = coordinator.reveal

    def reveal(worker: int, update: PendingUpdate):  # type: ignore[no-untyped-def]
        verdict = judge(worker, update)
        assert verdict is not None
        seen.append((worker, update, verdict.outcome, verdict.weight))
        return verdict

    coordinator.reveal = reveal  # type: ignore[method-assign]
    return seen


class RecordedWorker(CarryWorker):
    """Keeps the sum of all steps, as it stood when each update's last step was done."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.trained: Weights | None = None
        self.trained_at: dict[str, Weights | None] = {}
        self.formed = ""
        step = site.training.step

        def recorded(update: PendingUpdate) -> Tensor:
            before = site.training.weights()
            loss = step(update)
            self.trained = fold_back(self.trained, difference(before, site.training.weights()))
            return loss

        site.training.step = recorded  # type: ignore[method-assign]

    def _finish(self, steps: TimedSteps) -> None:
        super()._finish(steps)
        self.trained_at[steps.update.assignment_id] = self.trained

    def _send_next(self) -> None:
        super()._send_next()
        if self.logic.sending is not None:
            self.formed = self.logic.sending.assignment_id


def test_carry_loses_nothing(make_scenario: MakeScenario) -> None:
    """All steps of a worker = what counted of its updates + what its error feedback still holds."""
    scenario = make_scenario(
        LATE,
        "carry",
        model={"blocks": 1},
        swarm={"rounds": 10, "error_feedback": 1.0, "age_decay": 0.25, "deadline_quantile": 0.3},
    )
    simulation = Simulation(scenario)
    simulation.coordinator.watchers.clear()
    workers = [RecordedWorker(site) for site in simulation.sites]
    simulation.workers = list(workers)
    revealed = watch_reveals(simulation)
    simulation.run()
    sending = [worker.logic for worker in workers]
    simulation.clock.run(until=lambda: not any(logic.sending for logic in sending))
    assert any(outcome is Outcome.LATE for _, _, outcome, _ in revealed)
    layout = simulation.coordinator.blocks[0].layout
    for worker in workers:
        held = worker.logic.blocks[0].feedback
        for sender, update, _, weight in revealed:
            if sender == worker.site.index:
                assert update.base is not None
                delta = decoded_delta(layout.codec, layout.schema, update.payload, update.base.weights)
                held = fold_back(held, delta, weight)
        trained = worker.trained_at[worker.formed]
        assert held is not None
        assert trained is not None
        assert same(trained, held)


def test_compressed_updates_run_too(make_scenario: MakeScenario) -> None:
    dense, *others = (
        Simulation(
            make_scenario("wan-mid", "carry", model={"blocks": 1}, swarm={"rounds": 2, "codec": codec})
        ).run()
        for codec in ("dense", "sign", "sparse:16")
    )
    for report in others:
        assert report["bytes_up"] < dense["bytes_up"] / 3


@pytest.mark.parametrize("policy", ["carry", "drop"])
def test_blocks_that_hear_others_train_beside_the_heads_of_their_time(
    make_scenario: MakeScenario, policy: str
) -> None:
    swarm = {"rounds": 3}
    scenario = make_scenario(
        "mild", policy, objective={"kind": "chain", "hint_probability": 0.0}, swarm=swarm
    )
    simulation = Simulation(scenario)
    lent = []
    assignments = simulation.coordinator.service.assignments
    lend = assignments.lend

    def noted(*arguments: Any) -> Assignment:
        heads = {block: state.head.hash for block, state in enumerate(simulation.coordinator.blocks)}
        assignment = lend(*arguments)
        lent.append(assignment)
        named = {one.block: one.hash for one in assignment.frozen}
        assert named == ({0: heads[0]} if assignment.block else {})
        return assignment

    assignments.lend = noted  # type: ignore[method-assign, assignment]
    report = simulation.run()
    versions = {one.version for assignment in lent for one in assignment.frozen}
    assert max(versions) > 0
    assert report["rounds"] == scenario.swarm.rounds
    independent = Simulation(make_scenario("mild", policy, swarm=swarm)).run()
    assert report["bytes_down"] > independent["bytes_down"]


def test_a_recipe_that_no_swarm_can_train_is_refused(make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match="codebook"):
        Setup.of_swarm(make_recipe(objective={"codebook": "learned"}, training={"order": "turns"}))
