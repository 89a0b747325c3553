"""Every question the running worker asks, put to the pure function that answers it."""

from __future__ import annotations

import pytest

from blocktrain.client.coordinator import LONGEST_BACKOFF_SECONDS, backoff_seconds
from blocktrain.client.snapshots import snapshot_route
from blocktrain.wire.messages import Outcome, StandIn, VerdictReason
from blocktrain.worker.decisions import (
    Sent,
    asks_for_next,
    batch_of,
    is_forgotten,
    may_step,
    move_share,
    own_steps,
    saving_is_due,
    settle,
    share_to_return,
    slept_seconds,
    watch_seconds,
)
from tests.coordinator.peer import an_assignment


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


def test_what_does_not_count_returns() -> None:
    assert share_to_return(Outcome.ACCEPTED, 1.0) == 0.0
    assert share_to_return(Outcome.LATE, 0.25) == 0.75
    assert share_to_return(Outcome.REFUSED, 0.0) == 1.0


@pytest.mark.parametrize(
    "reason", [VerdictReason.NO_GAIN, VerdictReason.HARMFUL, VerdictReason.GUARD, VerdictReason.PROBATION]
)
def test_an_update_that_was_found_wanting_is_forgotten(reason: VerdictReason) -> None:
    assert is_forgotten(Outcome.REFUSED, reason)


@pytest.mark.parametrize("reason", [VerdictReason.DROPPED, VerdictReason.TOO_OLD])
def test_an_update_that_came_too_late_is_not_forgotten(reason: VerdictReason) -> None:
    assert not is_forgotten(Outcome.REFUSED, reason)
    assert not is_forgotten(Outcome.LATE, VerdictReason.CARRIED)


def test_merged_and_refused_updates_are_settled_in_order() -> None:
    sent = [Sent("a", 3, judged=True), Sent("b", 4, judged=True, gone=True), Sent("c", 5)]
    assert settle(sent, {"a"}, 4, max_age=3).settled == 2
    assert settle(sent, set(), 4, max_age=3).settled == 0
    assert settle(sent, {"a", "c"}, 6, max_age=3).settled == 3


def test_an_update_that_was_never_merged_is_given_up() -> None:
    sent = [Sent("a", 3, judged=True)]
    assert settle(sent, set(), 7, max_age=3).settled == 0
    given_up = settle(sent, set(), 8, max_age=3)
    assert (given_up.settled, given_up.given_up) == (1, (0,))


def test_an_update_without_a_verdict_is_not_given_up() -> None:
    assert settle([Sent("a", 3)], set(), 100, max_age=3).settled == 0


def test_payloads_are_fetched_while_they_are_smaller_than_the_snapshot() -> None:
    assert snapshot_route(wanted=6, held=5, chain_bytes=10, snapshot_bytes=100)[0]
    assert not snapshot_route(wanted=6, held=5, chain_bytes=200, snapshot_bytes=100)[0]
    assert not snapshot_route(wanted=60, held=5, chain_bytes=0, snapshot_bytes=160)[0]


def test_the_head_is_watched_closely_while_an_update_is_about_to_be_merged() -> None:
    assert watch_seconds(waiting=True, quiet_seconds=0.0) < 0.1
    assert watch_seconds(waiting=True, quiet_seconds=4.0) == 1.0
    assert watch_seconds(waiting=False, quiet_seconds=0.0) >= 1.0


def test_a_move_in_time_is_applied_in_full_and_a_late_one_in_part() -> None:
    assert move_share(0.0) == 1.0
    assert 1.0 > move_share(0.25) > move_share(1.0) > move_share(2.0) > 0.0
