"""A worker lets go of what it will not deliver: no lease of its stays open behind it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from blocktrain.client.snapshots import Base
from blocktrain.coordinator.storage.store import AssignmentRow
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, JoinRequest
from blocktrain.worker.block_progress import BlockProgress, PendingState, PendingUpdate
from blocktrain.worker.joining import Membership
from blocktrain.worker.sending import Sending
from tests.coordinator.conftest import CORPUS, Running, served
from tests.coordinator.peer import Peer
from tests.waiting import PATIENCE_SECONDS, until
from tests.worker.test_frozen_snapshots import RECIPE, Bench, WallClock, advance


def state_of(running: Running, assignment: Assignment) -> str:
    named = AssignmentRow.assignment_id == assignment.assignment_id
    with running.coordinator.resources.store.read() as session:
        return session.scalars(select(AssignmentRow.state).where(named)).one()


def test_an_assignment_that_was_called_off_is_handed_back(tmp_path: Path) -> None:
    with served(tmp_path / "coordinator", RECIPE, WallClock()) as running:
        sleeper = running.peer()
        old = sleeper.lend(prefer_block=0)
        steady = running.peer()
        assert steady.lend(prefer_block=1).block == 1
        bench = Bench(running, tmp_path / "worker", sleeper.identity)
        update = bench.logic.lent(old)
        assert update is not None
        advance(running, running.peer(), old.round + RECIPE.swarm.max_age + 1)
        bench.threads.start("heartbeats", bench.asking().run_heartbeats)
        until("it is handed back", lambda: state_of(running, old) == "recalled")
        assert update.state is PendingState.GONE
        bench.stop.set()
        bench.threads.join(PATIENCE_SECONDS)


def formed(bench: Bench, peer: Peer, lease: Assignment, base_hash: str) -> PendingUpdate:
    update = PendingUpdate.of(lease)
    update.payload = peer.payload(lease.block)
    update.payload_hash = content_hash(update.payload)
    update.base, update.loss, update.state = Base(0, base_hash, {}), 2.0, PendingState.FORMED
    bench.snapshots.keep_payload(update.payload_hash, update.payload)
    return update


def sending_of(bench: Bench) -> Sending:
    membership = Membership(bench.client, JoinRequest(corpus_sha256=CORPUS.sha256), bench.state, bench.view)
    return Sending(bench.logic, bench.client, membership, bench.snapshots, bench.state, bench.view)


def test_an_update_that_a_pause_fell_on_is_told_and_counted_once(tmp_path: Path) -> None:
    """It was accepted and waits for its merge, so the next shift sends it again."""
    with served(tmp_path / "coordinator", RECIPE, WallClock()) as running:
        peer = running.peer()
        running.peer().lend(prefer_block=0)  # the round waits for this one
        lease = peer.lend(prefer_block=0)
        bench = Bench(running, tmp_path / "worker", peer.identity)
        update = formed(bench, peer, lease, lease.base_hash)
        progress = BlockProgress(
            bench.snapshots.layouts[0], Base(0, lease.base_hash, {}), None, RECIPE.swarm, pending=[update]
        )
        sending_of(bench)._deliver(progress, update)
        sending_of(bench).deliver_leftovers(0)
        assert bench.said.getvalue().count("outcome=accepted") == 1
        assert bench.view.given.verdicts == {"accepted": 1}


def test_an_assignment_whose_commit_is_refused_is_handed_back(tmp_path: Path) -> None:
    with served(tmp_path / "coordinator", RECIPE, WallClock()) as running:
        peer = running.peer()
        lease = peer.lend()
        bench = Bench(running, tmp_path / "worker", peer.identity)
        update = formed(bench, peer, lease, "ab" * 32)
        bench.state.save_feedback(lease.block, None, [update])
        sending_of(bench).deliver_leftovers(lease.block)
        assert "is no snapshot of block" in bench.said.getvalue()
        assert state_of(running, lease) == "returned"
        feedback, left = bench.state.load_feedback(lease.block)
        assert (feedback is not None, left) == (True, []), "the work itself is kept"
