from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.networks import NETWORKS, STANDS_FOR_PARAMETERS, Machine, Network

ROUNDS = 40
WORKERS = 200


def test_events_happen_in_order_of_time_and_then_of_creation() -> None:
    clock = VirtualClock()
    seen: list[tuple[float, str]] = []

    def note(name: str) -> None:
        seen.append((clock.now, name))

    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (-5.0, "first")):
        clock.at(time, partial(note, name))
    assert not clock.run(until=lambda: False)
    assert seen == [(0.0, "first"), (1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_the_clock_stops_when_its_condition_holds() -> None:
    clock = VirtualClock()
    clock.at(1.0, lambda: None)
    clock.at(9.0, lambda: None)
    assert clock.run(until=lambda: clock.now >= 1.0)
    assert clock.now == 1.0


def cycle_seconds(network: Network, seed: int, worker: int) -> list[float]:
    """Download, steps and upload of an uncompressed block, one round of the litepaper after the other."""
    machine, found = Machine(network, seed, worker), []
    for round_ in range(ROUNDS):
        begun = round_ * network.deadline_seconds
        snapshot = 4 * STANDS_FOR_PARAMETERS
        seconds = machine.down_seconds(snapshot) + machine.compute_seconds() + network.latency_seconds
        found.append(machine.done_at(begun, seconds + machine.up_seconds(snapshot)) - begun)
    return found


def test_draws_depend_on_seed_and_worker_alone() -> None:
    network = NETWORKS["bad-edge"]
    assert cycle_seconds(network, 3, 1) == cycle_seconds(network, 3, 1)
    assert cycle_seconds(network, 3, 1) != cycle_seconds(network, 4, 1)
    assert cycle_seconds(network, 3, 1) != cycle_seconds(network, 3, 2)


@pytest.mark.parametrize(
    ("name", "share"),
    [("lockstep", 1.0), ("mild", 0.97), ("wan-tight", 0.22), ("wan-mid", 0.61), ("wan-loose", 0.86)],
)
def test_deadlines_let_in_the_litepapers_shares(name: str, share: float) -> None:
    network = NETWORKS[name]
    cycles = [cycle for worker in range(WORKERS) for cycle in cycle_seconds(network, 0, worker)]
    met = sum(cycle <= network.deadline_seconds for cycle in cycles) / len(cycles)
    assert met == pytest.approx(share, abs=0.04)


def test_work_rests_while_a_machine_is_away() -> None:
    network = dataclasses.replace(NETWORKS["lockstep"], up_for_seconds=50.0, away_seconds=30.0)
    machine = Machine(network, 0, 0)
    done = machine.done_at(10.0, 500.0)
    assert done > 510.0
    assert machine.worked_seconds(10.0, done) == pytest.approx(500.0)
    away = next(time for time in range(10, 500) if machine.away_seconds(float(time)) > 0)
    assert machine.done_at(float(away), 0.0) >= away


def test_a_machine_that_stays_is_never_away() -> None:
    machine = Machine(NETWORKS["wan-mid"], 0, 0)
    assert machine.done_at(5.0, 7.0) == 12.0
    assert machine.away_seconds(1e6) == 0.0
