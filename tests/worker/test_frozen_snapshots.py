"""Snapshots that an assignment names: by deltas where cheaper, checked, and given up where they are gone."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.client.traffic import Traffic
from blocktrain.config import ObjectiveConfig, Recipe
from blocktrain.coordinator.storage.blobs import payload_key, snapshot_key
from blocktrain.errors import WireError
from blocktrain.threads import Threads
from blocktrain.training.setup import Setup
from blocktrain.wire.hashing import snapshot_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import Assignment, FrozenSnapshot, JoinRequest
from blocktrain.worker.asking import Asking, FrozenSnapshots
from blocktrain.worker.block_progress import PendingUpdate
from blocktrain.worker.joining import Membership
from blocktrain.worker.live_view import PlainView
from blocktrain.worker.logic import WorkerLogic
from blocktrain.worker.state import StateFolder
from blocktrain.worker.watching import Watching
from tests.coordinator.conftest import CORPUS, Clock, Running, served, tiny_recipe
from tests.coordinator.peer import Peer, an_assignment
from tests.waiting import PATIENCE_SECONDS

RECIPE: Recipe = replace(
    tiny_recipe(rounds=40, max_lead=40, codec="sparse:4"), objective=ObjectiveConfig(kind="chain")
)


class WallClock(Clock):
    """For clients that sign by this machine's clock."""

    def __call__(self) -> float:
        return time.time()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with served(tmp_path / "coordinator", RECIPE, WallClock()) as found:
        yield found


class Bench:
    """A worker's parts that bring snapshots, without a trainer."""

    def __init__(self, running: Running, folder: Path, identity: Identity | None = None) -> None:
        self.lines: list[str] = []
        self.said = io.StringIO()
        self.traffic, self.stop = Traffic(), threading.Event()
        identity = identity or Identity.generate()
        self.client = CoordinatorClient(
            running.url, identity, self.traffic, self.stop, self.lines.append, attempts=2
        )
        running.clients.enter_context(self.client)
        run = self.client.run()
        self.client.audience = run.run_id
        layouts = [Layout.of(layout) for layout in run.blocks]
        cache = BlobCache(folder / "cache", 1 << 30)
        self.snapshots = Snapshots(self.client, cache, Setup.of(RECIPE), layouts, self.lines.append)
        self.state = StateFolder(folder, self.lines.append, cache)
        self.view = PlainView(identity.worker_id, self.traffic, self.said)
        self.logic, self.threads = WorkerLogic(RECIPE.swarm, self.stop), Threads(self.stop)
        worker_id = identity.worker_id
        self.watching = Watching(self.logic, self.threads, worker_id, self.snapshots, self.state, self.view)
        self.frozen = FrozenSnapshots(self.watching.keeper, self.logic)

    def asking(self, frozen: FrozenSnapshots | None = None) -> Asking:
        request = JoinRequest(corpus_sha256=CORPUS.sha256)
        membership = Membership(self.client, request, self.state, self.view)
        return Asking(self.logic, self.client, membership, self.watching, frozen or self.frozen, self.view)

    def next_update(self) -> PendingUpdate:
        """The first assignment that is ready to begin; then the worker stops."""
        assert self.logic.wait(lambda: self.logic.next is not None, PATIENCE_SECONDS)
        update = self.logic.next
        self.stop.set()
        self.threads.join(PATIENCE_SECONDS)
        self.threads.check()
        assert update is not None
        return update

    def bring(self, *named: FrozenSnapshot) -> Base:
        return self.frozen.bring(naming(*named))[0]

    def bring_head(self, running: Running) -> dict[str, int]:
        """Bring the head of block 0; bytes that came down for it, by kind."""
        before = self.traffic.bytes_of("down")
        named = head(running)
        base = self.bring(named)
        assert (base.version, base.hash) == (named.version, named.hash)
        assert snapshot_hash(base.weights) == named.hash
        return {kind: count - before[kind] for kind, count in self.traffic.bytes_of("down").items()}


def naming(*named: FrozenSnapshot) -> Assignment:
    """An assignment of block 1 that names these."""
    return an_assignment(block=1, shard=1, steps=2, total_steps=80, frozen=named)


def head(running: Running) -> FrozenSnapshot:
    answer = running.coordinator.reports.block(0)
    return FrozenSnapshot(block=0, version=answer.head_version, hash=answer.head_hash)


def advance(running: Running, peer: Peer, version: int) -> None:
    """Let `peer`, which sits on block 0, deliver until it has this version."""
    while (now := running.coordinator.reports.block(0).head_version) < version:
        assignment = peer.lend(prefer_block=0)
        assert (assignment.block, assignment.round) == (0, now)
        peer.deliver(assignment, seed=now)
        running.wait_for_version(0, now + 1)


def test_the_second_time_costs_payloads_and_not_the_snapshot(running: Running, tmp_path: Path) -> None:
    trainer = running.peer()
    advance(running, trainer, 20)
    bench = Bench(running, tmp_path / "worker")
    first = bench.bring_head(running)
    size, payload = 4 * bench.snapshots.layouts[0].schema.num_values, trainer.run.blocks[0].payload_bytes
    assert first["snapshot"] > size
    assert first["payload"] == 0

    advance(running, trainer, 21)
    second = bench.bring_head(running)
    assert second["snapshot"] == 0
    assert payload <= second["payload"] < payload + 2000, "one payload and its headers"

    assert sum(bench.bring_head(running).values()) == 0, "what is held is not asked for"

    advance(running, trainer, 22)
    restarted = Bench(running, tmp_path / "worker")
    third = restarted.bring_head(running)
    assert third["snapshot"] == 0, "a restarted worker goes on from what it had written down"
    assert third["payload"] < 3 * (payload + 2000)


def test_a_snapshot_older_than_what_is_here_is_brought_too(running: Running, tmp_path: Path) -> None:
    trainer = running.peer()
    advance(running, trainer, 1)
    old = head(running)
    advance(running, trainer, 2)
    bench = Bench(running, tmp_path / "worker")
    bench.bring_head(running)
    assert bench.bring(old).hash == old.hash


def test_two_threads_that_want_the_same_snapshot_download_it_once(running: Running, tmp_path: Path) -> None:
    """The watcher of a block, and the thread that brings it as a frozen one."""
    advance(running, running.peer(), 20)
    bench, named = Bench(running, tmp_path / "worker"), head(running)
    with ThreadPoolExecutor(4) as threads:
        bases = list(
            threads.map(lambda _: bench.snapshots.named(0, named.version, named.hash, None), range(8))
        )
    assert {snapshot_hash(base.weights) for base in bases} == {named.hash}
    size = 4 * bench.snapshots.layouts[0].schema.num_values
    assert size < bench.traffic.bytes_of("down")["snapshot"] < 2 * size


def test_two_threads_may_keep_the_same_blob(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, 1 << 30)
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda _: cache.put("name", bytes(1 << 16)), range(64)))
    assert {path.read_bytes() for path in paths} == {bytes(1 << 16)}
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_other_blocks_than_the_objective_needs_are_refused(running: Running, tmp_path: Path) -> None:
    bench = Bench(running, tmp_path / "worker")
    foreign = head(running).model_copy(update={"block": 4000})
    for named in ((), (foreign,), (head(running), head(running))):
        with pytest.raises(WireError, match=r"needs blocks \[0\] frozen, the coordinator names"):
            bench.bring(*named)


def test_the_lease_lives_while_its_snapshots_are_coming(running: Running, tmp_path: Path) -> None:
    worker = running.peer()
    bench = Bench(running, tmp_path / "worker", worker.identity)
    beaten, seen = threading.Event(), threading.Event()

    class Slow(FrozenSnapshots):
        def bring(self, assignment: Assignment) -> dict[int, Base]:
            seen.set()
            assert beaten.wait(PATIENCE_SECONDS)
            return {}

    asking = bench.asking(Slow(bench.watching.keeper, bench.logic))
    bench.threads.start("asking", asking.run)
    assert seen.wait(PATIENCE_SECONDS)
    before = time.time()
    bench.threads.start("heartbeats", asking.run_heartbeats)
    while last_seen(running, worker.identity.worker_id) <= before:
        assert not bench.stop.wait(0.01)
        assert time.time() < before + 10, "no heartbeat came"
    beaten.set()
    bench.next_update()


def last_seen(running: Running, worker_id: str) -> float:
    [found] = [one for one in running.coordinator.workers.workers().workers if one.worker_id == worker_id]
    return found.last_seen


def prune(running: Running, version: int) -> None:
    """As an operator short of disk space would: the snapshot, and the payloads that lead to it."""
    merges = running.peers[0].merges(0).merges
    blobs = running.coordinator.resources.blobs
    blobs.delete(snapshot_key(merges[version - 1].result_hash))
    for one in merges[version - 1].inputs:
        blobs.delete(payload_key(one.payload_hash))
    running.coordinator.resources.weights.forget(0, merges[version - 1].result_hash)


def leased_to(running: Running, trainer: Peer) -> tuple[Peer, Assignment]:
    """A lease on block 1 that names version 1 of block 0, which then moves on to version 2."""
    advance(running, trainer, 1)
    worker = running.peer()
    assignment = worker.lend(prefer_block=1)
    assert [(one.block, one.version) for one in assignment.frozen] == [(0, 1)]
    advance(running, trainer, 2)
    return worker, assignment


def test_a_named_snapshot_that_is_gone_gives_the_lease_back_and_another_is_lent(
    running: Running, tmp_path: Path
) -> None:
    worker, stale = leased_to(running, running.peer())
    prune(running, 1)
    bench = Bench(running, tmp_path / "worker", worker.identity)
    bench.threads.start("asking", bench.asking().run)
    update = bench.next_update()
    assert update.assignment_id != stale.assignment_id
    assert {block: base.hash for block, base in update.frozen.items()} == {0: head(running).hash}
    [declined] = [line for line in bench.said.getvalue().splitlines() if " declined " in line]
    assert "needs block 0 version 1" in declined
    assert "no longer in the blob store" in declined


def test_heads_that_nobody_has_end_the_worker_in_words(running: Running, tmp_path: Path) -> None:
    worker, _ = leased_to(running, running.peer())
    prune(running, 1)
    prune(running, 2)
    bench = Bench(running, tmp_path / "worker", worker.identity)
    with pytest.raises(WireError, match="ask the operator to restore the snapshots"):
        bench.asking().run()
    bench.stop.set()
    bench.threads.join(PATIENCE_SECONDS)
