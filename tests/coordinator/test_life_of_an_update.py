"""The contract, on every storage: from joining to a new snapshot, and each way an update can fall short."""

from __future__ import annotations

import numpy as np
import pytest

from blocktrain.coordinator.storage.ledger import verify_ledger
from blocktrain.training.merge import assembled, replay_merge
from blocktrain.wire.codec import decode, held
from blocktrain.wire.hashing import content_hash, snapshot_hash
from blocktrain.wire.messages import Finished, LedgerAnswer, Outcome, VerdictReason, Wait
from tests.coordinator.conftest import Place, Running, tiny_recipe
from tests.coordinator.peer import Peer, Refused


def ledger_of(peer: Peer) -> LedgerAnswer:
    return LedgerAnswer.model_validate_json(peer.get("/v1/ledger").content)


def check_ledger(peer: Peer) -> int:
    """Verify everything with what the public routes give; the number of merges replayed."""
    report = verify_ledger(
        ledger_of(peer).entries,
        lambda wanted: peer.get(f"/v1/updates/{wanted}").content,
        lambda wanted: peer.get(f"/v1/snapshots/{wanted}").content,
        peer.run.coordinator_key,
    )
    assert report.ok, report.reason
    return report.merges


def test_an_update_travels_from_joining_to_a_new_snapshot(place: Place) -> None:
    with place.serve(tiny_recipe()) as running:
        peer = running.peer()
        assignment = peer.lend()
        assert (assignment.block, assignment.round, assignment.first_step) == (0, 0, 0)
        assert not peer.heartbeat(assignment).cancel
        payload = peer.payload(0)
        committed = peer.commit(assignment, payload)
        verdict = peer.reveal(committed, payload)
        assert (verdict.outcome, verdict.weight) == (Outcome.ACCEPTED, 1.0)
        head = running.wait_for_version(0, 1)
        merges = peer.merges(0).merges
        assert [(merge.version, merge.result_hash) for merge in merges] == [(1, head)]
        base = peer.snapshot(0, assignment.base_hash)
        updates = {content_hash(payload): held(decode(peer.codec, peer.schema(0), payload))}
        bands = replay_merge(merges[0], peer.schema(0), held(base), updates)
        assert snapshot_hash(assembled(peer.schema(0), bands)) == head
        peer.snapshot(0, head)
        assert peer.get(f"/v1/updates/{content_hash(payload)}").content == payload
        assert check_ledger(peer) == 1


def test_a_restart_goes_on_where_the_run_was(place: Place) -> None:
    recipe = tiny_recipe()
    with place.serve(recipe) as running:
        peer = running.peer()
        identity, clock = peer.identity, running.clock
        assignment = peer.lend()
        payload = peer.payload(0)
        first = peer.commit(assignment, payload)
    with place.serve(recipe, clock) as running:
        peer = running.peer(identity, join=False)
        assert peer.commit(assignment, payload).receipt == first.receipt
        assert peer.reveal(first, payload).outcome == Outcome.ACCEPTED
        running.wait_for_version(0, 1)
        assert check_ledger(peer) == 1


def test_a_run_ends_when_every_block_has_had_its_rounds(place: Place) -> None:
    with place.serve(tiny_recipe(rounds=2)) as running:
        peer, seed = running.peer(), 0
        while not isinstance(answer := peer.ask(), Finished):
            assert not isinstance(answer, Wait)
            seed += 1
            peer.deliver(answer, seed)
            running.wait_for_version(answer.block, answer.round + 1)
        assert [block.head_version for block in running.coordinator.status().blocks] == [2, 2]
        assert running.coordinator.status().finished
        assert check_ledger(peer) == 4


def test_two_replicas_are_averaged_and_have_their_own_shards(place: Place) -> None:
    with place.serve(tiny_recipe(replicas=2, blocks=1)) as running:
        one, two = running.peer(), running.peer()
        first, second = one.lend(), two.lend()
        assert {first.shard, second.shard} == {0, 1}
        one.deliver(first, seed=1)
        assert one.block(0).head_version == 0
        two.deliver(second, seed=2)
        running.wait_for_version(0, 1)
        (merge,) = one.merges(0).merges
        assert [one.update_id for one in merge.inputs] == sorted(one.update_id for one in merge.inputs)
        assert len(merge.inputs) == 2


def test_one_dense_update_becomes_the_snapshot_bit_for_bit(local: Place) -> None:
    with local.serve(tiny_recipe(codec="dense")) as running:
        peer = running.peer()
        assignment = peer.lend()
        peer.deliver(assignment, seed=3)
        head = running.wait_for_version(0, 1)
        found = peer.snapshot(0, head)
        for name, sent in peer.tensors(0, 3).items():
            assert np.array_equal(found[name].view(np.uint32), sent.view(np.uint32)), name


def test_asking_twice_gives_the_same_assignment(running: Running) -> None:
    peer = running.peer()
    assert peer.lend().assignment_id == peer.lend().assignment_id


def test_a_worker_runs_one_round_ahead_and_no_further(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2)) as running:
        peer, slow = running.peer(), running.peer()
        first = peer.lend()
        slow.lend()
        ahead = peer.lend(after=first.assignment_id)
        assert (ahead.round, ahead.base_version, ahead.first_step) == (1, 0, 2)
        assert peer.lend(after=first.assignment_id).assignment_id == ahead.assignment_id
        peer.deliver(first)
        assert isinstance(peer.ask(after=ahead.assignment_id), Wait)
        with pytest.raises(Refused, match="wait until the round before it has closed") as refused:
            peer.commit(ahead, peer.payload(0, 1))
        assert refused.value.reason == "round_not_open"


def test_a_run_ahead_counts_once_it_is_rebased(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1)) as running:
        peer = running.peer()
        first = peer.lend()
        ahead = peer.lend(after=first.assignment_id)
        peer.deliver(first)
        head = running.wait_for_version(0, 1)
        assert peer.deliver(ahead, seed=1, base_hash=head).outcome == Outcome.ACCEPTED
        running.wait_for_version(0, 2)


def test_committing_again_is_safe_and_tells_the_verdict(running: Running) -> None:
    peer = running.peer()
    assignment, payload = peer.lend(), peer.payload(0)
    first = peer.commit(assignment, payload)
    assert first.verdict is None
    assert peer.commit(assignment, payload) == first
    verdict = peer.reveal(first, payload)
    again = peer.commit(assignment, payload)
    assert again.verdict is not None
    assert again.verdict.receipt == verdict.receipt
    assert peer.put(payload).receipt == verdict.receipt


def test_a_second_payload_for_the_same_round_is_refused(running: Running) -> None:
    peer = running.peer()
    assignment = peer.lend()
    peer.commit(assignment, peer.payload(0, 1))
    with pytest.raises(Refused) as refused:
        peer.commit(assignment, peer.payload(0, 2))
    assert (refused.value.status, refused.value.reason) == (409, "already_committed")


def test_a_payload_that_was_not_committed_is_refused(running: Running) -> None:
    peer = running.peer()
    peer.lend()
    with pytest.raises(Refused) as refused:
        peer.put(peer.payload(0))
    assert refused.value.reason == "not_committed"


def test_another_workers_assignment_is_refused(running: Running) -> None:
    peer, other = running.peer(), running.peer()
    assignment = peer.lend()
    for attempt in (
        lambda: other.commit(assignment, other.payload(0)),
        lambda: other.heartbeat(assignment),
        lambda: other.hand_back(assignment),
    ):
        with pytest.raises(Refused) as refused:
            attempt()
        assert (refused.value.status, refused.value.reason) == (403, "not_yours")


def test_a_base_that_is_no_snapshot_of_the_block_is_refused(running: Running) -> None:
    peer = running.peer()
    assignment = peer.lend()
    for base in ("00" * 32, peer.run.blocks[1].initial_hash):
        with pytest.raises(Refused) as refused:
            peer.commit(assignment, peer.payload(0), base)
        assert refused.value.reason == "unknown_base"


@pytest.mark.parametrize("change", [-1, 1, 116])
def test_a_payload_of_the_wrong_length_is_refused_at_commit_and_at_reveal(
    running: Running, change: int
) -> None:
    peer = running.peer()
    assignment, payload = peer.lend(), peer.payload(0)
    wrong = payload[:change] if change < 0 else payload + bytes(change)
    with pytest.raises(Refused, match=f"exactly {len(payload)} bytes, found {len(wrong)}"):
        peer.commit(assignment, wrong)
    peer.commit(assignment, payload)
    response = peer.send("PUT", f"/v1/updates/{content_hash(payload)}", wrong)
    assert (response.status_code, response.json()["error"]["reason"]) in [
        (400, "wrong_length"),
        (413, "too_large"),
    ]


def test_other_bytes_than_those_committed_are_refused_and_the_right_ones_count(
    running: Running,
) -> None:
    peer = running.peer()
    assignment, payload = peer.lend(), peer.payload(0, 1)
    peer.commit(assignment, payload)
    other = peer.payload(0, 2)
    response = peer.send("PUT", f"/v1/updates/{content_hash(payload)}", other)
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "hash_mismatch")
    assert peer.put(payload).outcome == Outcome.ACCEPTED


def test_a_frame_that_breaks_the_layout_gets_a_verdict_and_no_merge(running: Running) -> None:
    peer = running.peer()
    assignment = peer.lend()
    payload = b"\xff" * peer.run.blocks[0].payload_bytes
    verdict = peer.reveal(peer.commit(assignment, payload), payload)
    assert verdict.outcome == Outcome.REFUSED
    assert verdict.reason in (VerdictReason.MALFORMED, VerdictReason.NOT_FINITE)
    assert peer.block(0).round.accepted == 0
    again = peer.lend()
    assert again.round == assignment.round
    assert peer.deliver(again).outcome == Outcome.ACCEPTED


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_a_late_update_is_carried_at_a_decayed_weight_and_stays_late(local: Place, weight: float) -> None:
    recipe = tiny_recipe(blocks=1, replicas=2, rounds=9, max_age=2, age_decay=weight)
    with local.serve(recipe) as running:
        fast, slow = running.peer(), running.peer()
        stale = slow.lend()
        fast.deliver(fast.lend(), seed=1)
        running.advance(1000)
        running.wait_for_version(0, 1)
        verdict = slow.deliver(stale, seed=2)
        assert (verdict.outcome, verdict.weight, verdict.head_version) == (Outcome.LATE, weight, 1)
        assert slow.block(0).round.late == 1
        fast.deliver(fast.lend(), seed=3)
        running.advance(1000)
        running.wait_for_version(0, 2)
        merged = fast.merges(0, since=1).merges[0].inputs
        assert sorted(one.weight for one in merged) == [weight, 1.0]
        assert check_ledger(fast) == 2
        again = slow.commit(stale, slow.payload(0, seed=2)).verdict
        assert again is not None
        assert again.outcome == Outcome.LATE
        report = running.coordinator.status().reports[-1]
        assert (report.on_time, report.late) == (1, 1)
        assert running.coordinator.status().ages == {"0": 2, "1": 1}


def test_an_update_that_is_too_old_is_refused_with_the_head_in_the_answer(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2, rounds=9, max_age=1)) as running:
        fast, slow = running.peer(), running.peer()
        stale = slow.lend()
        for round_ in range(2):
            fast.deliver(fast.lend(), seed=round_)
            running.advance(1000)
            head = running.wait_for_version(0, round_ + 1)
        assert slow.heartbeat(stale).cancel
        verdict = slow.deliver(stale, seed=7)
        assert (verdict.outcome, verdict.reason) == (Outcome.REFUSED, VerdictReason.TOO_OLD)
        assert (verdict.head_version, verdict.head_hash) == (2, head)


def test_the_policy_drop_refuses_what_is_late(local: Place) -> None:
    recipe = tiny_recipe(blocks=1, replicas=2, rounds=9, policy="drop", drop_deadline_seconds=10)
    with local.serve(recipe) as running:
        fast, slow = running.peer(), running.peer()
        stale = slow.lend()
        fast.deliver(fast.lend())
        assert fast.block(0).round.deadline == running.clock.now + 10
        running.advance(10)
        running.wait_for_version(0, 1)
        assert slow.deliver(stale, seed=2).reason == VerdictReason.DROPPED


def test_late_dense_updates_are_measured_from_their_own_base(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2, rounds=9, codec="dense")) as running:
        fast, slow = running.peer(), running.peer()
        stale = slow.lend()
        fast.deliver(fast.lend(), seed=1)
        running.advance(1000)
        running.wait_for_version(0, 1)
        slow.deliver(stale, seed=2)
        fast.deliver(fast.lend(), seed=3)
        running.advance(1000)
        running.wait_for_version(0, 2)
        assert check_ledger(fast) == 2


def test_a_deadline_with_nothing_to_merge_is_set_again(running: Running) -> None:
    peer = running.peer()
    peer.lend()
    first = peer.block(0).round.deadline
    assert first is not None
    running.advance(first - running.clock.now + 1)
    second = peer.block(0)
    assert second.head_version == 0
    assert second.round.deadline is not None
    assert second.round.deadline > running.clock.now
    assert "re-set" in second.round.deadline_reason


def test_a_worker_that_lost_its_payload_may_do_the_round_again(running: Running) -> None:
    peer = running.peer()
    lost = peer.lend()
    peer.commit(lost, peer.payload(0, 1))
    again = peer.lend()
    assert (again.block, again.round, again.shard) == (lost.block, lost.round, lost.shard)
    assert again.assignment_id != lost.assignment_id
    assert peer.deliver(again, seed=2).outcome == Outcome.ACCEPTED
    with pytest.raises(Refused):
        peer.put(peer.payload(0, 1))


def test_handing_back_frees_the_seat_and_the_shard(running: Running) -> None:
    peer = running.peer()
    first = peer.lend()
    assert peer.block(0).round.workers == 1
    assert peer.hand_back(first)
    assert not peer.hand_back(first)
    assert peer.block(0).round.workers == 0
    with pytest.raises(Refused) as refused:
        peer.commit(first, peer.payload(0))
    assert refused.value.reason == "lease_returned"
    assert peer.lend().shard == first.shard


def test_a_worker_not_heard_of_is_not_waited_for(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=1)) as running:
        alive, dead = running.peer(), running.peer()
        dead.lend()
        assignment = alive.lend()
        alive.deliver(assignment)
        assert alive.block(0).round.wanted == 2
        running.advance(running.coordinator.resources.run.swarm.lease_seconds + 1)
        running.wait_for_version(0, 1)


def test_a_worker_with_other_text_may_not_join(running: Running) -> None:
    with pytest.raises(Refused, match="expected text with sha256") as refused:
        running.peer(join=False).join(corpus_sha256="cd" * 32)
    assert (refused.value.status, refused.value.reason) == (409, "corpus_mismatch")


def test_a_key_that_has_not_joined_gets_no_work(running: Running) -> None:
    with pytest.raises(Refused) as refused:
        running.peer(join=False).ask()
    assert (refused.value.status, refused.value.reason) == (403, "not_joined")


def test_payloads_are_secret_until_they_are_merged(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2)) as running:
        peer = running.peer()
        payload = peer.payload(0)
        peer.deliver(peer.lend(), seed=0)
        with pytest.raises(Refused) as refused:
            peer.get(f"/v1/updates/{content_hash(payload)}")
        assert refused.value.status == 404
