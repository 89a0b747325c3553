"""Two coordinators on one PostgreSQL serve one run: every update merged once, one chain, one head."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from blocktrain.coordinator.operator_notes import KEY_FILE
from blocktrain.wire.messages import Assignment, Finished
from tests.cli.program import run_main
from tests.coordinator.conftest import Clock, served, tiny_recipe
from tests.coordinator.peer import Peer
from tests.coordinator.test_life_of_an_update import check_ledger


def work(peer: Peer, other_url: str) -> None:
    """A worker that talks to one coordinator and then the other, as behind a balancer, until the end."""
    peer.join()
    urls, seed = [peer.url, other_url], int(peer.identity.worker_id[:6], 16)
    while not isinstance(answer := peer.ask(), Finished):
        urls.reverse()
        peer.url = urls[0]
        if isinstance(answer, Assignment):
            seed += 1
            base = peer.block(answer.block)
            if base.head_version >= answer.round:
                peer.deliver(answer, seed, base.head_hash)


def test_two_coordinators_serve_one_run(tmp_path: Path, postgres_url: str) -> None:
    recipe, clock = tiny_recipe(rounds=4, replicas=2, policy="carry", min_deadline_seconds=0.2), Clock()
    shared = str(tmp_path / "blobs")
    with served(tmp_path / "one", recipe, clock, postgres_url, shared) as one:
        (tmp_path / "two").mkdir()
        shutil.copy(tmp_path / "one" / KEY_FILE, tmp_path / "two" / KEY_FILE)
        with served(tmp_path / "two", recipe, clock, postgres_url, shared) as two:
            peers = [one.peer(join=False), two.peer(join=False), one.peer(join=False), two.peer(join=False)]
            others = [two.url, one.url, two.url, one.url]
            threads = [threading.Thread(target=work, args=pair) for pair in zip(peers, others, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.05)
                    clock.now += 0.05
            assert one.coordinator.status().blocks == two.coordinator.status().blocks
            assert one.coordinator.status().finished
            assert check_ledger(peers[1]) == 8
            merged = [
                given.update_id
                for block in range(2)
                for merge in peers[0].merges(block).merges
                for given in merge.inputs
            ]
            assert len(merged) == len(set(merged)) >= 8


def test_the_ledger_of_a_run_in_postgresql_is_verified_by_its_address(
    tmp_path: Path, postgres_url: str
) -> None:
    with served(tmp_path, tiny_recipe(blocks=1), database_url=postgres_url) as running:
        peer = running.peer()
        peer.deliver(peer.lend())
        running.wait_for_version(0, 1)
        verified = run_main("ledger", "verify", running.url)
        assert (verified.code, "1 merges replayed" in verified.out) == (0, True), verified.out
        folder = run_main("ledger", "verify", tmp_path)
    assert folder.code == 2
    assert "where the run is kept by --database, give the coordinator's address instead" in folder.complaint
