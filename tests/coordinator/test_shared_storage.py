"""Payloads that workers put into S3 themselves: looked at before they get their lasting name."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest

from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.traffic import Traffic
from blocktrain.coordinator import updates
from blocktrain.coordinator.storage import blobs
from blocktrain.coordinator.storage.blobs import Blobs, upload_key
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import Assignment, CommitAnswer, CommitRequest, Outcome, Verdict
from tests.coordinator.conftest import Running, served, tiny_recipe
from tests.coordinator.peer import Peer


@pytest.fixture
def shared(tmp_path: Path, s3_url: str) -> Iterator[Running]:
    with served(tmp_path, tiny_recipe(), blobs_url=s3_url) as running:
        yield running


def uploaded(peer: Peer, payload: bytes) -> httpx2.Response:
    return peer.send("POST", f"/v1/updates/{content_hash(payload)}/uploaded")


def test_uploaded_before_the_upload_is_refused(shared: Running) -> None:
    peer = shared.peer()
    payload = peer.payload(0)
    peer.commit(peer.lend(), payload)
    response = uploaded(peer, payload)
    assert (response.status_code, response.json()["error"]["reason"]) == (409, "not_uploaded")


@pytest.mark.parametrize(("change", "reason"), [(b"", "wrong_length"), (b"x", "hash_mismatch")])
def test_an_object_other_than_the_committed_one_is_refused_and_may_be_replaced(
    shared: Running, change: bytes, reason: str
) -> None:
    peer = shared.peer()
    payload = peer.payload(0)
    committed = peer.commit(peer.lend(), payload)
    peer.http.put(committed.upload.url, content=payload[:-1] + change)
    response = uploaded(peer, payload)
    assert (response.status_code, response.json()["error"]["reason"]) == (400, reason)
    # Kept, it would be fetched again each time that its worker speaks of it.
    assert uploaded(peer, payload).json()["error"]["reason"] == "not_uploaded"
    assert peer.reveal(committed, payload).outcome == Outcome.ACCEPTED


def test_a_presigned_upload_is_moved_to_its_lasting_name(shared: Running, s3_url: str) -> None:
    peer = shared.peer()
    payload = peer.payload(0)
    committed = peer.commit(peer.lend(), payload)
    assert committed.upload.presigned
    verdict = peer.reveal(committed, payload)
    assert Blobs.from_url(s3_url).size(upload_key(verdict.update_id)) is None
    assert uploaded(peer, payload).json()["receipt"] == verdict.receipt.model_dump()


def test_a_payload_that_is_spoken_of_twice_at_once_has_one_verdict(shared: Running) -> None:
    peer = shared.peer()
    payload = peer.payload(0)
    committed = peer.commit(peer.lend(), payload)
    peer.http.put(committed.upload.url, content=payload)
    updates = shared.coordinator.updates
    # Both requests came before either was carried out, as when the first one's answer was lost.
    both = [updates.expect(peer.identity.worker_id, content_hash(payload), None) for _ in range(2)]
    first, second = (updates.uploaded(one) for one in both)
    assert (first.outcome, second.outcome) == (Outcome.ACCEPTED, Outcome.ACCEPTED)
    assert second.receipt == first.receipt


@dataclass
class InParts:
    """A payload that its worker has committed and may send in five parts."""

    peer: Peer
    lease: Assignment
    payload: bytes
    committed: CommitAnswer

    def deliver(self, url: str, traffic: Traffic | None = None) -> tuple[CommitAnswer, Verdict]:
        """The same worker after a restart: it knows its assignment and its payload, and nothing of parts."""
        client = CoordinatorClient(
            url, self.peer.identity, traffic or Traffic(), threading.Event(), lambda line: None
        )
        client.audience, client.clock = self.peer.run.run_id, self.peer.clock
        request = CommitRequest(
            payload_hash=content_hash(self.payload),
            payload_bytes=len(self.payload),
            base_hash=self.lease.base_hash,
        )
        with closing(client):
            return client.commit_and_reveal(self.lease.assignment_id, request, self.payload)

    def put(self, index: int, payload: bytes) -> None:
        size = self.committed.upload.part_bytes
        part = payload[index * size : (index + 1) * size]
        httpx2.put(self.committed.upload.parts[index], content=part).raise_for_status()


@pytest.fixture
def in_parts(shared: Running, monkeypatch: pytest.MonkeyPatch) -> InParts:
    peer = shared.peer()
    lease, payload = peer.lend(), peer.payload(0)
    monkeypatch.setattr(blobs, "PART_BYTES", math.ceil(len(payload) / 5))
    committed = peer.commit(lease, payload)
    assert len(committed.upload.parts) == 5
    assert 4 * committed.upload.part_bytes < len(payload) <= 5 * committed.upload.part_bytes
    return InParts(peer, lease, payload, committed)


def test_an_upload_in_parts_goes_on_where_it_was_cut(shared: Running, in_parts: InParts) -> None:
    peer, payload = in_parts.peer, in_parts.payload
    for index in (0, 1, 3):
        in_parts.put(index, payload)
    answer = uploaded(peer, payload).json()["error"]
    assert (answer["reason"], answer["message"]) == ("not_uploaded", "3 of 5 parts are at the upload place")
    traffic = Traffic()
    again, verdict = in_parts.deliver(shared.url, traffic)
    assert [bool(address) for address in again.upload.parts] == [False, False, True, False, True]
    assert verdict.outcome == Outcome.ACCEPTED
    # Two of five, and headers.
    assert len(payload) / 5 < traffic.bytes_of("up")["payload"] < 2 * len(payload) / 5 + 5000
    assert shared.coordinator.resources.blobs.sizes("uploads/") == {}


def test_a_part_of_another_payload_is_refused_and_may_be_replaced(in_parts: InParts) -> None:
    peer, payload = in_parts.peer, in_parts.payload
    for index in range(5):
        in_parts.put(index, payload if index != 2 else bytes(len(payload)))
    assert uploaded(peer, payload).json()["error"]["reason"] == "hash_mismatch"
    assert uploaded(peer, payload).json()["error"]["message"].startswith("0 of 5 parts")
    for index in range(5):
        in_parts.put(index, payload)
    assert uploaded(peer, payload).json()["outcome"] == "accepted"


def test_addresses_that_grow_old_are_asked_for_again(
    shared: Running, in_parts: InParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow line: after each part the addresses of the rest are too old."""
    monkeypatch.setattr(updates, "PRESIGNED_SECONDS", 0.0)
    again, verdict = in_parts.deliver(shared.url)
    assert [bool(address) for address in again.upload.parts] == [False] * 4 + [True]
    assert verdict.outcome == Outcome.ACCEPTED


def test_an_address_that_the_storage_refuses_is_replaced(
    shared: Running, in_parts: InParts, monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    """As after an outage that was longer than the addresses were good for."""
    # The first address is that of a whole upload, and not used; the third is that of the second part.
    signed, changed = Blobs.presigned_put, iter(["", "", f"{s3}/no-such-bucket/part"])
    monkeypatch.setattr(Blobs, "presigned_put", lambda self, key: next(changed, "") or signed(self, key))
    assert in_parts.deliver(shared.url)[1].outcome == Outcome.ACCEPTED


def test_parts_that_are_listed_late_are_told_of_again(
    shared: Running, in_parts: InParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(5):
        in_parts.put(index, in_parts.payload)
    # The commit sees all parts, and the word that they are there comes to where they are not seen.
    listed, seen = Blobs.sizes, iter([True, False])
    monkeypatch.setattr(Blobs, "sizes", lambda self, prefix: listed(self, prefix) if next(seen, True) else {})
    assert in_parts.deliver(shared.url)[1].outcome == Outcome.ACCEPTED


def test_the_store_is_asked_for_parts_by_a_repeated_commit_and_away_from_heartbeats(
    shared: Running, in_parts: InParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def sizes(self: Blobs, prefix: str) -> dict[str, int]:
        threads.append(threading.current_thread().name)
        return {}

    monkeypatch.setattr(Blobs, "sizes", sizes)
    peer = shared.peer()
    lease, payload = peer.lend(), in_parts.payload
    first = peer.commit(lease, payload)
    assert (len(first.upload.parts), threads) == (5, [])
    peer.commit(lease, payload)
    assert [name.startswith("store") for name in threads] == [True]


def test_a_worker_that_knows_no_parts_sends_its_payload_whole(in_parts: InParts) -> None:
    assert in_parts.peer.reveal(in_parts.committed, in_parts.payload).outcome == Outcome.ACCEPTED


def test_a_large_payload_has_at_most_256_parts() -> None:
    lengths = blobs.part_lengths("ab", 72_000_000_000)
    assert len(lengths) == 256
    assert sum(lengths.values()) == 72_000_000_000
    assert blobs.part_lengths("ab", blobs.PART_BYTES) == {}
    assert list(blobs.part_lengths("ab", blobs.PART_BYTES + 1).values()) == [blobs.PART_BYTES, 1]


def test_the_coordinator_takes_payloads_itself_too(shared: Running) -> None:
    peer = shared.peer()
    payload = peer.payload(0)
    peer.commit(peer.lend(), payload)
    assert peer.put(payload).outcome == Outcome.ACCEPTED


def test_objects_are_served_by_presigned_address(shared: Running) -> None:
    peer = shared.peer(join=False)
    path = f"/v1/snapshots/{peer.run.blocks[0].initial_hash}"
    answer = peer.http.get(shared.url + path)
    assert answer.status_code == 307
    assert "X-Amz-Signature" in answer.headers["location"]
    peer.snapshot(0, peer.run.blocks[0].initial_hash)


def test_a_download_from_shared_storage_goes_on_where_it_was_cut(shared: Running, tmp_path: Path) -> None:
    peer = shared.peer(join=False)
    path = f"/v1/snapshots/{peer.run.blocks[0].initial_hash}"
    whole = httpx2.get(shared.url + path, follow_redirects=True).content
    target, traffic = tmp_path / "part", Traffic()
    target.write_bytes(whole[:-100])
    client = CoordinatorClient(shared.url, Identity.generate(), traffic, threading.Event(), print)
    with closing(client):
        client.download(path, target, len(whole))
    assert target.read_bytes() == whole
    assert 100 < traffic.bytes_of("down")["snapshot"] < len(whole)


def test_an_upload_that_nobody_speaks_of_is_deleted_after_an_hour(shared: Running) -> None:
    peer = shared.peer()
    payload = peer.payload(0)
    committed = peer.commit(peer.lend(), payload)
    httpx2.put(committed.upload.url, content=payload).raise_for_status()
    resources = shared.coordinator.resources
    put = time.time()  # the storage has a clock of its own
    resources.unneeded.sweep_uploads(put)
    assert resources.blobs.size(upload_key(committed.update_id)) == len(payload)
    resources.unneeded.sweep_uploads(put + 3700)
    assert resources.blobs.size(upload_key(committed.update_id)) is None


def test_parts_are_deleted_an_hour_after_the_last_of_them(tmp_path: Path) -> None:
    """On a slow line the first parts are older than that before the last one comes."""
    folder = Blobs.from_url(str(tmp_path))
    for key, age in (("going-on/0", 9000), ("going-on/1", 60), ("left/0", 9000), ("left/1", 4000)):
        folder.put(f"uploads/{key}", b"part")
        os.utime(tmp_path / "uploads" / key, (time.time() - age,) * 2)
    folder.delete_older("uploads/", datetime.now(UTC) - timedelta(hours=1))
    assert set(folder.sizes("uploads/")) == {"uploads/going-on/0", "uploads/going-on/1"}
