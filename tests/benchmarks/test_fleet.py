"""The load bench, small: many signed workers at once, nothing refused, nothing lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import fleet

from blocktrain.coordinator.service import DATABASE_FILE
from blocktrain.coordinator.storage.store import Store
from blocktrain.judge.ledger_check import verify_place
from tests.coordinator.program import program


def test_fifty_workers_deliver_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with program(tmp_path, "", "", fleet.recipe(50, blocks=2)) as coordinator:
        workers = fleet.Fleet([coordinator.url], workers=50, rate=25.0)
        asyncio.run(workers.work(lambda: len(workers.tally.acknowledged) >= 60))
        store = Store(f"sqlite:///{tmp_path / 'data' / DATABASE_FILE}")
        counted, rows = fleet.counted_updates(store), fleet.num_rows(store)
        store.close()
        assert not workers.tally.errors
        assert workers.tally.acknowledged <= counted
        assert rows["workers"] == 50
        report = verify_place(coordinator.url).report
        assert report.ok, report.reason


def test_slow_answers_errors_and_lost_updates_fail() -> None:
    latency = {kind: {"p99": 0.2} for kind in fleet.LIMITED}
    good = {"errors": {}, "lost": [], "kills": 0, "updates_per_second": 20.0, "latency": latency}
    assert all(fleet.claims_of(good, 20.0).values())
    slow = {**latency, "heartbeat": {"p99": 0.3}}
    for worse in ({"errors": {"x": 1}}, {"lost": ["a"]}, {"updates_per_second": 18.0}, {"latency": slow}):
        assert not all(fleet.claims_of({**good, **worse}, 20.0).values())
    assert all(fleet.claims_of({**good, "kills": 3, "latency": slow}, 20.0).values())
