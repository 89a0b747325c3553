"""Signatures, sizes and bodies: what is refused, with which reason, before anything else happens."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.responses import Response

from blocktrain.coordinator.http.app import API
from blocktrain.coordinator.http.message_routes import ShortWay
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import MAX_BODY_BYTES, AssignmentRequest, JoinRequest
from tests.coordinator.conftest import Place, Running, tiny_recipe
from tests.coordinator.peer import Peer

ASK = AssignmentRequest().model_dump_json().encode()


def reason(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["reason"]


def raw(running: Running, request: bytes) -> bytes:
    """The answer to bytes that no well-behaved client would send."""
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def test_an_unsigned_request_is_refused(running: Running) -> None:
    response = httpx2.post(f"{running.url}/v1/assignments", content=ASK)
    assert reason(response) == (401, "unsigned")


def test_a_signature_of_another_key_is_refused(running: Running) -> None:
    peer = running.peer()
    headers = peer.headers("POST", "/v1/assignments", ASK)
    other = peer.identity.public_key.hex(), Identity.generate().public_key.hex()
    headers["Signature-Input"] = headers["Signature-Input"].replace(*other)
    response = peer.http.post(f"{running.url}/v1/assignments", content=ASK, headers=headers)
    assert reason(response) == (401, "bad_signature")


def test_a_signature_for_another_path_or_run_is_refused(running: Running) -> None:
    peer = running.peer()
    headers = peer.headers("POST", "/v1/join", ASK)
    response = peer.http.post(f"{running.url}/v1/assignments", content=ASK, headers=headers)
    assert reason(response) == (401, "bad_signature")
    response = peer.send("POST", "/v1/assignments", ASK, audience="ab" * 32)
    assert response.status_code == 401


def test_a_replayed_request_is_refused_even_after_a_restart(local: Place) -> None:
    recipe = tiny_recipe()
    with local.serve(recipe) as running:
        peer = running.peer()
        headers = peer.headers("POST", "/v1/assignments", ASK)
        address = f"{running.url}/v1/assignments"
        assert peer.http.post(address, content=ASK, headers=headers).status_code == 200
        assert reason(peer.http.post(address, content=ASK, headers=headers)) == (401, "replayed")
        clock = running.clock
    with local.serve(recipe, clock) as running:
        response = httpx2.post(f"{running.url}/v1/assignments", content=ASK, headers=headers)
        assert reason(response) == (401, "replayed")


def test_a_clock_that_is_ten_minutes_off_is_explained(running: Running) -> None:
    peer = running.peer()
    for minutes in (-10, 10):
        response = peer.send("POST", "/v1/assignments", ASK, now=running.clock() + 60 * minutes)
        error = response.json()["error"]
        assert response.status_code == 401
        assert error["reason"] in ("clock_skew", "expired")
        assert "clock" in error["message"]
        assert error["server_time"] == running.clock()


def test_an_expired_request_is_refused(running: Running) -> None:
    peer = running.peer()
    response = peer.send("POST", "/v1/assignments", ASK, now=running.clock() - 60, expires_seconds=30)
    assert reason(response) == (401, "expired")


def test_a_tests_client_that_stood_still_after_it_signed_signs_again(running: Running) -> None:
    peer = running.peer()
    late = iter([running.clock() - 900])
    peer.clock = lambda: next(late, running.clock())
    assert peer.join().worker_id == peer.identity.worker_id


def test_a_body_other_than_the_signed_one_is_refused(running: Running) -> None:
    peer = running.peer()
    headers = peer.headers("POST", "/v1/assignments", ASK)
    changed = ASK.replace(b"null", b"true", 1)
    response = peer.http.post(f"{running.url}/v1/assignments", content=changed, headers=headers)
    assert reason(response) == (400, "digest_mismatch")


def test_a_message_that_breaks_its_schema_is_refused_without_repeating_it(running: Running) -> None:
    peer = running.peer()
    evil = "<script>"
    for body in (
        f'{{"{evil}": 1}}',
        '{"prefer_block": "x"}',
        "[]",
        "\x00",
        '{"protocol": 2}',
        '{"a":' * 4000,
    ):
        response = peer.send("POST", "/v1/assignments", body.encode())
        assert reason(response) == (422, "invalid_message"), body[:40]
        assert evil not in response.text


@pytest.mark.parametrize("device", ["<b>", "a\nb", "x" * 65, "../../etc\x00", "é"])
def test_strings_that_could_inject_something_are_refused(running: Running, device: str) -> None:
    body = JoinRequest(corpus_sha256="ab" * 32).model_copy(update={"device": device}).model_dump_json()
    response = running.peer(join=False).send("POST", "/v1/join", body.encode())
    assert reason(response) == (422, "invalid_message")


def test_an_oversized_body_is_refused_before_it_is_read(running: Running) -> None:
    headers = {"Content-Length": str(MAX_BODY_BYTES + 1)}
    answer = raw(running, head("POST", "/v1/join", headers))
    assert b" 413 " in answer.split(b"\r\n", 1)[0]
    assert b"too_large" in answer
    limit = max(layout.payload_bytes for layout in running.peer().run.blocks)
    answer = raw(running, head("PUT", f"/v1/updates/{'0' * 64}", {"Content-Length": str(limit + 1)}))
    assert b"too_large" in answer


def test_an_endless_body_is_refused(running: Running) -> None:
    answer = raw(running, head("POST", "/v1/join", {"Transfer-Encoding": "chunked"}) + b"1\r\n{\r\n")
    assert b" 411 " in answer.split(b"\r\n", 1)[0]
    assert b"length_required" in answer


def committed_upload(running: Running) -> tuple[Peer, bytes, str]:
    peer = running.peer()
    payload = peer.payload(0)
    peer.commit(peer.lend(), payload)
    return peer, payload, f"/v1/updates/{content_hash(payload)}"


def test_a_body_longer_than_declared_is_cut_off(running: Running) -> None:
    peer, payload, path = committed_upload(running)
    request = head("PUT", path, peer.headers("PUT", path, payload)) + payload + b"GET / HTTP/1.1 more" * 100
    answer = raw(running, request)
    assert b" 200 " in answer.split(b"\r\n", 1)[0]
    assert b'"outcome":"accepted"' in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_body_shorter_than_declared_leaves_nothing_behind(running: Running) -> None:
    peer, payload, path = committed_upload(running)
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head("PUT", path, peer.headers("PUT", path, payload)) + payload[:100])
    assert peer.block(0).round.accepted == 0
    assert peer.put(payload).outcome == "accepted"


def test_headers_without_end_are_refused(running: Running) -> None:
    answer = raw(running, b"GET /healthz HTTP/1.1\r\n" + b"X: " + b"y" * 40_000)
    assert b" 400 " in answer.split(b"\r\n", 1)[0]


def test_a_slow_body_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktrain.coordinator.http.signed_requests.BODY_GRACE_SECONDS", 0.05)
    peer = running.peer()
    answer = raw(running, head("POST", "/v1/assignments", peer.headers("POST", "/v1/assignments", ASK)))
    assert b" 408 " in answer.split(b"\r\n", 1)[0]
    assert b"too_slow" in answer


def test_unknown_routes_and_methods_have_the_one_error_shape(running: Running) -> None:
    assert reason(httpx2.get(f"{running.url}/nothing")) == (404, "not_found")
    assert reason(httpx2.post(f"{running.url}/v1/run")) == (405, "method_not_allowed")


def test_storage_that_fails_is_answered_with_try_again(local: Place) -> None:
    with local.serve(tiny_recipe()) as running:
        peer, payload, path = committed_upload(running)
        payloads = local.data_dir / "blobs" / "payloads"
        payloads.touch()  # a file where the folder should be
        response = peer.send("PUT", path, payload)
        assert reason(response) == (503, "unavailable")
        assert response.headers["retry-after"]
        assert str(local.data_dir) not in response.text
        payloads.unlink()
        assert peer.put(payload).outcome == "accepted"


def test_no_heartbeat_waits_for_a_thread_that_a_store_of_blobs_may_hold_up() -> None:
    async def nobody(*_: object) -> None: ...

    way = ShortWay(nobody, API, lambda *_: Response())
    threads = {(method, one.route.path): one for method, all_ in way._targets.items() for one in all_}
    assert threads["POST", "/v1/assignments/{assignment_id}/heartbeat"].threads == "writing_threads"
    assert threads["GET", "/v1/blocks/{block}"].threads == "reading_threads"
    assert threads["GET", "/v1/snapshots/{snapshot_hash}"].threads == "store_threads"
    assert threads["GET", "/v1/checkpoint"].is_async  # with a limit of its own
