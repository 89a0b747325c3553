"""Payloads that workers put into S3 themselves: looked at before they get their lasting name."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.traffic import Traffic
from blocktrain.coordinator.storage.blobs import Blobs, upload_key
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import Outcome
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
