"""What the worker does next: pure answers, and the one logic that both drivers tell what happened."""

from __future__ import annotations

import numpy as np
import pytest

from blocktrain.client.coordinator import LONGEST_BACKOFF_SECONDS, backoff_seconds
from blocktrain.client.snapshots import Base, snapshot_route
from blocktrain.config import SwarmConfig
from blocktrain.wire.messages import StandIn
from blocktrain.worker.asking import slept_seconds
from blocktrain.worker.block_progress import BlockProgress, PendingState, PendingUpdate
from blocktrain.worker.logic import WorkerLogic, asks_for_next, batch_of, may_step, own_steps
from blocktrain.worker.state import saving_is_due
from blocktrain.worker.watching import watch_seconds
from tests.coordinator.peer import an_assignment
from tests.worker.test_block_progress import LAYOUT


def test_backoff_doubles_is_jittered_and_bounded() -> None:
    assert backoff_seconds(0, 0.0) < backoff_seconds(0, 0.99) < backoff_seconds(2, 0.5)
    assert backoff_seconds(1000, 0.999) <= LONGEST_BACKOFF_SECONDS


def test_a_wall_clock_that_ran_on_alone_means_sleep() -> None:
    assert slept_seconds(wall=3600.0, monotonic=0.1) == pytest.approx(3599.9)
    assert slept_seconds(wall=0.1, monotonic=0.1) is None
    assert slept_seconds(wall=-3600.0, monotonic=0.1) is None


def test_the_next_assignment_is_asked_for_shortly_before_the_end() -> None:
    assert not asks_for_next(steps_done=0, steps=30, elapsed_seconds=0.0)
    assert not asks_for_next(steps_done=3, steps=30, elapsed_seconds=6.0)
    assert asks_for_next(steps_done=28, steps=30, elapsed_seconds=56.0)
    assert asks_for_next(steps_done=3, steps=30, elapsed_seconds=0.3)
    assert asks_for_next(steps_done=30, steps=30, elapsed_seconds=60.0)


def test_steps_for_another_are_on_its_text_at_the_same_place_of_the_schedule() -> None:
    alone = an_assignment(shard=1, first_step=30, steps=14, stand_in=StandIn(shard=4, steps=4))
    assert own_steps(alone) == 10
    assert [batch_of(alone, step) for step in (0, 9, 10, 13)] == [(30, 1), (39, 1), (30, 4), (33, 4)]
    assert [batch_of(an_assignment(shard=1, first_step=30), step) for step in (0, 9)] == [(30, 1), (39, 1)]


def test_a_worker_runs_ahead_of_its_block_only_so_far() -> None:
    assert may_step(step=29, steps=30, version=4, round_=4, run_ahead=0.0)
    assert not may_step(step=0, steps=30, version=3, round_=4, run_ahead=0.0)
    assert may_step(step=7, steps=30, version=3, round_=4, run_ahead=0.25)
    assert not may_step(step=8, steps=30, version=3, round_=4, run_ahead=0.25)
    assert may_step(step=29, steps=30, version=3, round_=4, run_ahead=1.0)


def test_saving_takes_a_small_share_of_the_time() -> None:
    assert saving_is_due(now=0.0, saved_at=None, cost_seconds=0.0)
    assert not saving_is_due(now=60.0, saved_at=0.0, cost_seconds=0.0, least_seconds=120.0)
    assert saving_is_due(now=120.0, saved_at=0.0, cost_seconds=1.0, least_seconds=120.0)
    assert not saving_is_due(now=120.0, saved_at=0.0, cost_seconds=10.0, least_seconds=120.0)


def test_payloads_are_fetched_while_they_are_smaller_than_the_snapshot() -> None:
    assert snapshot_route(wanted=6, held=5, chain_bytes=10, snapshot_bytes=100)[0]
    assert not snapshot_route(wanted=6, held=5, chain_bytes=200, snapshot_bytes=100)[0]
    assert not snapshot_route(wanted=60, held=5, chain_bytes=0, snapshot_bytes=160)[0]


def test_the_head_is_watched_closely_while_an_update_is_about_to_be_merged() -> None:
    assert watch_seconds(waiting=True, quiet_seconds=0.0) < 0.1
    assert watch_seconds(waiting=True, quiet_seconds=4.0) == 1.0
    assert watch_seconds(waiting=False, quiet_seconds=0.0) >= 1.0


def at_work(*rounds: int, version: int = 0) -> tuple[WorkerLogic, list[PendingUpdate]]:
    """A worker on block 0 that has trained these rounds, and sent nothing."""
    logic = WorkerLogic(SwarmConfig())
    weights = {"w": np.zeros(4, np.float32)}
    logic.add_block(BlockProgress(LAYOUT, Base(version, "0" * 64, weights), None, logic.swarm, logic.changed))
    updates = [train(logic, round_) for round_ in rounds]
    return logic, updates


def begin(logic: WorkerLogic, round_: int) -> PendingUpdate:
    update = logic.lent(an_assignment(assignment_id=f"{round_:032x}", round=round_, steps=10))
    assert update is not None
    logic.prepared(update)
    assert logic.begin_next(0.0) is update
    return update


def train(logic: WorkerLogic, round_: int) -> PendingUpdate:
    update = begin(logic, round_)
    update.step = 10
    logic.blocks[0].finish(update, {"w": np.full(4, round_ + 1.0, np.float32)}, 1.0)
    logic.trained(update)
    return update


def test_updates_are_sent_one_at_a_time_and_in_order() -> None:
    logic, (first, second) = at_work(0, 1, version=1)
    assert logic.next_to_send() is first
    assert not logic.can_send()
    logic.delivered(first)
    assert logic.next_to_send() is second
    logic.delivered(second)
    assert logic.is_idle()


def test_an_update_waits_for_the_snapshot_that_its_round_starts_from() -> None:
    logic, (update,) = at_work(1)
    assert not logic.can_send()
    logic.blocks[0].advance(Base(1, "1" * 64, {"w": np.ones(4, np.float32)}), ())
    assert logic.next_to_send() is update


def test_a_worker_whose_updates_pile_up_asks_for_nothing() -> None:
    logic, _ = at_work(0)
    assert logic.should_ask(0.0)
    train(logic, 1)
    assert not logic.should_ask(0.0)
    update = logic.next_to_send()
    assert update is not None
    logic.blocks[0].form(update)
    assert logic.should_ask(0.0)


def test_a_cancelled_update_is_no_lease_and_another_is_asked_for() -> None:
    logic, _ = at_work()
    update = begin(logic, 0)
    assert logic.leases() == [update]
    assert not logic.should_ask(0.0)
    assert logic.cancel(update)
    assert logic.leases() == []
    assert logic.should_ask(0.0)
    assert logic.request().after == update.assignment_id, "asking still names it as in hand"


def test_an_update_whose_steps_are_done_cannot_be_cancelled() -> None:
    logic, (update,) = at_work(0)
    assert not logic.cancel(update)
    assert update.state is PendingState.TRAINED


def test_an_assignment_cancelled_while_its_snapshots_come_is_never_begun() -> None:
    logic, _ = at_work()
    update = logic.lent(an_assignment())
    assert update is not None
    assert logic.leases() == [update], "a long download must not cost the lease"
    logic.cancel(update)
    logic.prepared(update)
    assert logic.begin_next(0.0) is None


def test_heartbeats_are_due_a_part_of_the_lease_apart_and_at_once_after_a_refusal() -> None:
    logic, _ = at_work()
    update = begin(logic, 0)
    assert update.assignment is not None
    pause = update.assignment.heartbeat_seconds
    assert logic.heartbeats_due(100.0) == [update]
    assert logic.heartbeats_due(100.0 + pause / 2) == []
    assert logic.heartbeats_due(100.0 + pause) == [update]
    logic.hurry_heartbeats()
    assert logic.heartbeats_due(100.0 + pause) == [update]


def test_a_block_that_was_left_stays_while_an_update_of_it_is_on_its_way() -> None:
    logic, (update,) = at_work(0)
    logic.current = PendingUpdate.of(an_assignment(block=1))
    assert not logic.retire(0)
    logic.blocks[0].drop(update)
    assert logic.retire(0)
    assert logic.base_of(0) is None


def test_an_assignment_that_is_lent_twice_is_begun_once() -> None:
    logic, _ = at_work()
    update = begin(logic, 0)
    assert update.assignment is not None
    assert logic.lent(update.assignment) is None


def test_updates_that_were_never_formed_return_at_the_end() -> None:
    logic, (update,) = at_work(0)
    assert logic.drop_unsent() == [update]
    assert logic.blocks[0].feedback is not None
    assert logic.is_idle()


def test_a_stopping_worker_waits_for_nothing() -> None:
    logic, _ = at_work()
    logic.stop.set()
    assert not logic.wait(lambda: False)
    assert not logic.wait(lambda: False, 60.0)
