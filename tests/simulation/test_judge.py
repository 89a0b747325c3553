"""A simulated run may have the coordinator's own judge and guard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from sqlalchemy import select

from blocktrain.coordinator.storage.store import UpdateRow
from blocktrain.simulation.coordinator import SimulationError
from blocktrain.simulation.run import Scenario, Simulation
from blocktrain.simulation.workers import Site
from blocktrain.training.update import decoded_delta
from blocktrain.wire.codec import encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Verdict
from blocktrain.worker.block_progress import PendingUpdate
from tests.simulation.simulation_kit import MakeScenario


def judged(make_scenario: MakeScenario, policy: str = "carry", rounds: int = 3, steps: int = 16) -> Scenario:
    scenario = make_scenario(
        "mild",
        policy,
        model={"blocks": 1},
        training={"batch": 4},
        swarm={"rounds": rounds, "steps_per_round": steps, "codec": "bits:4", "max_deadline_seconds": 600.0},
        trust={"compute_share": 0.5},
    )
    return dataclasses.replace(scenario, judged=True)


def send_noise(site: Site) -> None:
    """From now on the worker sends noise, eight times as large as its own updates."""
    send, generator = site.upload, np.random.default_rng(0)

    def upload(update: PendingUpdate, done: Callable[[Verdict | None], None]) -> None:
        layout = site.layout(update.block)
        delta = decoded_delta(layout.codec, layout.schema, update.payload, {})
        noise = {
            name: np.float32(8 * value.std()) * generator.standard_normal(value.shape, np.float32)
            for name, value in delta.items()
        }
        update.payload = encode(layout.codec, layout.schema, noise)
        update.payload_hash = content_hash(update.payload)
        send(update, done)

    site.upload = upload  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", ["drop", "carry"])
def test_a_simulated_judge_scores_every_update_and_a_harmful_one_never_counts(
    make_scenario: MakeScenario, policy: str
) -> None:
    simulation = Simulation(judged(make_scenario, policy))
    send_noise(simulation.sites[1])
    report = simulation.run()
    assert report["ce"][-1]["round"] == report["rounds"]
    assert report["refused_for"]["harmful"] >= 1
    coordinator = simulation.coordinator
    [block] = coordinator.blocks
    senders = {one.worker_id for merge in block.merges for one in merge.inputs}
    assert senders == {coordinator.worker_ids[0]}
    with coordinator.resources.store.read() as session:
        merged = session.scalars(select(UpdateRow.evidence).where(UpdateRow.state == "merged")).all()
    assert merged
    assert all(evidence is not None for evidence in merged)


def test_a_simulated_merge_passes_the_guard(make_scenario: MakeScenario) -> None:
    simulation = Simulation(judged(make_scenario, rounds=2))
    judging, guarded = simulation.coordinator.service.judging, []
    guard = judging.guard

    def noted(block: int, version: int, *rest: object) -> list[list[float]]:
        guarded.append(version)
        return guard(block, version, *rest)  # type: ignore[arg-type]

    judging.guard = noted  # type: ignore[method-assign, assignment]
    simulation.run()
    assert {1, 2} <= set(guarded)


def test_a_judge_that_refuses_everything_ends_the_run_in_words(make_scenario: MakeScenario) -> None:
    simulation = Simulation(judged(make_scenario, steps=1))
    for site in simulation.sites:
        send_noise(site)
    with pytest.raises(SimulationError, match="block 0 does not get past version 0.*harmful"):
        simulation.run()
