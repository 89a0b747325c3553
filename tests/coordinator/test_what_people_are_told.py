"""Words and numbers that people see: no honest worker looks guilty, every place says the same."""

from __future__ import annotations

import dataclasses
import io
import re
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from alembic import command
from alembic.config import Config
from rich.console import Console

from blocktrain.coordinator.decisions.rounds import BlockPace, run_seconds_left
from blocktrain.coordinator.storage.store import MIGRATIONS, Store
from blocktrain.local.status_view import status_tables, verdict_counts
from blocktrain.local.swarm import shown
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.snapshot import tensors_of
from blocktrain.wire.hashing import snapshot_hash
from blocktrain.wire.messages import Outcome, VerdictReason, WorkersAnswer, verdict_word
from blocktrain.wording import counted, duration
from tests.coordinator.conftest import Place, Running, tiny_recipe
from tests.coordinator.peer import Peer


def nonsense(peer: Peer) -> bytes:
    return b"\xff" * peer.run.blocks[0].payload_bytes


@pytest.fixture
def told(local: Place) -> Iterator[Running]:
    """Two rounds of one block: two updates on time, one too old, one of nonsense, one lease never used."""
    with local.serve(tiny_recipe(blocks=1, replicas=3, rounds=9, max_age=0)) as running:
        fast, slow, bad = running.peer(), running.peer(), running.peer()
        stale = slow.lend()
        bad.lend()
        for round_ in range(2):
            fast.deliver(fast.lend(), seed=round_)
            running.advance(1000)
            running.wait_for_version(0, round_ + 1)
        late = slow.deliver(stale, seed=7)
        assert (late.outcome, late.reason) == (Outcome.REFUSED, VerdictReason.TOO_OLD)
        assert verdict_word(late.outcome, late.held_against) == "unused"
        again = bad.lend()
        broken = nonsense(bad)
        verdict = bad.reveal(bad.commit(again, broken), broken)
        assert verdict_word(verdict.outcome, verdict.held_against) == "refused"
        yield running


def test_every_place_counts_the_same_and_only_what_is_the_workers_fault_is_refused(told: Running) -> None:
    status = told.coordinator.status()
    summaries = told.coordinator.workers.workers().workers
    work = status.work
    assert (work.accepted, work.late, work.unused, work.refused, work.missing) == (2, 0, 1, 1, 1)
    assert status.participation == 2 / 5
    for people in (status.workers, summaries):
        for word in ("accepted", "late", "unused", "refused"):
            assert sum(getattr(one, word) for one in people) == getattr(work, word)
    assert sorted(map(verdict_counts, summaries)) == [
        "0 on time, 1 refused",
        "0 on time, 1 unused",
        "2 on time",
    ]
    held = {one.reason: one.held_against for one in told.coordinator.workers.verdicts().verdicts}
    assert held == {"on_time": False, "too_old": False, "not_finite": True}


def test_an_update_after_the_last_round_is_unused(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2, rounds=1)) as running:
        fast, slow = running.peer(), running.peer()
        late = slow.lend()
        fast.deliver(fast.lend())
        running.advance(1000)
        running.wait_for_version(0, 1)
        verdict = slow.deliver(late, seed=1)
        assert (verdict.reason, verdict.held_against) == (VerdictReason.RUN_FINISHED, False)
        assert running.coordinator.status().work.unused == 1
        assert running.coordinator.status().work.refused == 0


def test_reputation_comes_with_its_scale(told: Running) -> None:
    answer = WorkersAnswer.model_validate_json(told.peer(join=False).get("/v1/workers").content)
    assert not answer.judged  # this run's recipe has no judge
    newcomer = told.peer()
    newest = told.coordinator.workers.worker(newcomer.identity.worker_id).worker
    assert newest.reputation == pytest.approx(answer.newcomer_reputation)


def test_refusals_of_an_older_database_are_sorted_by_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    store = Store(f"sqlite:///{path}")
    with store.engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
    with closing(sqlite3.connect(path)) as old, old:
        old.execute(
            "INSERT INTO workers (worker_id, public_key, device, versions, joined, join_sequence, last_seen, "
            "accepted, late, refused, account) VALUES ('w', 'k', 'cpu', '{}', 0, 0, 0, 4, 0, 3, '{}')"
        )
        for number, reason in enumerate(("no_gain", "run_finished", "harmful")):
            old.execute(
                "INSERT INTO updates (update_id, assignment_id, worker_id, block, round, base_version, "
                "base_hash, payload_hash, payload_bytes, committed, commit_sequence, state, weight, reason) "
                "VALUES (?, ?, 'w', 0, 0, 0, 'b', 'p', 1, 0, 0, 'refused', 0, ?)",
                (f"u{number}", f"a{number}", reason),
            )
    store.migrate()
    store.close()
    with closing(sqlite3.connect(path)) as new:
        assert new.execute("SELECT accepted, unused, refused FROM workers").fetchall() == [(4, 2, 1)]
        held = dict(new.execute("SELECT reason, held_against FROM updates").fetchall())
    assert held == {"no_gain": 0, "run_finished": 0, "harmful": 1}


# --- time left ---


def test_the_time_left_is_that_of_the_slowest_block() -> None:
    fast = BlockPace(version=5, closed=(10, 20, 30), first_seconds=10)
    slow = BlockPace(version=2, closed=(15, 35), first_seconds=15, begun=35)
    assert run_seconds_left([fast], 8, now=30) == 30
    assert run_seconds_left([fast, slow], 8, now=35) == 6 * 20
    assert run_seconds_left([fast, slow], 8, now=45) == 6 * 20 - 10
    assert run_seconds_left([fast, slow], 8, now=9999) == 5 * 20


def test_blocks_that_one_worker_trains_in_turns_take_the_sum_of_their_times() -> None:
    turns = [(10, 20, 70, 80), (30, 40), (50, 60)]
    blocks = [BlockPace(version=len(closed), closed=closed, first_seconds=10) for closed in turns]
    assert run_seconds_left(blocks, 4, now=80) == 4 * 10
    open_round = dataclasses.replace(blocks[1], begun=80.0)
    assert run_seconds_left([blocks[0], open_round, blocks[2]], 4, now=83) == 4 * 10 - 3


def test_blocks_that_merge_shortly_after_each_other_have_no_longer_run_for_it() -> None:
    merges = [(60, 120, 180), (10, 70, 130)]
    first, second = (BlockPace(version=len(closed), closed=closed, first_seconds=60) for closed in merges)
    second = dataclasses.replace(second, begun=130)
    first = dataclasses.replace(first, version=4)
    left = run_seconds_left([first, second], 84, now=180)
    assert left is not None
    # The second block has 81 rounds left, and 50 s of the first of these have passed.
    assert 81 * 60 - 50 <= left <= 81 * 60 - 20
    just_one = [BlockPace(version=1, closed=(at,), first_seconds=10) for at in (10, 20, 30)]
    assert run_seconds_left(just_one, 2, now=30) == 3 * 10


def test_a_week_without_the_coordinator_is_no_weeklong_round() -> None:
    week = 7 * 86400.0
    pace = BlockPace(version=4, closed=(10, 20, 20 + week, 30 + week), first_seconds=10)
    assert run_seconds_left([pace], 6, now=30 + week) == 2 * 10


def test_a_run_that_is_extended_or_started_again_has_its_round_before_it() -> None:
    pace = BlockPace(version=2, closed=(10, 20), first_seconds=10)
    assert run_seconds_left([pace], 3, now=500) == 10
    assert run_seconds_left([dataclasses.replace(pace, begun=496)], 3, now=500) == 6


def test_the_time_left_is_not_known_before_the_first_round_and_nothing_after_the_last() -> None:
    assert run_seconds_left([BlockPace(version=0, closed=(), first_seconds=None)], 8, now=0) is None
    assert run_seconds_left([BlockPace(version=1, closed=(12,), first_seconds=9)], 3, now=12) == 18
    assert run_seconds_left([BlockPace(version=8, closed=(1, 2), first_seconds=1)], 8, now=50) == 0


def test_a_log_has_a_line_of_a_swarm_only_where_it_says_something_new(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktrain.local.swarm.LINE_SECONDS", 0)
    log = io.StringIO()
    with local.serve(tiny_recipe(blocks=1, rounds=6)) as running, shown(Console(file=log)) as show:
        peer = running.peer()
        for _ in range(3):
            show(running.coordinator.status())
        peer.deliver(peer.lend(), seed=0)
        running.wait_for_version(0, 1)
        for _ in range(3):
            show(running.coordinator.status())
    assert [line.split()[0] for line in log.getvalue().splitlines()] == ["rounds=0/6", "rounds=1/6"]


def test_status_and_workers_are_told_the_same_time_left(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, rounds=6)) as running:
        peer = running.peer()
        assert peer.lend().run_seconds_left is None
        for round_ in range(2):
            running.advance(10)
            peer.deliver(peer.lend(), seed=round_)
            running.wait_for_version(0, round_ + 1)
        assignment = peer.lend()
        status = running.coordinator.status()
        assert status.seconds_left == 4 * 10
        assert assignment.run_seconds_left == peer.heartbeat(assignment).run_seconds_left == 4 * 10
        assert status.tokens_per_second == pytest.approx(2 * 2 * 16 / 10)
        screen = io.StringIO()
        Console(file=screen, width=120).print(status_tables(status))
        assert "tiny: training, about 40 s left" in screen.getvalue()
        (worker,) = status.workers
        assert worker.step is not None
        paused = status.model_copy(update={"workers": (worker.model_copy(update={"block": None}),)})
        Console(file=screen, width=120).print(status_tables(paused))
        assert re.search(r"test +- +- +- ", screen.getvalue())
        running.advance(1000)  # nobody is at work, so nobody can tell
        later = running.coordinator.status()
        assert later.seconds_left is None
        Console(file=screen, width=120).print(status_tables(later))
        assert "tiny: waiting for workers" in screen.getvalue()
        assert re.search(r"test, gone +- +- +- ", screen.getvalue())  # at no block any more


def test_durations_are_told_in_two_units() -> None:
    assert [duration(one) for one in (0.4, 59.4, 125, 3 * 3600 + 1240, 2 * 86400 + 4 * 3600)] == [
        "0 s", "59 s", "2 min 5 s", "3 h 20 min", "2 d 4 h",
    ]  # fmt: skip


def test_one_is_not_told_as_many() -> None:
    assert [counted(one, "round") for one in (0, 1, 1500)] == ["0 rounds", "1 round", "1,500 rounds"]


# --- the model ---


def test_the_newest_model_is_one_download_that_loads_as_a_checkpoint(place: Place, tmp_path: Path) -> None:
    with place.serve(tiny_recipe()) as running:
        peer = running.peer()
        peer.deliver(peer.lend(prefer_block=0))
        head = running.wait_for_version(0, 1)
        answer = peer.get("/v1/checkpoint")
        assert answer.headers["content-type"] == "application/x-tar"
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert f"checkpoint-{peer.run.run_id[:8]}-round-0.tar" in answer.headers["content-disposition"]
        subprocess.run(["tar", "-x", "-C", tmp_path], input=answer.content, check=True)
        loaded = load_checkpoint(tmp_path / "checkpoint", torch.device("cpu"))
        hashes = [snapshot_hash(tensors_of(block)) for block in loaded.blocks]
        assert hashes == [head, peer.run.blocks[1].initial_hash]
        assert loaded.pooling.weights == (0.5, 0.5)
        assert loaded.recipe.training.steps == 8
