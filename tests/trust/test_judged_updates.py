"""With a judge, an update counts only after its verdict, and only if it helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blocktrain.coordinator.storage.ledger import verify_ledger
from blocktrain.wire.codec import encode
from blocktrain.wire.messages import LedgerEntry, Outcome, VerdictReason, WorkerAnswer
from tests.adversaries.training import noise_like
from tests.coordinator.peer import Peer
from tests.coordinator.test_life_of_an_update import ledger_of
from tests.trust.kit import Trainer, flipped, judged, judged_recipe


def verified(peer: Peer, folder: Path) -> None:
    entries: list[LedgerEntry] = list(ledger_of(peer).entries)
    report = verify_ledger(
        entries,
        lambda wanted: (folder / "blobs/payloads" / wanted).read_bytes(),
        lambda wanted: (folder / f"blobs/snapshots/{wanted}.safetensors").read_bytes(),
    )
    assert report.ok, report.reason


def test_an_honest_update_is_pending_then_accepted_then_merged(tmp_path: Path) -> None:
    recipe = judged_recipe()
    with judged(tmp_path, recipe) as running:
        worker = Trainer(running, recipe)
        assignment = worker.peer.lend()
        payload = encode(worker.peer.codec, worker.peer.schema(0), worker.train(assignment))
        first = worker.peer.reveal(worker.peer.commit(assignment, payload), payload)
        assert (first.outcome, first.reason) == (Outcome.PENDING, VerdictReason.JUDGING)
        verdict = worker.wait(payload)
        assert verdict.outcome is Outcome.ACCEPTED, verdict.sentence
        assert "held-out loss changes by -" in verdict.sentence
        running.wait_for_version(0, 1)
        kinds = [entry.kind for entry in ledger_of(worker.peer).entries]
        assert kinds == ["run", "join", "assign", "commit", "reveal", "verdict", "merge", "snapshot"]
        body = ledger_of(worker.peer).entries[5].body
        assert body["evidence"]["seed"] >= 0
        assert running.coordinator.judging.cost.share <= 0.1
        verified(worker.peer, tmp_path)


def test_a_reversed_update_is_refused_with_its_reason_and_the_snapshot_is_unchanged(tmp_path: Path) -> None:
    recipe = judged_recipe({"replicas": 2, "max_deadline_seconds": 100.0}, compute_share=0.5)
    snapshots = []
    for attacked in (False, True):
        folder = tmp_path / str(attacked)
        with judged(folder, recipe) as running:
            honest = Trainer(running, recipe)
            lease = honest.peer.lend()
            if attacked:
                attacker = Trainer(running, recipe)
                bad = attacker.peer.lend()
                verdict = attacker.send(bad, flipped(attacker.train(bad)))
                assert (verdict.outcome, verdict.reason) == (Outcome.REFUSED, VerdictReason.HARMFUL)
                shown = attacker.peer.get(f"/v1/workers/{attacker.peer.identity.worker_id}").content
                record = WorkerAnswer.model_validate_json(shown)
                assert record.verdicts[0].reason == "harmful"
                assert record.worker.merged == 0
                assert record.worker.rating < 0.5
                assert attacker.peer.lend().shard != bad.shard, "the same text gives the same update"
            honest.send(lease, honest.train(lease))
            running.advance(101)
            snapshots.append(running.wait_for_version(0, 1))
            verified(honest.peer, folder)
    assert snapshots[0] == snapshots[1]


def test_noise_zero_oversized_and_copied_updates_do_not_count(tmp_path: Path) -> None:
    recipe = judged_recipe({"replicas": 3, "max_deadline_seconds": 100.0})
    with judged(tmp_path, recipe) as running:
        honest = Trainer(running, recipe)
        lease = honest.peer.lend()
        delta = honest.train(lease)
        assert honest.send(lease, delta).outcome is Outcome.ACCEPTED
        copier = Trainer(running, recipe)
        copied = copier.send(copier.peer.lend(), delta)
        assert (copied.outcome, copied.reason) == (Outcome.REFUSED, VerdictReason.DUPLICATE)
        assert "committed before" in copied.sentence
        running.advance(101)
        running.wait_for_version(0, 1)
        norm = {}
        for name, scale in (("huge", 50.0), ("tiny", 0.001)):
            attacker = Trainer(running, recipe)
            lease = attacker.peer.lend()
            fake = {key: np.float32(scale) * value for key, value in noise_like(delta, 1).items()}
            norm[name] = attacker.send(lease, fake)
            assert norm[name].reason is VerdictReason.NORM, norm[name].sentence
        idle = Trainer(running, recipe)
        nothing = idle.send(idle.peer.lend(), {key: 0 * value for key, value in delta.items()})
        assert nothing.outcome is Outcome.REFUSED


def test_newcomers_are_scored_and_not_merged_beside_established_workers(tmp_path: Path) -> None:
    recipe = judged_recipe({"rounds": 8, "max_deadline_seconds": 100.0}, probation_verdicts=2)
    with judged(tmp_path, recipe) as running:
        founder = Trainer(running, recipe)
        for round_ in range(2):
            assert founder.round().outcome is Outcome.ACCEPTED
            running.wait_for_version(0, round_ + 1)
        newcomer = Trainer(running, recipe)
        verdict = newcomer.round()
        assert (verdict.outcome, verdict.reason) == (Outcome.REFUSED, VerdictReason.PROBATION)
        assert founder.round().outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 3)
        assert newcomer.round().outcome is Outcome.ACCEPTED
        workers = {one.worker_id: one for one in running.coordinator.workers.workers().workers}
        assert not workers[newcomer.peer.identity.worker_id].probation


def test_a_refused_round_may_be_tried_again_after_its_deadline(tmp_path: Path) -> None:
    recipe = judged_recipe({"max_deadline_seconds": 100.0})
    with judged(tmp_path, recipe) as running:
        worker = Trainer(running, recipe)
        lease = worker.peer.lend()
        running.advance(10)
        assert worker.send(lease, flipped(worker.train(lease))).outcome is Outcome.REFUSED
        ahead = worker.peer.lend(after=lease.assignment_id)
        assert ahead.round == 1
        assert not worker.peer.heartbeat(ahead).cancel
        running.advance(60)
        assert worker.peer.heartbeat(ahead).cancel
        again = worker.peer.lend(after=ahead.assignment_id)
        assert again.round == 0
        assert worker.send(again, worker.train(again)).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 1)


def test_a_worker_that_is_alone_and_refused_does_not_wait_for_the_deadline(tmp_path: Path) -> None:
    """One waited 306 s in a small judged run."""
    recipe = judged_recipe({"max_deadline_seconds": 600.0})
    with judged(tmp_path, recipe) as running:
        worker = Trainer(running, recipe)
        lease = worker.peer.lend()
        running.advance(300)
        assert worker.send(lease, worker.train(lease)).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 1)
        lease = worker.peer.lend()
        running.advance(10)
        assert worker.send(lease, flipped(worker.train(lease))).outcome is Outcome.REFUSED
        assert worker.peer.block(0).round.deadline == running.clock.now - 10 + 600
        running.advance(recipe.swarm.min_deadline_seconds)
        again = worker.peer.lend(after=lease.assignment_id)
        assert (again.round, again.shard != lease.shard) == (1, True)
        # The second try is under way: what is trained ahead of it is not called off for the first one's sake.
        ahead = worker.peer.lend(after=again.assignment_id)
        running.advance(recipe.swarm.min_deadline_seconds)
        assert (ahead.round, worker.peer.heartbeat(ahead).cancel) == (2, False)
        assert worker.send(again, worker.train(again)).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 2)


def test_text_that_was_refused_is_lent_to_nobody_in_its_round(tmp_path: Path) -> None:
    """Two refused workers got each other's text, sent each other's update, and were refused as copiers."""
    recipe = judged_recipe({"replicas": 2, "max_deadline_seconds": 600.0})
    with judged(tmp_path, recipe) as running:
        workers = [Trainer(running, recipe) for _ in range(2)]
        leases = [worker.peer.lend() for worker in workers]
        running.advance(10)
        for worker, lease in zip(workers, leases, strict=True):
            assert worker.send(lease, flipped(worker.train(lease))).outcome is Outcome.REFUSED
        running.advance(recipe.swarm.min_deadline_seconds)
        again = [
            worker.peer.lend(after=lease.assignment_id) for worker, lease in zip(workers, leases, strict=True)
        ]
        assert [lease.round for lease in again] == [0, 0]
        assert len({lease.shard for lease in (*leases, *again)}) == 4
        for worker, lease in zip(workers, again, strict=True):
            assert worker.send(lease, worker.train(lease)).outcome is not Outcome.REFUSED


def test_a_second_try_that_was_lent_behind_work_ahead_calls_that_off(tmp_path: Path) -> None:
    """A worker does things in the order in which they were lent: two refused workers waited without end for a
    round that only their second tries could close."""
    recipe = judged_recipe({"max_deadline_seconds": 600.0})
    with judged(tmp_path, recipe) as running:
        worker = Trainer(running, recipe)
        lease = worker.peer.lend()
        ahead = worker.peer.lend(after=lease.assignment_id)
        running.advance(10)
        assert worker.send(lease, flipped(worker.train(lease))).outcome is Outcome.REFUSED
        running.advance(recipe.swarm.min_deadline_seconds)
        again = worker.peer.lend(after=ahead.assignment_id)
        assert (ahead.round, again.round) == (1, 0)
        called_off = worker.peer.heartbeat(ahead)
        assert called_off.cancel
        assert called_off.reason.endswith("did not count: train it again")  # unused is not refused
        assert not worker.peer.heartbeat(again).cancel
        assert worker.send(again, worker.train(again)).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 1)


def test_the_guard_holds_a_block_whose_merge_harms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates that help alone and harm together cannot be had on demand: the finding is forced here."""
    recipe = judged_recipe()
    with judged(tmp_path, recipe) as running:
        monkeypatch.setattr(running.coordinator.judging, "guard", lambda *args: [[-1.0, -1.1] * 15])
        worker = Trainer(running, recipe)
        worker.round()
        shown = f"/v1/workers/{worker.peer.identity.worker_id}"
        running.wait_for(lambda: worker.peer.get(shown).json()["verdicts"][0]["reason"] == "guard")
        assert worker.peer.block(0).head_version == 0
        verified(worker.peer, tmp_path)


def test_repeat_offenders_are_banned_for_a_while(tmp_path: Path) -> None:
    recipe = judged_recipe({"replicas": 1, "rounds": 40})
    with judged(tmp_path, recipe) as running:
        founder, attacker = Trainer(running, recipe), Trainer(running, recipe)
        standing = '{"bad": 6.0, "verdicts": 6}'
        with running.coordinator.resources.store.write() as session:
            from blocktrain.coordinator.storage.store import WorkerRow

            row = session.get(WorkerRow, attacker.peer.identity.worker_id)
            assert row is not None
            row.standing = standing
        lease = attacker.peer.lend()
        payload = encode(attacker.peer.codec, attacker.peer.schema(0), flipped(attacker.train(lease)))
        attacker.peer.reveal(attacker.peer.commit(lease, payload), payload)
        who = attacker.peer.identity.worker_id
        running.wait_for(lambda: founder.peer.get(f"/v1/workers/{who}").json()["worker"]["ban"] is not None)
        refused = attacker.peer.send("POST", "/v1/assignments", b"{}")
        assert refused.status_code == 403
        assert refused.json()["error"]["reason"] == "banned"
        running.advance(3601)
        assert attacker.peer.send("POST", "/v1/assignments", b"{}").status_code == 200


def test_who_has_just_been_established_does_not_close_the_round_alone(tmp_path: Path) -> None:
    recipe = judged_recipe({"max_deadline_seconds": 100.0}, probation_verdicts=1)
    with judged(tmp_path, recipe) as running:
        first, second = Trainer(running, recipe), Trainer(running, recipe)
        leases = [worker.peer.lend() for worker in (first, second)]
        assert first.send(leases[0], first.train(leases[0])).outcome is Outcome.ACCEPTED
        state = first.peer.block(0)
        assert (state.head_version, state.round.wanted) == (0, 2)
        assert second.send(leases[1], second.train(leases[1])).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 1)
        assert len(first.peer.merges(0).merges[0].inputs) == 2


def test_a_newcomer_s_update_does_not_stand_in_for_an_established_worker_s(tmp_path: Path) -> None:
    recipe = judged_recipe({"max_deadline_seconds": 100.0}, probation_verdicts=1)
    with judged(tmp_path, recipe) as running:
        founder = Trainer(running, recipe)
        founder.round()
        running.wait_for_version(0, 1)
        lease, newcomer = founder.peer.lend(), Trainer(running, recipe)
        assert newcomer.round().outcome is Outcome.ACCEPTED
        assert founder.peer.block(0).head_version == 1
        assert founder.send(lease, founder.train(lease)).outcome is Outcome.ACCEPTED
        running.wait_for_version(0, 2)
        assert len(founder.peer.merges(0, since=1).merges[0].inputs) == 2


def test_ten_minutes_of_packet_loss_cost_an_honest_worker_no_reputation(tmp_path: Path) -> None:
    recipe = judged_recipe({"rounds": 8, "max_deadline_seconds": 100.0}, probation_verdicts=1)
    with judged(tmp_path, recipe) as running:
        unlucky, lucky = Trainer(running, recipe), Trainer(running, recipe)
        leases = [worker.peer.lend() for worker in (unlucky, lucky)]
        delta = unlucky.train(leases[0])
        payload = encode(unlucky.peer.codec, unlucky.peer.schema(0), delta)
        committed = unlucky.peer.commit(leases[0], payload)
        lucky.send(leases[1], lucky.train(leases[1]))
        running.advance(600)
        running.wait_for_version(0, 1)
        unlucky.peer.reveal(committed, payload)
        assert unlucky.wait(payload).outcome in (Outcome.LATE, Outcome.REFUSED)
        shown = unlucky.peer.get(f"/v1/workers/{unlucky.peer.identity.worker_id}").content
        standing = WorkerAnswer.model_validate_json(shown).worker
        assert standing.rating >= 0.5
        assert (standing.uptime, standing.ban) == (1.0, None)
