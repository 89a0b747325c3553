"""When a round closes, who it waits for, and how long: every rule without a database."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import SwarmConfig, TrustConfig
from blocktrain.coordinator.decisions.rounds import (
    OpenRound,
    RoundFacts,
    extra_steps,
    own_share,
    quantile,
    round_clock,
    round_seconds,
    round_state,
    starts_clock,
)

SWARM = SwarmConfig(min_deadline_seconds=2, max_deadline_seconds=600, replicas=2, max_age=2, age_decay=0.5)
DROP = SwarmConfig(policy="drop", drop_deadline_seconds=30)
JUDGED = TrustConfig(probation_verdicts=3, judge_patience_seconds=120)
UNJUDGED = TrustConfig(judge="off")


def facts(**known: Any) -> RoundFacts:
    """Two live workers, a round that began at 100 and lasts 10 s; sets of workers as strings of letters."""
    sets = {key: frozenset(value) for key, value in known.items() if isinstance(value, str)}
    defaults: dict[str, Any] = {"version": 1, "begun": 100.0, "live": frozenset("ab"), "history": [5.0]}
    return RoundFacts(**{**defaults, **known, **sets})


def state(
    now: float = 101.0, swarm: SwarmConfig = SWARM, trust: TrustConfig = JUDGED, **known: Any
) -> OpenRound:
    return round_state(facts(**known), swarm, trust, now)


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
    waiting = state(begun=None)
    assert (waiting.clock.deadline, waiting.clock.period_began) == (None, None)
    assert "begins with the first assignment, then lasts 10 s" in waiting.clock.reason


def test_a_deadline_is_set_again_only_while_there_is_nothing_to_merge() -> None:
    empty = state(now=125.0)
    assert (empty.clock.deadline, empty.clock.period_began) == (130.0, 120.0)
    assert "re-set 2 times" in empty.clock.reason
    for something in ({"on_time": "a"}, {"late": "a"}, {"judging": (124.0,)}):
        assert state(now=125.0, **something).clock.deadline == 110.0


def test_where_everybody_was_refused_they_may_try_again_after_the_shortest_round() -> None:
    assert state(now=107.0, live="a", refused="a").period_began == 106.0
    assert state(now=107.0, live="a", refused="a").clock.deadline == 110.0
    alone: dict[str, Any] = {"live": "a", "refused": "a"}
    for somebody in ({"live": "ab"}, {"judging": (106.0,)}, {"on_time": "b"}):
        assert state(now=107.0, **{**alone, **somebody}).period_began == 100.0


@given(now=st.floats(100, 1e6), begun=st.floats(0, 100), slowest=st.floats(0.01, 1e4))
def test_without_updates_the_deadline_is_never_behind(now: float, begun: float, slowest: float) -> None:
    deadline = state(now=now, begun=begun, history=[slowest]).clock.deadline
    assert deadline is not None
    assert deadline >= now - 1e-6 * now


def test_a_round_closes_at_the_quorum() -> None:
    closing = state(on_time="ab")
    assert closing.close
    assert closing.reason == "all 2 wanted updates have arrived"
    assert not state(on_time="a").close


def test_late_updates_do_not_make_a_quorum() -> None:
    assert not state(on_time="a", late="bcdef").close


def test_a_round_closes_at_the_deadline_with_at_least_one_update() -> None:
    assert state(now=110.0, on_time="a").close
    assert state(now=110.0, late="a").close
    assert not state(now=110.0).close


def test_the_quorum_is_every_live_worker_and_at_least_the_replicas() -> None:
    assert state(live="").wanted == 2
    assert state(live="abcde").wanted == 5


def test_a_worker_that_delivered_and_moved_on_does_not_close_the_round_for_those_still_at_it() -> None:
    assert state(live="ab", on_time="c").wanted == 3
    assert not state(live="ab", on_time="ca").close


def test_a_refused_worker_has_had_its_turn() -> None:
    assert state(live="abc", refused="a").wanted == 2
    assert state(live="abc", refused="abc").wanted == 1


def test_without_a_judge_a_refused_worker_tries_again_and_is_awaited() -> None:
    assert state(trust=UNJUDGED, live="abc", refused="a").wanted == 3


def test_a_round_waits_for_established_workers_alone() -> None:
    established = {"a": 9, "b": 9}
    waiting = state(live="abcdefgh", established=established)
    assert (waiting.wanted, waiting.workers) == (2, 2)
    assert state(live="abcdefgh", established=established, on_time="ab").close


def test_newcomers_neither_close_a_round_for_established_workers_nor_hold_it_up() -> None:
    established = {"a": 9, "b": 9}
    assert not state(live="abcd", established=established, on_time="cd").close
    assert not state(live="abcd", established=established, on_time="acd").close
    assert state(live="abcd", established=established, on_time="abc").close
    assert state(live="abcd", established=established, refused="cd").wanted == 2
    assert state(live="abcd", established=established, refused="bcd", on_time="a").close


def test_a_worker_established_in_this_round_does_not_close_it_alone() -> None:
    fresh: dict[str, Any] = {"established": {"a": 3}, "counted": "a", "on_time": "a"}
    assert not state(**fresh).close
    assert state(**{**fresh, "established": {"a": 4}}, swarm=SwarmConfig(replicas=1)).close


def test_what_arrived_in_time_waits_for_its_judge_and_not_for_ever() -> None:
    arrived: dict[str, Any] = {"on_time": "a", "judging": (105.0,)}
    waiting = state(now=111.0, **arrived)
    assert not waiting.close
    assert "waits for the judge" in waiting.reason
    assert state(now=226.0, **arrived).close, "its patience is over"
    assert state(now=111.0, on_time="a", judging=(110.5,)).close, "it came after the deadline"


def test_a_finished_block_closes_no_round() -> None:
    assert not state(version=SWARM.rounds, on_time="ab").close


def test_a_merge_under_way_is_continued_only_when_its_process_is_dead() -> None:
    assert not state(merging=True, claimed_until=102.0, on_time="ab").close
    assert state(merging=True, claimed_until=100.5).close
    assert state(merging=True).close


def test_the_clock_starts_with_the_first_worker_and_again_when_all_others_have_gone() -> None:
    assert starts_clock(facts(begun=None), others=1)
    assert starts_clock(facts(), others=0)
    assert not starts_clock(facts(), others=1)
    assert not starts_clock(facts(on_time="b"), others=0)
    assert not starts_clock(facts(late="b"), others=0)


HALF = SwarmConfig(replicas=2, steps_per_round=10, stand_in=0.9)


def extra(seconds: float | None, own: float | None, swarm: SwarmConfig = HALF, others: int = 0) -> int:
    """Steps that a worker gets for others in a round ahead of the open one, which lasts so long."""
    known = facts(history=[seconds] * 8 if seconds else [])
    longer = SwarmConfig(**{**vars(swarm), "deadline_slack": 1.0, "max_deadline_seconds": 1e9})
    return extra_steps(known, round_clock(known, longer, 100.0).deadline, others, 2, own, longer, 100.0)


def test_a_lone_worker_fills_the_time_its_round_leaves_it_up_to_one_replica() -> None:
    assert extra(100.0, 60.0) == 5
    assert extra(1000.0, 60.0) == 10
    assert extra(1000.0, 60.0, SwarmConfig(**{**vars(HALF), "replicas": 4})) == 10
    assert extra(66.0, 60.0) == 0


def test_in_the_open_round_only_the_time_to_its_deadline_counts_and_who_delivered_is_not_missing() -> None:
    swarm = SwarmConfig(**{**vars(HALF), "max_deadline_seconds": 1e9})
    for on_time, steps in (("", 5), ("b", 0)):
        known = facts(history=[50.0], on_time=on_time)
        deadline = round_clock(known, swarm, 100.0).deadline
        assert extra_steps(known, deadline, 0, 1, 60.0, swarm, 100.0) == steps


def test_no_extra_steps_where_no_replica_is_missing_or_nothing_is_known() -> None:
    assert extra(1000.0, 60.0, others=1) == 0
    assert extra(None, 60.0) == 0
    assert extra(1000.0, None) == 0
    assert extra(1000.0, 60.0, DROP) == 0
    assert extra(1000.0, 60.0, SwarmConfig(stand_in=0.0)) == 0


def test_extra_steps_do_not_make_later_rounds_longer() -> None:
    swarm = SwarmConfig(steps_per_round=10)
    assert 90.0 * own_share(5, swarm) == pytest.approx(60.0)
    assert own_share(0, swarm) == 1.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_quantile_covers_its_share(values: list[float], share: float) -> None:
    limit = quantile(values, share)
    assert sum(value <= limit for value in values) >= share * len(values) - 1e-9
    assert limit in values
