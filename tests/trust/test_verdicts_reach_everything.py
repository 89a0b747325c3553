"""A verdict of every reason reaches row, ledger, counters and metrics; no failure ends the judge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktrain.coordinator.service import Coordinator, opened
from blocktrain.coordinator.states import COUNTED, LIVE, WAITING, AssignmentState, UpdateState, change
from blocktrain.coordinator.storage.ledger import read_entries
from blocktrain.coordinator.storage.store import AssignmentRow, UpdateRow, WorkerRow
from blocktrain.coordinator.verdicts import settle
from blocktrain.validation.evidence import Evidence, Gain, report_of
from blocktrain.validation.ruling import Mark, Ruling
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.codec import encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    BanRequest,
    CommitRequest,
    JoinRequest,
    JudgeTask,
    Outcome,
    Verdict,
    VerdictReason,
    verdict_word,
)
from tests.adversaries.training import noise_like
from tests.coordinator.conftest import Clock
from tests.trust.kit import Trainer, judged, judged_recipe
from tests.validation.kit import corpus
from tests.waiting import until

GOOD = report_of(Evidence(Gain(0.1, 0.01, 30), Gain(0.1, 0.01, 30), Gain(0.05, 0.01, 30), 1000))


class Direct:
    """A worker that calls the services, without HTTP and without threads."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.identity = coordinator, Identity.generate()
        self.name = self.identity.worker_id
        run = coordinator.resources.run
        request = JoinRequest(corpus_sha256=run.corpus_sha256, device="test")
        coordinator.assignments.join(self.name, self.identity.public_key, request)

    def commit(self, seed: int = 0, payload: bytes | None = None) -> bytes:
        """Promise a payload for the next assignment: this one, or noise."""
        assignment = self.coordinator.assignments.ask(self.name, AssignmentRequest())
        assert isinstance(assignment, Assignment)
        run = self.coordinator.resources.run
        weights = self.coordinator.resources.weights.snapshot(0, assignment.base_hash)
        payload = payload or encode(run.codec, run.schemas[0], noise_like(weights, seed))
        digest, base = content_hash(payload), assignment.base_hash
        request = CommitRequest(payload_hash=digest, payload_bytes=len(payload), base_hash=base)
        self.coordinator.updates.commit(self.name, assignment.assignment_id, request)
        return payload

    def reveal(self, payload: bytes) -> Verdict:
        digest = content_hash(payload)
        expected = self.coordinator.updates.expect(self.name, digest, len(payload))
        return self.coordinator.updates.reveal(expected, np.frombuffer(payload, np.uint8), digest)

    def deliver(self, seed: int = 0) -> Verdict:
        return self.reveal(self.commit(seed))

    def row(self) -> WorkerRow:
        with self.coordinator.resources.store.read() as session:
            row = session.get(WorkerRow, self.name)
            assert row is not None
            return row

    def counters(self) -> tuple[int, int, int, int]:
        row = self.row()
        return row.accepted, row.late, row.unused, row.refused


@contextmanager
def unattended(folder: Path, swarm: dict[str, Any] | None = None) -> Iterator[Coordinator]:
    """A coordinator whose rounds and judge are called by hand."""
    settings = {"replicas": 3, "max_deadline_seconds": 100.0, **(swarm or {})}
    recipe = judged_recipe(settings, judge="external", guard=False)
    with opened(recipe, corpus(), folder, clock=Clock(), scoring=False, threads=False) as coordinator:
        yield coordinator


def told(coordinator: Coordinator, outcome: str, reason: str) -> bool:
    text = coordinator.metrics.text(coordinator.status(), 0.0).decode()
    return f'blocktrain_verdicts_total{{outcome="{outcome}",reason="{reason}"}} 1.0' in text


def last_entry(coordinator: Coordinator) -> dict[str, Any]:
    with coordinator.resources.store.read() as session:
        return [entry for entry in read_entries(session, 0, 1000) if entry.kind == "verdict"][-1].body


OUTCOMES = {VerdictReason.ON_TIME: Outcome.ACCEPTED, VerdictReason.CARRIED: Outcome.LATE}


@pytest.mark.parametrize("reason", [one for one in VerdictReason if one is not VerdictReason.JUDGING])
def test_a_verdict_of_every_reason_reaches_row_ledger_counters_and_metrics(
    tmp_path: Path, reason: VerdictReason
) -> None:
    outcome = OUTCOMES.get(reason, Outcome.REFUSED)
    with unattended(tmp_path) as coordinator:
        worker, resources = Direct(coordinator), coordinator.resources
        update_id = worker.deliver().update_id
        seen = resources.changes.count
        ruling = Ruling(outcome, 0.5 if outcome is Outcome.LATE else 0.0, reason, "because", Mark.GOOD)
        with resources.store.write() as session:
            row = session.get(UpdateRow, update_id)
            assert row is not None
            settle(resources, session, session.get(WorkerRow, worker.name), row, ruling, 5.0)
            assert resources.changes.count == seen, "nothing is told before it is written"
        with resources.store.read() as session:
            stored = session.get(UpdateRow, update_id)
            assert stored is not None
            assert (stored.state, stored.reason, stored.sentence) == (outcome, reason, "because")
        entry = last_entry(coordinator)
        assert (entry["update_id"], entry["outcome"], entry["reason"]) == (update_id, outcome, reason)
        assert entry["weight"] == ruling.weight
        word = verdict_word(outcome, held_against=False)  # the mark is good
        assert worker.counters() == tuple(
            int(word == one) for one in ("accepted", "late", "unused", "refused")
        )
        assert told(coordinator, outcome, reason)
        assert coordinator.workers.worker(worker.name).worker.good_verdicts == 1
        assert resources.changes.count == seen + 1


def test_a_transaction_that_fails_has_ruled_on_nothing(tmp_path: Path) -> None:
    with unattended(tmp_path) as coordinator:
        worker, resources = Direct(coordinator), coordinator.resources
        update_id = worker.deliver().update_id
        ruling = Ruling.refuse(VerdictReason.HARMFUL, "because", Mark.BAD)

        def settled_and_failed() -> None:
            with resources.store.write() as session:
                row = session.get(UpdateRow, update_id)
                assert row is not None
                settle(resources, session, session.get(WorkerRow, worker.name), row, ruling, 5.0)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            settled_and_failed()
        assert worker.counters() == (0, 0, 0, 0)
        assert not told(coordinator, "refused", "harmful")


def test_a_ban_takes_back_what_was_accepted_in_counters_and_metrics_too(tmp_path: Path) -> None:
    with unattended(tmp_path) as coordinator:
        worker = Direct(coordinator)
        worker.deliver()
        task = coordinator.judging.lease("judge")
        assert isinstance(task, JudgeTask)
        coordinator.judging.report("judge", task.update_id, GOOD)
        assert worker.counters() == (1, 0, 0, 0)
        rating = coordinator.workers.worker(worker.name).worker.rating
        coordinator.workers.ban(worker.name, BanRequest(reason="a mistake", seconds=0.0))
        assert worker.counters() == (1, 0, 0, 0), "to lift a ban takes nothing back"
        coordinator.workers.ban(worker.name, BanRequest(reason="rude", seconds=60.0))
        assert worker.counters() == (0, 0, 1, 0)
        assert told(coordinator, "accepted", "on_time")
        assert told(coordinator, "refused", "removed")
        assert coordinator.workers.worker(worker.name).worker.rating == rating
        assert not coordinator.rounds.close_due()


def test_what_the_guard_leaves_out_is_not_counted_as_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = judged_recipe(judge="coordinator")
    with opened(recipe, corpus(), tmp_path, clock=Clock(), scoring=False, threads=False) as coordinator:
        worker = Direct(coordinator)
        worker.deliver()
        task = coordinator.judging.lease("judge")
        assert isinstance(task, JudgeTask)
        coordinator.judging.report("judge", task.update_id, GOOD)
        # A merge that harms though its one update helps cannot be had on demand: the finding is forced.
        monkeypatch.setattr(coordinator.judging, "guard", lambda *arguments: [[-1.0, -1.1] * 15])
        standing = worker.row().standing
        assert coordinator.rounds.close_due()
        assert worker.counters() == (0, 0, 1, 0)
        assert told(coordinator, "refused", "guard")
        assert last_entry(coordinator)["reason"] == "guard"
        assert worker.row().standing == standing


def judge_all(coordinator: Coordinator) -> None:
    while isinstance(task := coordinator.judging.lease("judge"), JudgeTask):
        coordinator.judging.report("judge", task.update_id, GOOD)


def test_what_is_wrong_with_the_bytes_comes_before_what_is_wrong_with_the_time(tmp_path: Path) -> None:
    with unattended(tmp_path, {"policy": "drop"}) as coordinator:
        slow, broken = Direct(coordinator), Direct(coordinator)
        late = slow.commit(1)
        garbage = broken.commit(payload=b"\xff" * coordinator.resources.run.payload_bytes(0))
        Direct(coordinator).deliver(2)
        judge_all(coordinator)
        clock = coordinator.resources.clock
        assert isinstance(clock, Clock)
        clock.now += 60.0
        assert coordinator.rounds.close_due()
        assert slow.reveal(late).reason is VerdictReason.DROPPED
        assert broken.reveal(garbage).reason is VerdictReason.NOT_FINITE


def test_a_runtime_error_of_the_scorer_does_not_stop_judging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = judged_recipe()
    with judged(tmp_path, recipe) as running:
        score, failures = Scorer.evidence, iter([RuntimeError("CUDA out of memory")])

        def fails_once(*arguments: Any) -> Evidence:
            if (error := next(failures, None)) is not None:
                raise error
            return score(*arguments)

        monkeypatch.setattr(Scorer, "evidence", fails_once)
        worker = Trainer(running, recipe)
        lease = worker.peer.lend()
        payload = encode(worker.peer.codec, worker.peer.schema(0), worker.train(lease))
        worker.peer.reveal(worker.peer.commit(lease, payload), payload)
        failed = 'blocktrain_loop_failures_total{loop="judge"} 1.0'
        # Looked at again and again: a counter wakes nobody.
        until("the judge has failed", lambda: failed in worker.peer.get("/metrics").text)
        assert "CUDA out of memory" in caplog.text
        running.advance(recipe.trust.judge_lease_seconds + 1)
        assert worker.wait(payload).outcome is Outcome.ACCEPTED


def test_an_update_that_cannot_be_judged_lets_those_behind_it_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = judged_recipe({"replicas": 2})
    with opened(recipe, corpus(), tmp_path, clock=Clock(), scoring=False, threads=False) as coordinator:
        first, second = Direct(coordinator), Direct(coordinator)
        first.deliver(1)
        second.deliver(2)
        score, poisoned = Scorer.evidence, iter([True])

        def fails_first(*arguments: Any) -> Evidence:
            if next(poisoned, False):
                raise RuntimeError("cannot be scored")
            return score(*arguments)

        monkeypatch.setattr(Scorer, "evidence", fails_first)
        with pytest.raises(RuntimeError):
            coordinator.judging.judge_next()
        assert coordinator.judging.judge_next()
        assert (sum(first.counters()), sum(second.counters())) == (0, 1)
        assert not coordinator.judging.judge_next()
        clock = coordinator.resources.clock
        assert isinstance(clock, Clock)
        clock.now += recipe.trust.judge_lease_seconds + 1
        assert coordinator.judging.judge_next()
        assert sum(first.counters()) == 1


def test_states_follow_one_another_only_as_the_tables_say() -> None:
    update = UpdateRow(state=UpdateState.COMMITTED)
    for state in (UpdateState.JUDGING, UpdateState.ACCEPTED, UpdateState.MERGED):
        change(update, state)
    for state in UpdateState:
        with pytest.raises(AssertionError, match=f"{state} may not follow merged"):
            change(update, state)
    lease = AssignmentRow(state=AssignmentState.LEASED)
    with pytest.raises(AssertionError, match="refused may not follow leased"):
        change(lease, AssignmentState.REFUSED)
    change(lease, AssignmentState.COMMITTED)
    change(lease, AssignmentState.REFUSED)


def test_states_are_stored_as_the_strings_they_always_were() -> None:
    assert list(map(str, LIVE)) == ["leased", "committed"]
    assert list(map(str, COUNTED)) == ["accepted", "late", "merged"]
    assert {*map(str, WAITING), "refused"} <= {str(one) for one in UpdateState}
    assert {str(Outcome.ACCEPTED), str(Outcome.LATE), str(Outcome.REFUSED)} <= {*map(str, UpdateState)}
