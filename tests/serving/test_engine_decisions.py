"""The pure decisions of serving: sessions, routes, draft lengths, look-ups, addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import UserError
from blocktrain.serving.engine.draft_length import CLEARLY_COUNTED, SETTLING, AdaptiveLength, Traversed
from blocktrain.serving.engine.drafting import blocks_for_drafts
from blocktrain.serving.engine.engine import windows
from blocktrain.serving.engine.fanout import Candidate, stage_route
from blocktrain.serving.stage.main import parse_blocks
from blocktrain.serving.stage.sessions import Asked, Session, SessionStore, Step, next_step
from blocktrain.serving.transport import Address
from blocktrain.wire.frames import prefix_checksum
from tests.tiny import tiny_objective


def session(**changes: object) -> Session:
    values = {"epoch": 2, "blocks": (0, 1), "caches": {}, "ids": [1, 2, 3, 4], "traversal": 5}
    return Session(**(values | changes))  # type: ignore[arg-type]


def asked(**changes: object) -> Asked:
    values = {"epoch": 2, "traversal": 6, "base": 3, "blocks": (0, 1), "prefix": prefix_checksum([1, 2, 3])}
    return Asked(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "request_", "step"),
    [
        (session(), asked(), Step.RUN),
        (session(), asked(traversal=5), Step.REPLAY),
        (session(), asked(traversal=4), Step.STALE),
        (session(), asked(epoch=1), Step.STALE),
        (session(), asked(epoch=3, base=0, traversal=1), Step.RUN),
        (session(), asked(epoch=3), Step.RESEND),
        (session(), asked(base=9), Step.RESEND),
        (session(), asked(prefix=1), Step.RESEND),
        (session(), asked(blocks=(0,)), Step.RESEND),
        (session(checksum=7), asked(base=4, prefix=7), Step.RUN),
        (session(checksum=7), asked(base=4, prefix=8), Step.RESEND),
        (None, asked(), Step.RESEND),
        (None, asked(base=0), Step.RUN),
    ],
)
def test_next_step_of_a_session(held: Session | None, request_: Asked, step: Step) -> None:
    assert next_step(held, request_) is step


def test_least_recently_used_session_makes_room() -> None:
    store = SessionStore(max_sessions=2, max_positions=100, idle_seconds=60)
    for number in range(2):
        store.put(("c", number), session(ids=[0] * 10), now=number)
    kept = store.get(("c", 0))
    assert kept is not None
    store.put(("c", 0), kept, now=2)
    store.put(("c", 2), session(ids=[0] * 10), now=3)
    assert store.get(("c", 1)) is None
    assert len(store) == 2
    assert store.num_evicted == 1


def test_positions_and_idle_time_are_bounded() -> None:
    store = SessionStore(max_sessions=10, max_positions=25, idle_seconds=60)
    for number in range(3):
        store.put(("c", number), session(ids=[0] * 10), now=number)
    assert store.num_positions == 20
    assert store.expire(now=1000) == 2
    assert len(store) == 0


links = st.lists(st.frozensets(st.integers(0, 4), max_size=5), max_size=6)


@given(links, st.integers(0, 2**63))
def test_a_route_asks_every_reachable_block_once(blocks: list[frozenset[int]], spread: int) -> None:
    candidates = [Candidate(i, held) for i, held in enumerate(blocks)]
    route = stage_route(range(5), candidates, spread)
    served = [block for _, part in route.legs for block in part]
    assert sorted([*served, *route.missing]) == list(range(5))
    reachable = frozenset().union(*blocks) if blocks else frozenset()
    assert set(route.missing) == set(range(5)) - reachable
    assert all(set(part) <= blocks[link] for link, part in route.legs)


def test_a_route_prefers_quick_then_warm_stages() -> None:
    everything = frozenset({0, 1})
    slow, cold, warm = (
        Candidate(0, everything, slow=True, warm=True),
        Candidate(1, everything),
        Candidate(2, everything, warm=True),
    )
    assert stage_route([0, 1], [slow, cold, warm]).legs == [(2, (0, 1))]
    assert stage_route([0, 1], [slow, cold]).legs == [(1, (0, 1))]


def test_near_stages_are_asked_before_a_far_one_that_holds_more() -> None:
    far = Candidate(0, frozenset({0, 1, 2}), round_trip_seconds=0.2)
    near = [Candidate(i + 1, frozenset({i}), round_trip_seconds=0.01) for i in range(3)]
    assert stage_route([0, 1, 2], [far, *near]).legs == [(1, (0,)), (2, (1,)), (3, (2,))]
    # As good as equally near: fewer legs.
    busy = Candidate(0, frozenset({0, 1, 2}), round_trip_seconds=0.03)
    assert stage_route([0, 1, 2], [busy, *near]).legs == [(0, (0, 1, 2))]
    # A session stays where its caches are.
    warm = Candidate(0, frozenset({0, 1, 2}), warm=True, round_trip_seconds=0.2)
    assert stage_route([0, 1, 2], [warm, *near]).legs == [(0, (0, 1, 2))]


def test_sessions_spread_over_equal_stages() -> None:
    candidates = [Candidate(i, frozenset({0})) for i in range(3)]
    used = {stage_route([0], candidates, spread).legs[0][0] for spread in range(30)}
    assert used == {0, 1, 2}


def taught(
    chance: float, traversal_seconds: float, step_seconds: float = 0.002, requests: int = 1
) -> AdaptiveLength:
    """A policy that has seen drafts of one block accepted with this chance."""
    length = AdaptiveLength()
    teach(length, chance, traversal_seconds, step_seconds, requests)
    return length


def teach(
    length: AdaptiveLength, chance: float, traversal_seconds: float, step_seconds: float, requests: int
) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        accepted = int(min(random.geometric(1 - chance) - 1, 8))
        length.stepped(step_seconds / requests, requests, now=0.0, blocks=1)
        seconds, margins = 8 * step_seconds + traversal_seconds, [2.5] * min(accepted + 1, 8)
        found = Traversed(margins, accepted, accepted + 1, seconds, traversal_seconds, rows=9, blocks=1)
        length.observe(found, requests, now=0.0)


ONE_HOLDS, THREE_HOLD = 0.91, 0.97
"""The chance that a token holds which so many of four blocks drafted."""


def written(
    length: AdaptiveLength,
    requests: int,
    began: float,
    rounds: int,
    *,
    step: float,
    traversal: float,
    row: float = 0.0,
    one_holds: float = ONE_HOLDS,
) -> tuple[float, float]:
    """Tokens a second of so many requests in step with one another, and when they end: each round they draft
    together, a `step` of each block for each token, and have a traversal, which takes longer by `row` for
    each of them."""
    random, now, tokens = np.random.default_rng(0), began, 0
    for _ in range(rounds):
        last, drafts, blocks = now, 0, length.blocks(requests, 3, at_once=False)
        holds = one_holds if blocks == 1 else THREE_HOLD
        while blocks and drafts < 32 and length.go_on([2.5] * drafts, requests, now, blocks=blocks):
            now, drafts = now + blocks * step, drafts + 1
            length.stepped(blocks * step / requests, requests, now, blocks=blocks)
        seconds = traversal + row * drafts
        now += seconds
        for _ in range(requests):
            accepted = int(min(random.geometric(1 - holds) - 1, drafts)) if drafts else 0
            tokens += accepted + 1
            margins, rows = [2.5] * min(accepted + 1, drafts), drafts + 1
            found = Traversed(margins, accepted, accepted + 1, now - last, seconds, rows=rows, blocks=blocks)
            length.observe(found, requests, now)
    return tokens / (now - began), now


def drafted(
    length: AdaptiveLength, margin: float = 2.5, requests: int = 1, now: float = 0.0, flying: bool = False
) -> int:
    """Tokens of the next traversal, behind none or behind others that are under way."""

    def goes_on(k: int) -> bool:
        return length.go_on([margin] * k, requests, now, blocks=1, flying=flying, unsent=k)

    return next((k for k in range(99) if not goes_on(k)), 99)


def test_drafts_grow_with_latency_acceptance_and_margins() -> None:
    assert drafted(taught(0.9, 0.002)) < drafted(taught(0.9, 0.02)) < drafted(taught(0.9, 0.2))
    assert drafted(taught(0.4, 0.1)) < drafted(taught(0.9, 0.1))
    usual = taught(0.9, 0.05)
    assert drafted(usual, margin=0.1) < drafted(usual, margin=9.0)
    assert drafted(taught(0.98, 100.0)) > 32


def test_a_burst_leaves_the_drafts_of_a_single_request_as_they_were() -> None:
    length = taught(0.9, 0.1)
    before = drafted(length)
    teach(length, 0.9, traversal_seconds=0.4, step_seconds=0.2, requests=64)
    assert drafted(length, requests=64) < drafted(length) == before


def test_a_request_alone_drafts_on_while_it_waits() -> None:
    far, near = taught(0.9, 0.2, step_seconds=0.01), taught(0.9, 0.01)
    assert drafted(far, flying=True) > drafted(far)
    assert drafted(near, flying=True) == drafted(near), "no token waits longer than a traversal takes"
    teach(far, 0.9, traversal_seconds=0.2, step_seconds=0.01, requests=8)
    assert drafted(far, requests=8, flying=True) == drafted(far, requests=8)


def test_many_requests_write_no_slower_than_without_drafts() -> None:
    dear, length = {"step": 0.2, "traversal": 0.25, "row": 0.15}, AdaptiveLength()
    _, now = written(length, 32, 0.0, 30, **dear)
    speed, now = written(length, 32, now, 400, **dear)
    assert speed > 0.96 * 32 / 0.25
    # What a burst taught is not applied to the few after it, nor theirs to the next burst.
    few, now = written(length, 2, now, 30, step=0.002, traversal=0.1)
    assert few > 5 * 2 / 0.1
    speed, now = written(length, 32, now, 100, **dear)
    assert speed > 0.9 * 32 / 0.25


def test_drafts_that_look_dear_are_kept_where_all_write_more_with_them() -> None:
    length = AdaptiveLength()
    speed, _ = written(length, 32, 0.0, 100, step=0.15, traversal=0.25)
    assert speed > 1.2 * 32 / 0.25


def test_a_change_of_costs_is_found_out_in_both_directions() -> None:
    length, now = AdaptiveLength(), 0.0
    for _ in range(2):
        _, now = written(length, 32, now, 200, step=0.2, traversal=0.25, row=0.15)
        assert not length.load(32).comparison.best
        _, now = written(length, 32, now, 400, step=0.02, traversal=0.25)
        assert length.load(32).comparison.best
        speed, now = written(length, 32, now, 100, step=0.02, traversal=0.25)
        assert speed > 4 * 32 / 0.25


def test_for_many_requests_the_first_block_drafts_alone() -> None:
    assert [AdaptiveLength().blocks(requests, 3, at_once=False) for requests in (1, 4, 5, 64)] == [3, 3, 1, 1]
    assert AdaptiveLength().blocks(64, 0, at_once=True) == 0


def test_several_blocks_draft_for_many_where_the_first_one_alone_is_often_wrong() -> None:
    found = []
    for one_holds in (ONE_HOLDS, 0.6):
        length = AdaptiveLength()
        # Alone first, where all blocks draft: so it is known how often theirs hold.
        _, now = written(length, 1, 0.0, 200, step=0.001, traversal=0.015, one_holds=one_holds)
        written(length, 32, now, 400, step=0.001, traversal=0.015, one_holds=one_holds)
        assert length.is_busy(32, 3)
        found.append(length.blocks(32, 3, at_once=False))
    assert found == [1, 3]


def test_more_requests_begin_without_drafts_where_fewer_wrote_more_without() -> None:
    length = AdaptiveLength()
    written(length, 32, 0.0, 100, step=0.2, traversal=0.25, row=0.15)
    assert length.blocks(64, 3, at_once=False) == 0


def test_a_row_that_makes_traversals_longer_makes_drafts_shorter() -> None:
    lengths = []
    for row in (0.0, 0.1):
        length = AdaptiveLength()
        # A stage that is near: what a traversal without drafts takes is worth a try.
        _, now = written(length, 1, 0.0, 10, step=0.001, traversal=0.005)
        _, now = written(length, 32, now, 200, step=0.01, traversal=0.25, row=row)
        lengths.append(drafted(length, requests=32, now=now))
    assert lengths[1] < lengths[0]


def test_drafts_are_not_judged_while_prompts_are_read_for_them() -> None:
    comparison = AdaptiveLength().load(8).comparison
    found = Traversed([], 0, 1, 0.1, 0.1)
    for i in range(99):
        comparison.observe(found, 0.0125, 8, i / 80, least=0.01, reading=True)
    assert comparison.speeds == {}
    for i in range(99, 999):
        comparison.observe(found, 0.0125, 8, i / 80, least=0.01, reading=True)
    assert set(comparison.speeds) == {True, False}, "requests that always come are no excuse"


def test_all_blocks_draft_for_many_where_the_network_leaves_time_for_it() -> None:
    far, near = (taught(0.9, seconds, step_seconds=0.002, requests=8) for seconds in (0.1, 0.01))
    assert [far.blocks(requests, 3, at_once=False) for requests in (1, 8, 64)] == [3, 3, 1]
    assert [near.blocks(requests, 3, at_once=False) for requests in (1, 4, 8)] == [3, 3, 1]
    assert not far.is_busy(8, 3)
    assert near.is_busy(8, 3)


def test_blocks_that_are_stepped_together_all_draft_for_many() -> None:
    assert [AdaptiveLength().blocks(8, 3, at_once=at_once) for at_once in (True, False)] == [3, 1]


def test_drafts_of_many_wait_for_one_another_where_the_network_takes_less_than_that() -> None:
    near, far = (taught(0.9, seconds, step_seconds=0.0001, requests=8) for seconds in (0.01, 0.1))
    assert [near.gathers(requests) for requests in (1, 4, 8)] == [False, False, True]
    assert not far.gathers(64)
    assert AdaptiveLength().gathers(8), "as long as nothing has landed"


def test_a_start_from_cold_does_not_end_drafts_for_long() -> None:
    length, now = AdaptiveLength(), 0.0
    _, now = written(length, 8, now, 20, step=0.02, traversal=0.3)
    cold, now = written(length, 8, now, 40, step=0.001, traversal=0.03, row=0.1)
    # From now on without what made them dear.
    _, now = written(length, 8, now, 400, step=0.001, traversal=0.03)
    assert length.load(8).comparison.best
    warm, _ = written(length, 8, now, 100, step=0.001, traversal=0.03)
    assert warm > 3 * 8 / 0.03 > cold


def test_a_trial_without_drafts_that_is_clearly_slower_ends_early() -> None:
    comparison = AdaptiveLength().load(8).comparison
    now, plain = 0.0, 0

    def land(tokens: int, seconds: float) -> None:
        nonlocal now
        now += seconds
        comparison.observe(
            Traversed([], 0, tokens, 8 * seconds, 8 * seconds), seconds, 8, now, least=0.01, reading=False
        )

    while comparison.drafts:
        land(8, 0.01)
    while not comparison.drafts:
        land(1, 0.002)
        plain += 1
    # Less than a second, in which 500 would land.
    assert plain <= 8 * (SETTLING + CLEARLY_COUNTED)
    assert set(comparison.speeds) == {True, False}


def test_drafting_begins_again_when_its_cost_is_old() -> None:
    length = taught(0.9, traversal_seconds=0.01, step_seconds=5.0)
    assert drafted(length) == 1
    assert drafted(length, now=60.0) > 1


def test_drafts_are_made_with_the_first_blocks_that_need_no_others() -> None:
    assert blocks_for_drafts(tiny_objective("model.blocks=4"), 2) == [0, 1]
    assert blocks_for_drafts(tiny_objective("model.blocks=1"), 2) == [0]
    assert blocks_for_drafts(tiny_objective("model.blocks=4", "objective.kind=chain"), 2) == [0]
    models = [tiny_objective(f"model.blocks={count}") for count in (1, 2, 3, 4, 8)]
    assert [len(blocks_for_drafts(model, None)) for model in models] == [1, 2, 2, 3, 3]


@given(st.integers(2, 50), st.integers(1, 9))
def test_scoring_windows_hold_every_token_but_the_first_once(length: int, context: int) -> None:
    tokens = list(range(length))
    pairs = list(windows(tokens, context))
    assert [t for _, targets in pairs for t in targets] == tokens[1:]
    assert all(len(x) == len(y) <= context for x, y in pairs)
    assert np.all([x[1:] == y[:-1] for x, y in pairs])


def test_addresses_and_blocks_are_parsed_or_refused() -> None:
    assert Address.parse("example.org:7001#ab") == Address("example.org", 7001, "ab")
    assert Address.parse("[::1]:7001") == Address("::1", 7001)
    assert parse_blocks("0,2-3") == [0, 2, 3]
    for wrong in ("host", "host:port", "host:70000", ""):
        with pytest.raises(UserError):
            Address.parse(wrong)
    for wrong in ("", "a", "1-", "-1"):
        with pytest.raises(UserError):
            parse_blocks(wrong)
