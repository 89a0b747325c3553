"""How far along an update its judge goes, whoever comes, goes or asks twice meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator, opened
from blocktrain.coordinator.storage.queries import block_row
from blocktrain.coordinator.storage.store import UpdateRow, WorkerRow
from blocktrain.wire.messages import JudgeTask
from tests.coordinator.conftest import Clock
from tests.trust.kit import judged_recipe
from tests.trust.test_verdicts_reach_everything import GOOD, Direct, last_entry
from tests.validation.kit import corpus

ESTABLISHED = '{"good": 9.0, "good_verdicts": 9, "verdicts": 9}'


@contextmanager
def crew(folder: Path, number: int, *, guard: bool = True) -> Iterator[tuple[Coordinator, list[Direct]]]:
    """A coordinator whose judge is called by hand, with established workers of one block."""
    recipe = judged_recipe({"replicas": number, "max_deadline_seconds": 100.0}, guard=guard)
    with opened(recipe, corpus(), folder, clock=Clock(), threads=False) as coordinator:
        workers = [Direct(coordinator) for _ in range(number)]
        establish(coordinator, *workers)
        yield coordinator, workers


def establish(coordinator: Coordinator, *workers: Direct) -> None:
    with coordinator.resources.store.write() as session:
        for worker in workers:
            row = session.get(WorkerRow, worker.name)
            assert row is not None
            row.standing, row.established = ESTABLISHED, True


def silence(coordinator: Coordinator, worker: Direct) -> None:
    with coordinator.resources.store.write() as session:
        row = session.get(WorkerRow, worker.name)
        assert row is not None
        row.last_seen -= 10_000


def close(coordinator: Coordinator, version: int | None) -> None:
    """The round's merge has begun, or was not published."""
    with coordinator.resources.store.write() as session:
        block_row(session, 0, lock=True).closing_version = version


def asked(coordinator: Coordinator, judge: str = "judge") -> JudgeTask:
    task = coordinator.judging.lease(judge)
    assert isinstance(task, JudgeTask)
    return task


def test_all_updates_of_a_round_have_one_length_whoever_falls_silent_or_joins(tmp_path: Path) -> None:
    with crew(tmp_path, 4) as (coordinator, workers):
        payloads = [worker.commit(seed) for seed, worker in enumerate(workers)]
        steps = []
        for number, (worker, payload) in enumerate(zip(workers, payloads, strict=True)):
            worker.reveal(payload)
            task = asked(coordinator)
            steps.append(task.step)
            coordinator.judging.report("judge", task.update_id, GOOD)
            if number == 0:
                silence(coordinator, workers[3])
            if number == 1:
                establish(coordinator, *(Direct(coordinator) for _ in range(5)))
        assert steps == [steps[0]] * 4
        assert steps[0] == pytest.approx(coordinator.resources.run.swarm.outer_lr / 4)


def test_without_the_guard_an_update_must_help_at_its_full_length(tmp_path: Path) -> None:
    with crew(tmp_path, 3, guard=False) as (coordinator, workers):
        payload, *_ = [worker.commit(seed) for seed, worker in enumerate(workers)]
        workers[0].reveal(payload)
        assert asked(coordinator).step == coordinator.resources.run.swarm.outer_lr


def test_an_update_that_becomes_late_at_its_judge_is_judged_again_at_its_full_length(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as (coordinator, workers):
        first, *_ = [worker.commit(seed) for seed, worker in enumerate(workers)]
        workers[0].reveal(first)
        short = asked(coordinator)
        close(coordinator, 1)
        with pytest.raises(Refusal, match="became late"):
            coordinator.judging.report("judge", short.update_id, GOOD)
        full = asked(coordinator)
        assert full.update_id == short.update_id
        assert full.step == pytest.approx(3 * short.step)
        # And back, where the merge that had closed its round was not published.
        close(coordinator, None)
        with pytest.raises(Refusal, match="late no longer"):
            coordinator.judging.report("judge", full.update_id, GOOD)
        again = asked(coordinator)
        assert again.step == short.step
        coordinator.judging.report("judge", again.update_id, GOOD)
        entry = last_entry(coordinator)
        assert (entry["outcome"], entry["evidence"]["step"]) == ("accepted", short.step)
        assert entry["evidence"]["head"] == again.head_hash


def test_a_judge_that_asks_again_is_asked_the_same(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as (coordinator, workers):
        payload, *_ = [worker.commit(seed) for seed, worker in enumerate(workers)]
        workers[0].reveal(payload)
        first = asked(coordinator)
        assert first.step == pytest.approx(coordinator.resources.run.swarm.outer_lr / 3)
        silence(coordinator, workers[2])
        assert asked(coordinator) == first
        coordinator.judging.report("judge", first.update_id, GOOD)
        assert last_entry(coordinator)["evidence"]["step"] == first.step


def test_a_verdict_on_an_update_that_an_older_program_lent_says_no_length(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as (coordinator, workers):
        workers[0].deliver()
        task = asked(coordinator)
        with coordinator.resources.store.write() as session:
            row = session.get(UpdateRow, task.update_id)
            assert row is not None
            row.judge_step = row.judge_parts = row.judge_late = row.judge_head = None
        coordinator.judging.report("judge", task.update_id, GOOD)
        assert last_entry(coordinator)["evidence"].keys() & {"step", "head"} == set()
