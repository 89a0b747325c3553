"""Thousands of mutated HTTP requests on real sockets: every one is answered or cut off, none is a fault."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import AssignmentRequest, JoinRequest
from tests.adversaries.attacks import head
from tests.adversaries.mutations import hostile_inputs
from tests.coordinator.conftest import Running, served, tiny_recipe
from tests.coordinator.peer import Peer

REQUESTS = 2000


def samples(peer: Peer) -> list[bytes]:
    """Sound requests to every kind of route."""
    payload = peer.payload(0)
    put = f"/v1/updates/{content_hash(payload)}"
    peer.commit(peer.lend(), payload)
    join = JoinRequest(corpus_sha256=peer.run.corpus_sha256).model_dump_json().encode()
    ask = AssignmentRequest().model_dump_json().encode()
    signed = [("POST", "/v1/join", join), ("POST", "/v1/assignments", ask), ("PUT", put, payload)]
    gets = (
        "/v1/run",
        "/v1/blocks/0",
        "/v1/ledger?since=0",
        f"/v1/snapshots/{peer.block(0).head_hash}",
        "/metrics",
    )
    return [
        *(head(method, path, peer.headers(method, path, body)) + body for method, path, body in signed),
        *(head("GET", path, {"Range": "bytes=0-99", "If-None-Match": '"x"'}) for path in gets),
    ]


def send(address: tuple[str | None, int | None], requests: Sequence[bytes]) -> None:
    gone = contextlib.suppress(ConnectionResetError, BrokenPipeError)
    for request in requests:
        with socket.create_connection(address, timeout=60) as connection, gone:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def answers(running: Running) -> dict[int, int]:
    """How many requests were answered with each status."""
    text = httpx2.get(f"{running.url}/metrics").text
    found: dict[int, int] = {}
    for status, count in re.findall(r'blocktrain_requests_total\{.*status="(\d+)"\} (\d+)', text):
        found[int(status)] = found.get(int(status), 0) + int(count)
    return found


def test_mutated_requests_are_refused_or_answered_and_never_a_fault(tmp_path: Path) -> None:
    with served(tmp_path, tiny_recipe()) as running:
        peer = running.peer()
        requests = samples(peer)
        address = urlsplit(running.url)
        send((address.hostname, address.port), list(islice(hostile_inputs(requests, 3), REQUESTS)))
        found = answers(running)
        assert sum(found.values()) > REQUESTS // 4
        assert not [status for status in found if status >= 500]
        assert peer.block(0).head_version == 0
