"""When a round closes, and what a late update is worth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.decisions.deadlines import (
    Deadline,
    lateness,
    own_share,
    quantile,
    round_deadline,
    round_seconds,
    should_close,
    stand_in_steps,
    wanted_updates,
)
from blocktrain.wire.messages import Outcome, VerdictReason

SWARM = SwarmConfig(min_deadline_seconds=2, max_deadline_seconds=600, replicas=2, max_age=2, age_decay=0.5)
DROP = SwarmConfig(policy="drop", drop_deadline_seconds=30)


def test_before_anything_has_arrived_the_deadline_is_the_longest() -> None:
    assert round_seconds([], [], SWARM)[0] == 600


def test_with_few_arrivals_it_is_twice_the_slowest() -> None:
    assert round_seconds([10, 20], [], SWARM)[0] == 40


def test_arrivals_of_the_round_itself_count_only_without_history() -> None:
    assert round_seconds([], [50.0], SWARM)[0] == 100
    assert round_seconds([10.0], [50.0], SWARM)[0] == 20


def test_with_history_it_is_the_quantile_times_the_slack() -> None:
    seconds, reason = round_seconds([10.0] * 17 + [100.0] * 3, [], SWARM)
    assert seconds == pytest.approx(12)
    assert "85% of the last 20 arrivals took at most 10.0 s, times 1.2" in reason


def test_it_is_bounded_and_says_so() -> None:
    assert round_seconds([0.1] * 9, [], SWARM)[0] == 2
    seconds, reason = round_seconds([9999.0] * 9, [], SWARM)
    assert seconds == 600
    assert "bounded to 600 s" in reason


def test_participation_stays_about_the_quantile_under_heavy_tails() -> None:
    """Compute times as in the litepaper's loosest regime: log-normal, a few very slow."""
    draw = random.Random(1)
    swarm = SwarmConfig(deadline_slack=1.0, max_deadline_seconds=1e6)
    history, let_in, rounds = [draw.lognormvariate(3, 1) for _ in range(32)], 0, 3000
    for _ in range(rounds):
        offset = draw.lognormvariate(3, 1)
        let_in += offset <= round_seconds(history, [], swarm)[0]
        history = [*history[1:], offset]
    assert let_in / rounds == pytest.approx(0.85, abs=0.03)


def test_the_policy_drop_has_a_fixed_deadline() -> None:
    assert round_seconds([1.0] * 20, [], DROP)[0] == 30


def test_a_round_that_has_not_begun_has_no_deadline() -> None:
    assert round_deadline(None, 5.0, 0, [], [], SWARM).at is None


def test_a_deadline_is_set_again_only_while_there_is_nothing_to_merge() -> None:
    assert round_deadline(100.0, 125.0, 0, [5.0], [], SWARM).at == 130
    assert round_deadline(100.0, 125.0, 1, [5.0], [], SWARM).at == 110


@given(now=st.floats(100, 1e6), begun=st.floats(0, 100), slowest=st.floats(0.01, 1e4))
def test_without_updates_the_deadline_is_never_behind(now: float, begun: float, slowest: float) -> None:
    deadline = round_deadline(begun, now, 0, [slowest], [], SWARM)
    assert deadline.at is not None
    assert deadline.at >= now - 1e-6 * now


def test_a_round_closes_at_the_quorum() -> None:
    assert should_close(1.0, 2, 0, 2, Deadline(99.0, "")).close
    assert not should_close(1.0, 1, 0, 2, Deadline(99.0, "")).close


def test_late_updates_do_not_make_a_quorum() -> None:
    assert not should_close(1.0, 1, 5, 2, Deadline(99.0, "")).close


def test_a_round_closes_at_the_deadline_with_at_least_one_update() -> None:
    assert should_close(99.0, 1, 0, 2, Deadline(99.0, "")).close
    assert should_close(99.0, 0, 1, 2, Deadline(99.0, "")).close
    assert not should_close(99.0, 0, 0, 2, Deadline(99.0, "")).close


def test_the_quorum_is_every_live_worker_and_at_least_the_replicas() -> None:
    assert wanted_updates(0, 0, SWARM) == 2
    assert wanted_updates(5, 0, SWARM) == 5


def test_who_delivered_and_moved_on_does_not_close_the_round_for_those_still_at_it() -> None:
    assert wanted_updates(2, 1, SWARM) == 3


def test_a_lone_worker_fills_the_time_its_round_leaves_it_up_to_one_replica() -> None:
    half = SwarmConfig(replicas=2, steps_per_round=10, stand_in=0.9)
    assert stand_in_steps(1, 100.0, 60.0, half) == 5
    assert stand_in_steps(1, 1000.0, 60.0, half) == 10
    assert stand_in_steps(3, 1000.0, 60.0, half) == 10
    assert stand_in_steps(1, 66.0, 60.0, half) == 0


def test_nobody_stands_in_where_none_is_missing_or_nothing_is_known() -> None:
    assert stand_in_steps(0, 1000.0, 60.0, SWARM) == 0
    assert stand_in_steps(1, None, 60.0, SWARM) == 0
    assert stand_in_steps(1, 1000.0, None, SWARM) == 0
    assert stand_in_steps(1, 1000.0, 60.0, DROP) == 0
    assert stand_in_steps(1, 1000.0, 60.0, SwarmConfig(stand_in=0.0)) == 0


def test_standing_in_does_not_make_later_rounds_longer() -> None:
    swarm = SwarmConfig(steps_per_round=10)
    assert 90.0 * own_share(5, swarm) == pytest.approx(60.0)
    assert own_share(0, swarm) == 1.0


def test_age_decays_the_weight_until_it_is_refused() -> None:
    assert [lateness(age, SWARM).weight for age in range(4)] == [1.0, 0.5, 0.25, 0.0]
    assert lateness(0, SWARM).outcome == Outcome.ACCEPTED
    assert lateness(3, SWARM).reason == VerdictReason.TOO_OLD
    assert lateness(1, DROP).reason == VerdictReason.DROPPED


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_quantile_covers_its_share(values: list[float], share: float) -> None:
    limit = quantile(values, share)
    assert sum(value <= limit for value in values) >= share * len(values) - 1e-9
    assert limit in values
