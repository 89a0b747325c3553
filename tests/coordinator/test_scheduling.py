"""Who trains what next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.decisions.scheduling import (
    BlockView,
    Done,
    Offer,
    Pause,
    WorkerView,
    next_assignment,
)

SWARM = SwarmConfig(rounds=10, replicas=2, max_lead=4)


def blocks(*states: tuple[int, int]) -> list[BlockView]:
    """(version, seats) of each block."""
    return [BlockView(block=i, version=version, seats=seats) for i, (version, seats) in enumerate(states)]


def offered(worker: WorkerView, views: Sequence[BlockView]) -> tuple[int, int]:
    decision = next_assignment(worker, views, SWARM)
    assert isinstance(decision, Offer), decision
    assert decision.reason
    return decision.block, decision.round


def test_the_least_covered_block_comes_first() -> None:
    assert offered(WorkerView(), blocks((0, 2), (5, 1), (0, 2))) == (1, 5)


def test_among_equally_covered_blocks_the_stalest_comes_first() -> None:
    assert offered(WorkerView(), blocks((3, 1), (2, 1), (4, 1))) == (1, 2)


def test_what_the_worker_prefers_or_holds_breaks_ties() -> None:
    views = blocks((1, 0), (1, 0), (1, 0))
    assert offered(WorkerView(prefer_block=1), views) == (1, 1)
    assert offered(WorkerView(holding={2: 1}), views) == (2, 1)
    assert offered(WorkerView(current_block=2, prefer_block=1), views) == (2, 1)


def test_a_worker_stays_with_its_block_while_the_replicas_are_even() -> None:
    assert offered(WorkerView(current_block=1), blocks((0, 2), (3, 1))) == (1, 3)
    assert offered(WorkerView(current_block=1), blocks((0, 1), (3, 1))) == (1, 3)


def test_a_worker_moves_where_that_evens_out_the_replicas() -> None:
    assert offered(WorkerView(current_block=1), blocks((3, 0), (3, 1))) == (0, 3)


def test_a_lone_worker_takes_turns_every_max_lead_rounds() -> None:
    assert offered(WorkerView(current_block=0), blocks((3, 0), (0, 0))) == (0, 3)
    assert offered(WorkerView(current_block=0), blocks((4, 0), (0, 0))) == (1, 0)


def test_a_worker_that_has_delivered_runs_one_round_ahead() -> None:
    view = BlockView(block=0, version=4, seats=1, used_rounds=frozenset({4}))
    decision = next_assignment(WorkerView(current_block=0), [view], SWARM)
    assert isinstance(decision, Offer)
    assert decision.round == 5
    assert "runs ahead" in decision.reason


def test_a_worker_that_has_run_ahead_waits_unless_another_block_lacks_workers() -> None:
    own = BlockView(block=0, version=4, seats=1, used_rounds=frozenset({4, 5}))
    full = BlockView(block=1, version=4, seats=2)
    lacking = BlockView(block=2, version=4, seats=1)
    assert isinstance(next_assignment(WorkerView(current_block=0), [own, full], SWARM), Pause)
    assert offered(WorkerView(current_block=0), [own, full, lacking]) == (2, 4)


def test_nobody_runs_ahead_of_the_last_round() -> None:
    last = BlockView(block=0, version=9, seats=1, used_rounds=frozenset({9}))
    assert isinstance(next_assignment(WorkerView(current_block=0), [last], SWARM), Pause)


def test_the_run_is_done_when_every_block_is() -> None:
    assert isinstance(next_assignment(WorkerView(), blocks((10, 1), (10, 0)), SWARM), Done)
    assert offered(WorkerView(current_block=0), blocks((10, 1), (9, 1))) == (1, 9)


def test_a_block_that_does_not_fit_the_memory_is_not_offered() -> None:
    views = [
        BlockView(block=0, version=0, seats=0, training_bytes=16 * 10**9),
        BlockView(block=1, version=5, seats=5, training_bytes=16 * 10**6),
    ]
    assert offered(WorkerView(memory_bytes=10**9), views) == (1, 5)
    decision = next_assignment(WorkerView(memory_bytes=10**9), views[:1], SWARM)
    assert isinstance(decision, Pause)
    assert "16.0 GB" in decision.reason


def test_a_large_worker_begins_with_the_large_block() -> None:
    sizes = (1, 1, 4, 1)
    views = [BlockView(block=b, version=0, seats=0, training_bytes=size) for b, size in enumerate(sizes)]
    assert offered(WorkerView(memory_bytes=4), views) == (2, 0)
    assert offered(WorkerView(memory_bytes=2), views) == (0, 0)
    # It stays there, though others are done sooner with theirs.
    views = [replace(view, seats=view.block != 2, version=5 * (view.block != 2)) for view in views]
    assert offered(WorkerView(current_block=2, memory_bytes=4), views) == (2, 0)


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    seats=st.lists(st.integers(0, 11), min_size=1, max_size=12),
)
def test_workers_that_only_move_for_a_reason_settle_evenly(versions: list[int], seats: list[int]) -> None:
    """However they start, after a few rounds of asking no block has two workers more than another."""
    at = [seat % len(versions) for seat in seats]
    for _ in range(3):
        for worker, block in enumerate(at):
            counts = [sum(b == i for w, b in enumerate(at) if w != worker) for i in range(len(versions))]
            views = blocks(*zip(versions, counts, strict=True))
            at[worker] = offered(WorkerView(current_block=block), views)[0]
    counts = [at.count(block) for block in range(len(versions))]
    assert max(counts) - min(counts) <= 1


def test_nobody_downloads_a_snapshot_for_the_last_rounds_of_a_block_that_has_its_workers() -> None:
    idle = WorkerView(current_block=0)
    assert isinstance(next_assignment(idle, blocks((10, 0), (8, 2)), SWARM), Pause)
    assert offered(idle, blocks((10, 0), (8, 1))) == (1, 8)
    assert offered(idle, blocks((10, 0), (6, 2))) == (1, 6)
    assert offered(WorkerView(current_block=0, holding={1: 7}), blocks((10, 0), (8, 2))) == (1, 8)


def test_a_full_block_keeps_its_workers_and_takes_no_others() -> None:
    full = [BlockView(block=0, version=10, seats=0), BlockView(block=1, version=3, seats=64, full=True)]
    waiting = next_assignment(WorkerView(), full, SWARM)
    assert isinstance(waiting, Pause)
    assert "all its seats taken" in waiting.reason
    assert offered(WorkerView(current_block=1), full) == (1, 3)
    assert isinstance(next_assignment(WorkerView(), full[:1], SWARM), Done)
