"""Whoever changes a ledger, a payload or a snapshot is found, and the first bad entry is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blocktrain.coordinator.storage.ledger import VerificationReport, signed_bytes, verify_ledger
from blocktrain.errors import UserError
from blocktrain.judge.ledger_check import verify_place
from blocktrain.wire.hashing import GENESIS_HASH, chain_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import LedgerEntry
from tests.coordinator.conftest import served, tiny_recipe
from tests.coordinator.peer import Refused
from tests.coordinator.test_life_of_an_update import ledger_of


@dataclass
class History:
    entries: list[LedgerEntry]
    payloads: dict[str, bytes]
    snapshots: dict[str, bytes]

    def verify(
        self, entries: list[LedgerEntry] | None = None, **changes: dict[str, bytes]
    ) -> VerificationReport:
        payloads, snapshots = changes.get("payloads", {}), changes.get("snapshots", {})
        return verify_ledger(
            entries or self.entries,
            lambda wanted: payloads.get(wanted, self.payloads[wanted]),
            lambda wanted: snapshots.get(wanted, self.snapshots[wanted]),
        )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    folder: Path = tmp_path_factory.mktemp("ledger")
    with served(folder, tiny_recipe(blocks=1, rounds=2)) as running:
        peer = running.peer()
        for round_ in range(2):
            peer.deliver(peer.lend(), seed=round_)
            running.wait_for_version(0, round_ + 1)
        entries = list(ledger_of(peer).entries)
        yield History(
            entries,
            {file.name: file.read_bytes() for file in (folder / "blobs/payloads").iterdir()},
            {file.stem: file.read_bytes() for file in (folder / "blobs/snapshots").iterdir()},
        )


def test_an_untouched_ledger_verifies(history: History) -> None:
    report = history.verify()
    assert report.ok
    assert (report.entries, report.merges) == (len(history.entries), 2)
    kinds = ["run", "join", *["assign", "commit", "reveal", "verdict", "merge", "snapshot"] * 2]
    assert [entry.kind for entry in history.entries] == kinds


def test_a_changed_entry_is_named(history: History) -> None:
    for number, entry in enumerate(history.entries):
        changed = list(history.entries)
        changed[number] = entry.model_copy(update={"time": entry.time + 1})
        report = history.verify(changed)
        assert report.first_bad == number, report.reason


def test_a_missing_inserted_or_reordered_entry_is_named(history: History) -> None:
    entries = history.entries
    assert history.verify(entries[:3] + entries[4:]).first_bad == 3
    assert history.verify([*entries[:3], entries[2], *entries[3:]]).first_bad == 3
    assert history.verify([*entries[:3], entries[4], entries[3], *entries[5:]]).first_bad == 3


def rewritten(entries: list[LedgerEntry], identity: Identity) -> list[LedgerEntry]:
    """The same entries, chained again and signed by somebody else."""
    head, done = GENESIS_HASH, []
    for number, entry in enumerate(entries):
        core: dict[str, Any] = {
            "sequence": number,
            "time": entry.time,
            "kind": entry.kind,
            "body": entry.body,
        }
        head = chain_hash(head, core)
        signature = identity.sign(signed_bytes(head)).hex()
        done.append(LedgerEntry(**core, entry_hash=head, signature=signature))
    return done


def test_a_ledger_rewritten_by_somebody_else_is_refused(history: History) -> None:
    report = history.verify(rewritten(history.entries, Identity.generate()))
    assert report.first_bad == 0
    assert "signature" in report.reason


def test_a_rewritten_ledger_cannot_claim_another_merge(history: History) -> None:
    """Even the coordinator itself cannot: the payloads give another snapshot."""
    identity = Identity.generate()
    entries = [entry.model_copy(deep=True) for entry in history.entries]
    entries[0].body["coordinator_key"] = identity.public_key.hex()
    assert history.verify(rewritten(entries, identity)).ok
    number = next(number for number, entry in enumerate(entries) if entry.kind == "merge")
    entries[number].body["alpha"] = 0.5
    report = history.verify(rewritten(entries, identity))
    assert report.first_bad == number
    assert "its inputs give" in report.reason


def test_merging_an_update_twice_is_found(history: History) -> None:
    identity = Identity.generate()
    entries = [entry.model_copy(deep=True) for entry in history.entries]
    entries[0].body["coordinator_key"] = identity.public_key.hex()
    first, second = (number for number, entry in enumerate(entries) if entry.kind == "merge")
    entries[second].body["inputs"] = entries[first].body["inputs"]
    report = history.verify(rewritten(entries, identity))
    assert report.first_bad == second
    assert "merged twice" in report.reason


def test_a_changed_payload_or_snapshot_is_found(history: History) -> None:
    for name, content in history.payloads.items():
        changed = bytes([content[0] ^ 1]) + content[1:]
        assert not history.verify(payloads={name: changed}).ok
    for name, content in history.snapshots.items():
        changed = content[:-1] + bytes([content[-1] ^ 1])
        assert not history.verify(snapshots={name: changed}).ok


def verified(place: str, key: str | None = None) -> VerificationReport:
    """What `blocktrain ledger verify` finds."""
    return verify_place(place, key=key).report


def test_the_ledger_of_a_data_directory_and_of_a_url_can_be_verified(tmp_path: Path) -> None:
    with served(tmp_path, tiny_recipe(blocks=1)) as running:
        peer = running.peer()
        peer.deliver(peer.lend())
        running.wait_for_version(0, 1)
        for place in (str(tmp_path), running.url):
            report = verified(place, peer.run.coordinator_key)
            assert (report.ok, report.merges) == (True, 1), report.reason
        assert verified(running.url, "00" * 32).first_bad == 0
    for payload in (tmp_path / "blobs" / "payloads").iterdir():
        payload.unlink()
    report = verified(str(tmp_path))
    assert not report.ok
    assert "is not in the blob store" in report.reason
    with pytest.raises(UserError, match="no ledger at"):
        verified(str(tmp_path / "blobs"))


def test_old_snapshots_are_deleted_and_the_ledger_still_holds(tmp_path: Path) -> None:
    recipe = tiny_recipe(blocks=1, rounds=5, max_age=0, keep_snapshots=2)
    with served(tmp_path, recipe) as running:
        peer, heads = running.peer(), [running.coordinator.resources.run.layouts[0].initial_hash]
        for round_ in range(5):
            peer.deliver(peer.lend(), seed=round_)
            heads.append(running.wait_for_version(0, round_ + 1))
        running.wait_for(lambda: len(stored_snapshots(tmp_path)) == 3)
        assert stored_snapshots(tmp_path) == {heads[0], *heads[-2:]}
        with pytest.raises(Refused, match="no longer in the blob store"):
            peer.get(f"/v1/snapshots/{heads[2]}")
    report = verify_place(str(tmp_path)).report
    assert (report.reason, report.merges) == ("every entry holds", 5)
    # One that is to be kept is missed.
    (tmp_path / f"blobs/snapshots/{heads[-2]}.safetensors").unlink()
    assert not verify_place(str(tmp_path)).report.ok


def stored_snapshots(folder: Path) -> set[str]:
    return {file.stem for file in (folder / "blobs/snapshots").iterdir()}
