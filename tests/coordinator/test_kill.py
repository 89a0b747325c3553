"""`kill -9` of the real coordinator process at each step of an update's life.

Afterwards the run goes on, the ledger verifies, and what was acknowledged is merged exactly once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import fleet
import httpx2
import pytest

from blocktrain.coordinator.operator_notes import KEY_FILE
from blocktrain.coordinator.storage.store import Store
from blocktrain.judge.ledger_check import verify_place
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Outcome
from tests.coordinator.peer import Peer
from tests.coordinator.program import Program, program
from tests.coordinator.test_life_of_an_update import check_ledger
from tests.coordinator.test_requests import head
from tests.waiting import until_async

UPDATES_BETWEEN_KILLS = 5


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


async def work_and_kill(
    workers: fleet.Fleet, programs: Sequence[Program], kills: int, every_seconds: float
) -> None:
    """Kill one process after the other, each when updates have come since the last kill, and start it
    again."""
    tally, wanted = workers.tally, UPDATES_BETWEEN_KILLS

    def enough() -> bool:
        return len(tally.acknowledged) >= wanted

    async def kill_in_turn() -> None:
        nonlocal wanted
        for number in range(kills):
            await asyncio.sleep(every_seconds)
            await until_async(enough)
            program = programs[number % len(programs)]
            program.kill()
            await asyncio.to_thread(program.start)
            wanted = len(tally.acknowledged) + UPDATES_BETWEEN_KILLS

    killing = asyncio.create_task(kill_in_turn())
    await workers.work(killing.done)
    if tally.errors:
        killing.cancel()
    else:
        await killing


def check_kills_lose_nothing(
    folder: Path, database: str, workers: int, kills: int, every_seconds: float
) -> None:
    shared, recipe = str(folder / "blobs"), fleet.recipe(workers, blocks=2)
    with program(folder / "one", database, shared, recipe) as one:
        (folder / "two" / "data").mkdir(parents=True)
        shutil.copy(folder / "one" / "data" / KEY_FILE, folder / "two" / "data" / KEY_FILE)
        with program(folder / "two", database, shared, recipe) as two:
            crew = fleet.Fleet([one.url, two.url], workers, rate=20.0, kills=True)
            asyncio.run(work_and_kill(crew, [one, two], kills, every_seconds))
            assert not crew.tally.errors
            store = Store(database)
            lost = crew.tally.acknowledged - fleet.counted_updates(store)
            store.close()
            assert not lost
            assert len(crew.tally.acknowledged) >= kills * UPDATES_BETWEEN_KILLS
            report = verify_place(one.url).report
            assert report.ok, report.reason
            assert report.merges > 0
            print(
                f"{kills} kills, {len(crew.tally.acknowledged)} updates acknowledged, none lost, "
                f"{report.merges} merges"
            )


def test_kill_nine_of_either_of_two_processes_loses_nothing(tmp_path: Path, postgres_url: str) -> None:
    check_kills_lose_nothing(tmp_path, postgres_url, workers=8, kills=4, every_seconds=0.0)


@pytest.mark.slow
def test_kill_nine_every_20_seconds_for_ten_minutes_loses_nothing(tmp_path: Path, postgres_url: str) -> None:
    check_kills_lose_nothing(tmp_path, postgres_url, workers=200, kills=30, every_seconds=20.0)
