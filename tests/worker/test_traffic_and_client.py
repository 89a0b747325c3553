"""The client against a real socket: retries, resumes, refusals in words, bytes counted."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blocktrain.client import coordinator as client
from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.client.traffic import Traffic
from blocktrain.errors import UserError, WireError
from blocktrain.threads import Stopped
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import JoinRequest

Handle = Callable[["Handler"], None]
BLOB = bytes(range(256)) * 400


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    handle_request: Handle

    def do_GET(self) -> None:
        type(self).handle_request(self)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        type(self).handle_request(self)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


class Served:
    def __init__(self, tmp_path: Path) -> None:
        self.requests: list[dict[str, str]] = []
        self.script: list[Handle] = []
        handler = type("Scripted", (Handler,), {"handle_request": staticmethod(self._handle)})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.traffic, self.stop = Traffic(), threading.Event()
        self.lines: list[str] = []
        self.client = CoordinatorClient(
            self.url, Identity.generate(), self.traffic, self.stop, self.lines.append
        )

    def _handle(self, request: Handler) -> None:
        self.requests.append({name.lower(): text for name, text in request.headers.items()})
        self.script.pop(0)(request)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.stop.set()
    served.client.close()
    served.server.shutdown()
    served.server.server_close()


def cut_off(request: Handler) -> None:
    request.close_connection = True
    request.connection.close()


def error(status: int, reason: str, message: str, remedy: str | None = None) -> Handle:
    body = json.dumps({"error": {"reason": reason, "message": message, "remedy": remedy}}).encode()
    return lambda request: request.answer(status, body)


def test_lost_connections_and_busy_answers_are_tried_again(served: Served) -> None:
    served.script = [cut_off, error(503, "unavailable", "draining"), lambda r: r.answer(200, b"payload")]
    assert served.client.payload("ab", 100) == b"payload"
    assert any("trying again" in line for line in served.lines)
    assert any("answers again" in line for line in served.lines)


@pytest.mark.parametrize(
    ("scheme", "open_port", "hint"),
    [
        ("https", True, "speaks no TLS; is it http://127.0.0.1:"),
        ("http", True, "without an answer; try https://127.0.0.1:"),
        ("http", False, "which cannot be reached; is the address the one"),
    ],
)
def test_what_may_be_wrong_is_said_of_an_address_that_never_answers(
    served: Served, monkeypatch: pytest.MonkeyPatch, scheme: str, open_port: bool, hint: str
) -> None:
    monkeypatch.setattr(client, "HINT_SECONDS", 0.0)
    monkeypatch.setattr(client, "backoff_seconds", lambda attempt, draw: 0.0)
    served.script = [cut_off] * 4
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = served.server.server_port if open_port else closed.getsockname()[1]
        url = f"{scheme}://127.0.0.1:{port}"
        stranger = CoordinatorClient(
            url, Identity.generate(), Traffic(), served.stop, served.lines.append, attempts=4
        )
        with pytest.raises(WireError, match="did not answer"):
            stranger.run()
        stranger.close()
    (said,) = [line for line in served.lines if "still no answer" in line]
    assert hint in said
    assert f"port {port} of 127.0.0.1" in said
    assert f"blocktrain doctor --coordinator {url}" in said


def test_storage_that_cannot_be_reached_is_not_told_as_the_coordinator(served: Served) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        store = f"http://127.0.0.1:{closed.getsockname()[1]}"
        served.client.attempts = 2
        served.script = [
            lambda handler: handler.answer(307, b"", Location=f"{store}/object?signature=secret")
        ] * 2
        with pytest.raises(WireError, match=f"^the run's storage at {store}, which this machine must reach"):
            served.client.fetch("/v1/updates/1")
    (line,) = served.lines
    assert line.startswith(f"no answer from the run's storage at {store}, ")
    assert "secret" not in line


def test_a_refusal_keeps_reason_and_remedy(served: Served) -> None:
    served.script = [error(409, "corpus_mismatch", "expected text a, found b", "get text a")]
    with pytest.raises(RequestRefused, match="expected text a, found b; get text a") as refusal:
        served.client.join(JoinRequest(corpus_sha256="0" * 64))
    assert (refusal.value.status, refusal.value.reason) == (409, "corpus_mismatch")


def test_every_signed_attempt_has_its_own_nonce(served: Served) -> None:
    served.script = [error(500, "x", "x"), error(404, "not_found", "no")]
    with pytest.raises(RequestRefused):
        served.client.join(JoinRequest(corpus_sha256="0" * 64))
    first, second = (headers["signature-input"] for headers in served.requests)
    assert first != second


def test_a_stopping_worker_does_not_wait_for_a_silent_coordinator(served: Served) -> None:
    def stop_and_cut(request: Handler) -> None:
        served.stop.set()
        cut_off(request)

    served.script = [stop_and_cut]
    with pytest.raises(Stopped):
        served.client.payload("ab", 100)


def test_a_download_goes_on_where_it_was_cut(served: Served, tmp_path: Path) -> None:
    half = len(BLOB) // 2

    def first_half(request: Handler) -> None:
        request.answer(200, BLOB[:half], length=len(BLOB))
        request.close_connection = True

    def the_rest(request: Handler) -> None:
        assert request.headers["range"] == f"bytes={half}-"
        request.answer(206, BLOB[half:], content_range=f"bytes {half}-{len(BLOB) - 1}/{len(BLOB)}")

    served.script = [first_half, the_rest]
    target = tmp_path / "blob"
    served.client.download("/v1/snapshots/x", target, len(BLOB))
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(BLOB).digest()
    assert len(served.requests) == 2


def test_a_download_that_never_ends_is_cut_off(served: Served, tmp_path: Path) -> None:
    served.script = [lambda request: request.answer(200, BLOB)]
    with pytest.raises(WireError, match="longer than"):
        served.client.download("/v1/snapshots/x", tmp_path / "blob", 1000)
    assert (tmp_path / "blob").stat().st_size <= 1000


def test_an_answer_longer_than_allowed_is_cut_off(served: Served) -> None:
    served.script = [lambda request: request.answer(200, BLOB)]
    with pytest.raises(WireError, match="cut off"):
        served.client.payload("ab", 1000)


def test_an_answer_of_another_protocol_is_explained(served: Served) -> None:
    served.script = [lambda request: request.answer(200, b'{"protocol": 2}')]
    with pytest.raises(WireError, match="update one of the two"):
        served.client.run()


def test_bytes_are_counted_with_headers_and_by_kind(served: Served) -> None:
    served.script = [lambda r: r.answer(200, BLOB), error(404, "not_found", "no such run")]
    served.client.payload("ab", len(BLOB))
    assert len(BLOB) < served.traffic.bytes_of("down")["payload"] < len(BLOB) + 500
    assert served.traffic.bytes_of("down")["control"] == 0
    with pytest.raises(RequestRefused):
        served.client.run()
    assert 0 < served.traffic.bytes_of("up")["control"] < 500
    assert served.traffic.seconds()["transferring"] > 0


@pytest.mark.parametrize("url", ["foo", "foo:8420", "ftp://host", "http://", "http://host:port", "//host"])
def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(UserError, match="is not the address of a coordinator"):
        CoordinatorClient(url, Identity.generate(), Traffic(), threading.Event(), lambda _: None)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (
            404,
            b'{"error": {"message": "no route", "type": "invalid_request_error", "code": "unknown_url"}}',
        ),
        (
            401,
            b'{"error": {"message": "no key", "type": "invalid_request_error", "code": "invalid_api_key"}}',
        ),
        (200, b"<!doctype html><title>Welcome</title>"),
        (200, b"[]"),
    ],
)
def test_another_server_is_told_from_a_coordinator(served: Served, status: int, body: bytes) -> None:
    served.script = [lambda request: request.answer(status, body)]
    with pytest.raises(UserError, match="is not a coordinator"):
        served.client.run()
