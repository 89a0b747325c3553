"""Assignments name the heads of the blocks that the objective wants frozen, and keep to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import ObjectiveConfig, Recipe
from blocktrain.coordinator.storage.ledger import verify_ledger
from blocktrain.wire.messages import Assignment, LedgerAnswer, LedgerEntry
from tests.coordinator.conftest import Clock, Place, Running, tiny_recipe
from tests.coordinator.peer import Peer

KEYS = {"assignment_id", "worker_id", "block", "round", "shard", "base_version", "base_hash"}


def chain_of_three(**swarm: Any) -> Recipe:
    objective = ObjectiveConfig(kind="chain", hint_probability=0.0)
    return replace(tiny_recipe(blocks=3, **swarm), objective=objective)


def entries_of(running: Running) -> list[LedgerEntry]:
    peer = running.peers[0]
    return list(LedgerAnswer.model_validate_json(peer.get("/v1/ledger?since=0").content).entries)


def names(assignment: Assignment) -> list[tuple[int, int, str]]:
    return [(one.block, one.version, one.hash) for one in assignment.frozen]


def heads(running: Running, *blocks: int) -> list[tuple[int, int, str]]:
    answers = [running.coordinator.reports.block(block) for block in blocks]
    return [(one.block, one.head_version, one.head_hash) for one in answers]


def seated(running: Running) -> tuple[list[Peer], list[Assignment]]:
    """One worker on each block, in order."""
    peers = [running.peer() for _ in range(3)]
    lent = [peer.lend() for peer in peers]
    assert [one.block for one in lent] == list(range(3))
    return peers, lent


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    return Place(tmp_path, url, None)


def test_an_assignment_names_the_heads_of_its_time_and_keeps_them(place: Place) -> None:
    clock = Clock()
    with place.serve(chain_of_three(), clock) as running:
        peers, lent = seated(running)
        assert [names(one) for one in lent] == [[], heads(running, 0), heads(running, 0, 1)]
        before = names(lent[2])
        peers[0].deliver(lent[0])
        running.wait_for_version(0, 1)
        assert names(peers[2].lend()) == before, "a lease given again is the same lease"
        peers[1].deliver(lent[1])
        running.wait_for_version(1, 1)
        assert names(peers[1].lend(after=lent[1].assignment_id)) == heads(running, 0)
        identity = peers[2].identity
    with place.serve(chain_of_three(), clock) as running:
        again = running.peer(identity, join=False)
        assert names(again.lend()) == before, "also after a restart of the coordinator"


def test_verification_names_an_assignment_whose_snapshot_was_not_there(local: Place) -> None:
    with local.serve(chain_of_three()) as running:
        peers, lent = seated(running)
        peers[0].deliver(lent[0])
        running.wait_for_version(0, 1)
        entries = entries_of(running)
        peer = peers[0]

        def fetch(kind: str) -> Any:
            return lambda wanted: peer.get(f"/v1/{kind}/{wanted}").content

        assert verify_ledger(entries, fetch("updates"), fetch("snapshots")).ok
        key = running.coordinator.resources.ledger
        first = next(n for n, entry in enumerate(entries) if entry.body.get("frozen"))
        body = {**entries[first].body, "frozen": [{"block": 0, "version": 7, "hash": "ab" * 32}]}
        forged = resigned(entries[: first + 1], body, key)
        report = verify_ledger(forged, fetch("updates"), fetch("snapshots"))
    assert report.first_bad == first
    assert "version 7 of block 0, which was not there yet" in report.reason


def resigned(entries: list[LedgerEntry], body: dict[str, Any], ledger: Any) -> list[LedgerEntry]:
    """As a lying coordinator would write its last entry."""
    from blocktrain.coordinator.storage.ledger import entry_hash_of, signed_bytes

    last = entries[-1]
    digest = entry_hash_of(entries[-2].entry_hash, last.sequence, last.time, last.kind, body)
    signature = ledger.sign(signed_bytes(digest)).hex()
    lie = last.model_copy(update={"body": body, "entry_hash": digest, "signature": signature})
    return [*entries[:-1], lie]


def test_independent_blocks_name_nothing_and_their_ledger_is_as_before(running: Running) -> None:
    peer = running.peer()
    assert peer.lend().frozen == ()
    assigned = [entry.body for entry in entries_of(running) if entry.kind == "assign"]
    assert [set(body) for body in assigned] == [KEYS]
