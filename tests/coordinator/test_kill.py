"""`kill -9` of the real coordinator process at each step of an update's life.

Afterwards the run goes on, the ledger verifies, and what was acknowledged is merged exactly once.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from blocktrain.coordinator.service import KEY_FILE
from blocktrain.judge.ledger_check import verify_place
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, MergeRecord, Outcome
from tests.coordinator.peer import Peer, Refused
from tests.coordinator.program import program
from tests.coordinator.test_life_of_an_update import check_ledger
from tests.coordinator.test_requests import head


def send_part(peer: Peer, payload: bytes, num_bytes: int) -> socket.socket:
    """Begin an upload, and leave it there."""
    path, address = f"/v1/updates/{content_hash(payload)}", urlsplit(peer.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=10)
    connection.sendall(head("PUT", path, peer.headers("PUT", path, payload)) + payload[:num_bytes])
    return connection


def wait_for_head(peer: Peer, version: int) -> None:
    """The event stream tells, so nothing has to sleep."""
    with httpx2.stream("GET", f"{peer.url}/v1/events?since=0", timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                entry = json.loads(line.removeprefix("data: "))
                if entry["kind"] == "snapshot" and entry["body"]["version"] >= version:
                    return


def steps(peer: Peer, payload: bytes) -> list[tuple[str, Callable[[], object]]]:
    """An update's life up to its merge; each step may be repeated."""

    def in_flight(num_bytes: int) -> None:
        with send_part(peer, payload, num_bytes):
            pass

    return [
        ("joined", peer.join),
        ("assigned", peer.lend),
        ("committed", lambda: peer.commit(peer.lend(), payload)),
        ("half revealed", lambda: in_flight(len(payload) // 2)),
        ("wholly revealed, no answer read", lambda: in_flight(len(payload))),
        ("judged", lambda: peer.put(payload)),
        ("merged", lambda: wait_for_head(peer, 1)),
    ]


def test_kill_nine_at_each_step_loses_nothing_and_merges_once(tmp_path: Path) -> None:
    with program(tmp_path) as coordinator, closing(Peer(coordinator.url, time.time)) as peer:
        payload = peer.payload(0)
        for _, step in steps(peer, payload):
            step()
            coordinator.restart()
        merges = peer.merges(0).merges
        assert [[one.payload_hash for one in merge.inputs] for merge in merges] == [[content_hash(payload)]]
        verdict = peer.deliver(peer.lend(), seed=1)
        assert verdict.outcome == Outcome.ACCEPTED
        wait_for_head(peer, 2)
        assert check_ledger(peer) == 2


def test_sigterm_drains_and_exits(tmp_path: Path) -> None:
    with program(tmp_path) as coordinator, closing(Peer(coordinator.url, time.time)) as peer:
        peer.join()
        peer.deliver(peer.lend())
        with httpx2.stream("GET", f"{coordinator.url}/v1/events?since=0", timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            coordinator.process.terminate()
            for _ in lines:
                pass
        coordinator.process.join(15)
        assert coordinator.process.exitcode == 0
        coordinator.start()
        assert check_ledger(peer) <= 1


def keep_working(peers: list[Peer], stop: threading.Event, acknowledged: set[str]) -> None:
    """One worker over several coordinators: whatever fails is tried again, as a real worker does."""
    identity, seed = peers[0].identity, 0
    while not stop.is_set():
        seed += 1
        peer = peers[seed % len(peers)]
        peer.identity = identity
        with suppress(httpx2.HTTPError, Refused):
            answer, base = peer.ask(), peer.block(0)
            if isinstance(answer, Assignment) and base.head_version >= answer.round:
                verdict = peer.deliver(answer, seed, base.head_hash)
                if verdict.outcome != Outcome.REFUSED:
                    acknowledged.add(verdict.update_id)


def check_all_merged(peer: Peer, acknowledged: set[str]) -> None:
    merged = [one.update_id for merge in all_merges(peer) for one in merge.inputs]
    assert len(merged) == len(set(merged))
    assert acknowledged <= set(merged)


def all_merges(peer: Peer) -> list[MergeRecord]:
    found: list[MergeRecord] = []
    while page := peer.merges(0, since=len(found)).merges:
        found += page
    return found


@pytest.mark.slow
def test_kill_nine_at_random_moments_with_two_processes_on_postgresql(
    tmp_path: Path, postgres_url: str
) -> None:
    shared = str(tmp_path / "blobs")
    with program(tmp_path / "one", postgres_url, shared) as one:
        (tmp_path / "two" / "data").mkdir(parents=True)
        shutil.copy(tmp_path / "one" / "data" / KEY_FILE, tmp_path / "two" / "data" / KEY_FILE)
        with program(tmp_path / "two", postgres_url, shared) as two:
            stop = threading.Event()
            acknowledged: set[str] = set()
            workers = [[Peer(one.url, time.time), Peer(two.url, time.time)] for _ in range(3)]
            for peers in workers:
                peers[0].join()
            threads = [
                threading.Thread(target=keep_working, args=(peers, stop, acknowledged)) for peers in workers
            ]
            for thread in threads:
                thread.start()
            for _ in range(10):
                stop.wait(random.uniform(0.2, 2.0))
                random.choice([one, two]).restart()
            stop.set()
            for thread in threads:
                thread.join()
            peer = workers[0][0]
            while (open_ := peer.block(0)).round.merging or open_.round.accepted + open_.round.late:
                wait_for_head(peer, open_.head_version + 1)
            check_all_merged(peer, acknowledged)
            report = verify_place(one.url).report
            assert report.ok, report.reason
            assert len(acknowledged) > 10
