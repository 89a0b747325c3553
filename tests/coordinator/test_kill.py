"""`kill -9` of the real coordinator process at each step of an update's life.

Afterwards the run goes on, the ledger verifies, and what was acknowledged is merged exactly once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from blocktrain.coordinator.main import main
from blocktrain.coordinator.service import KEY_FILE
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, Outcome
from tests.coordinator.peer import Peer, Refused
from tests.coordinator.test_life_of_an_update import check_ledger
from tests.coordinator.test_requests import head

RECIPE = """
name = "tiny"
model = { width = 16, heads = 2, blocks = 1, layers_per_block = 1, context = 16, condition_width = 4 }
training = { batch = 2 }
swarm = { steps_per_round = 2, rounds = 500, replicas = 1, codec = "sparse:4", lease_seconds = 5.0 }
"""


processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["blocktrain.coordinator.main"])


def run_program(folder: Path, ready: Connection, arguments: tuple[str, ...]) -> None:
    """In a process of its own, forked from one that has already imported torch: ten starts in seconds."""
    os.chdir(folder)
    os.dup2(ready.fileno(), 1)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
        main(arguments)


class Program:
    """The coordinator as a process of its own, on one port through all its lives."""

    def __init__(self, folder: Path, database: str = "", blobs: str = "") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("a train of thought " * 500)
        (folder / "recipe.toml").write_text(f'{RECIPE}\ndata = {{ corpus = "{folder}/text.txt" }}\n')
        self._folder, self._places, self._port = folder, (database, blobs), 0
        self.start()

    def start(self) -> None:
        arguments = ("recipe.toml", "data", str(self._port), *self._places)
        ready, child_end = processes.Pipe(duplex=False)
        self.process = processes.Process(target=run_program, args=(self._folder, child_end, arguments))
        self.process.start()
        child_end.close()
        with open(ready.fileno(), closefd=False) as lines:
            line = lines.readline()
        assert line.startswith("coordinator ready url="), (self._folder / "log").read_text()
        self.url = line.strip().removeprefix("coordinator ready url=")
        self._port = urlsplit(self.url).port or 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def program(*arguments: object) -> Iterator[Program]:
    running = Program(*arguments)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.kill()


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
    with program(tmp_path) as coordinator:
        peer = Peer(coordinator.url, time.time)
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
    with program(tmp_path) as coordinator:
        peer = Peer(coordinator.url, time.time)
        peer.join()
        peer.deliver(peer.lend())
        with httpx2.stream("GET", f"{coordinator.url}/v1/events?since=0", timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            coordinator.process.terminate()
            for _ in lines:
                pass
        coordinator.process.join(15)
        assert coordinator.process.exitcode in (0, -signal.SIGTERM)
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


def all_merges(peer: Peer) -> list:
    found: list = []
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
            stop, acknowledged = threading.Event(), set()
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
            while (open_ := peer.block(0)).round.accepted + open_.round.late:
                wait_for_head(peer, open_.head_version + 1)
            check_all_merged(peer, acknowledged)
            assert len(acknowledged) > 10
