"""Workers come and go freely: replicas follow within a round, and an empty run waits."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import select

from blocktrain.coordinator.storage.store import AssignmentRow, UpdateRow
from blocktrain.wire.messages import LedgerAnswer, Outcome
from tests.coordinator.conftest import Place, Running, tiny_recipe
from tests.coordinator.peer import Peer


def one_round(running: Running, peers: list[Peer], seed: int) -> Counter[int]:
    """Every worker asks and delivers once; how many went to each block."""
    lent = [(peer, peer.lend()) for peer in peers]
    for number, (peer, assignment) in enumerate(lent):
        peer.deliver(assignment, 100 * seed + number)
    for _, assignment in lent:
        running.wait_for_version(assignment.block, assignment.round + 1)
    return Counter(assignment.block for _, assignment in lent)


def test_a_worker_that_leaves_is_replaced_within_one_round(local: Place) -> None:
    with local.serve(tiny_recipe(replicas=2, rounds=50)) as running:
        peers = [running.peer() for _ in range(4)]
        assert one_round(running, peers, 1) == {0: 2, 1: 2}
        block_of = {peer.identity.worker_id: peer.lend() for peer in peers}
        leaving = [peer for peer in peers if block_of[peer.identity.worker_id].block == 0]
        for peer in leaving:
            peer.hand_back(block_of[peer.identity.worker_id])
        staying = [peer for peer in peers if peer not in leaving]
        for number, peer in enumerate(staying):
            peer.deliver(block_of[peer.identity.worker_id], 900 + number)
        running.wait_for_version(1, 2)
        assert {peer.lend().block for peer in staying} == {0, 1}


def test_a_worker_that_dies_is_replaced_after_its_lease(local: Place) -> None:
    with local.serve(tiny_recipe(replicas=1, rounds=50)) as running:
        peers = [running.peer() for _ in range(4)]
        lent = {peer: peer.lend() for peer in peers}
        dead = [peer for peer in peers if lent[peer].block == 0]
        alive = [peer for peer in peers if peer not in dead]
        running.advance(running.coordinator.resources.run.swarm.lease_seconds + 1)
        for number, peer in enumerate(alive):
            peer.deliver(lent[peer], number)
        running.wait_for_version(1, 1)
        assert {peer.lend().block for peer in alive} == {0, 1}


def test_a_worker_that_joins_late_has_an_accepted_update_in_its_first_round(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, rounds=60)) as running:
        first = running.peer()
        for round_ in range(8):
            first.deliver(first.lend(), round_)
            running.wait_for_version(0, round_ + 1)
        newcomer = running.peer()
        assignment = newcomer.lend()
        assert (assignment.round, assignment.first_step) == (8, 16)
        newcomer.snapshot(0, assignment.base_hash)
        assert newcomer.deliver(assignment, 99).outcome == Outcome.ACCEPTED


def test_a_worker_left_alone_stands_in_for_the_one_that_is_away(place: Place) -> None:
    recipe = tiny_recipe(blocks=1, replicas=2, rounds=50, steps_per_round=10, lease_seconds=5)
    with place.serve(recipe) as running:
        quick, slow = running.peer(), running.peer()
        for round_ in range(4):
            lent = quick.lend(), slow.lend()
            assert [one.stand_in for one in lent] == [None, None]
            running.advance(4.0)
            quick.deliver(lent[0], 2 * round_)
            running.advance(4.0)
            slow.deliver(lent[1], 2 * round_ + 1)
            running.wait_for_version(0, round_ + 1)
        running.advance(6.0)
        alone = quick.lend()
        assert alone.stand_in is not None
        assert alone.steps == 10 + alone.stand_in.steps
        assert 0 < alone.stand_in.steps <= 10
        back = slow.lend()
        assert back.stand_in is None
        assert len({alone.shard, alone.stand_in.shard, back.shard}) == 3
        assert quick.lend().stand_in == alone.stand_in
        entry = LedgerAnswer.model_validate_json(quick.get("/v1/ledger?since=0").content).entries[-2]
        assert entry.body["stand_in"] == alone.stand_in.model_dump()
        assert quick.deliver(alone, 90).outcome == Outcome.ACCEPTED


def test_without_workers_the_run_waits_and_goes_on_with_the_next_one(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1)) as running:
        gone = running.peer()
        gone.deliver(gone.lend())
        running.wait_for_version(0, 1)
        gone.lend()
        running.advance(100_000)
        comer = running.peer()
        assignment = comer.lend()
        assert (assignment.round, assignment.base_version) == (1, 1)
        state = comer.block(0).round
        assert (state.begun, state.workers) == (running.clock.now, 1)
        assert comer.deliver(assignment, 5).outcome == Outcome.ACCEPTED
        running.wait_for_version(0, 2)


def test_a_worker_that_was_away_is_not_sent_to_a_snapshot_on_which_it_has_voted(place: Place) -> None:
    with place.serve(tiny_recipe(blocks=1, replicas=2, rounds=50, min_deadline_seconds=1)) as running:
        steady, sleeper = running.peer(), running.peer()
        old = sleeper.lend()
        for round_ in range(2):
            steady.deliver(steady.lend(), round_)
            running.advance(1000)
            head = running.wait_for_version(0, round_ + 1)
        # As a worker does that wakes up: its round's work, formed against the newest snapshot.
        assert sleeper.deliver(old, 7, base_hash=head).outcome == Outcome.ACCEPTED
        following = sleeper.lend(after=old.assignment_id)
        assert following.round == 3, "a commit for round 2 would be refused: already_committed"
        steady.deliver(steady.lend(), 8)
        head = running.wait_for_version(0, 3)
        assert sleeper.deliver(following, 9, base_hash=head).outcome == Outcome.ACCEPTED


def states(running: Running, peer: Peer) -> list[str]:
    """Of the worker's assignments, oldest first."""
    of_worker = AssignmentRow.worker_id == peer.identity.worker_id
    with running.coordinator.resources.store.read() as session:
        return list(
            session.scalars(select(AssignmentRow.state).where(of_worker).order_by(AssignmentRow.round))
        )


def test_no_lease_stays_open_after_its_round_has_passed(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2, rounds=50, max_age=1)) as running:
        steady, sleeper, restarted = running.peer(), running.peer(), running.peer()
        late, lost = sleeper.lend(), restarted.lend()
        for round_ in range(2):
            steady.deliver(steady.lend(), round_)
            running.advance(1000)
            running.wait_for_version(0, round_ + 1)
        assert sleeper.heartbeat(late).cancel
        assert sleeper.hand_back(late)
        assert restarted.lend().round == 2
        assert states(running, sleeper) == ["recalled"], "not given up: ten of those cost a bad mark"
        assert (lost.round, states(running, restarted)) == (0, ["recalled", "leased"])


def test_the_wait_before_a_second_try_does_not_make_rounds_longer(local: Place) -> None:
    with local.serve(tiny_recipe(blocks=1, replicas=2, stand_in=0.0)) as running:
        peer = running.peer()
        first = peer.lend()
        running.advance(5.0)
        broken = b"\xff" * peer.run.blocks[0].payload_bytes
        assert peer.reveal(peer.commit(first, broken), broken).outcome == Outcome.REFUSED
        running.advance(100.0)
        second = peer.lend()
        running.advance(5.0)
        assert peer.deliver(second, 1).outcome == Outcome.ACCEPTED
        with running.coordinator.resources.store.read() as session:
            offsets = session.scalars(select(UpdateRow.offset).order_by(UpdateRow.revealed)).all()
        assert offsets == [5.0, 5.0]
