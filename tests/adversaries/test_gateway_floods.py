"""Attacks of the field review on a gateway: unread answers, bodies that are all errors, silent sockets.

The attacks succeeded at commit 59aa936.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from blocktrain import connections
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.limits import GatewayLimits, Places, TooManyRequestsError
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.serving.gateway.openai_messages import ChatRequest, CompletionRequest
from tests.serving.conftest import train_tiny
from tests.serving.gateway.conftest import Served
from tests.waiting import until

MANY = 400_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("tiny"), steps=2)


@contextlib.contextmanager
def gateway(checkpoint: Path, **limits: float) -> Iterator[Served]:
    with background_gateway(LocalEngine(checkpoint), GatewayConfig(limits=GatewayLimits(**limits))) as url:  # type: ignore[arg-type]
        yield Served(url)


def connected(url: str, source: str = "127.0.0.1") -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=60, source_address=(source, 0))


# --- 2.4: places ------------------------------------------------------------------------------------------


def test_one_client_cannot_hold_all_places_nor_the_queue() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=256, max_waiting=64, wait_seconds=0.01))
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(places.taken(128, "attacker"))
            with pytest.raises(TooManyRequestsError):
                await held.enter_async_context(places.taken(128, "attacker"))
            for number in range(8):
                await held.enter_async_context(places.taken(1, f"client {number}"))

    asyncio.run(scene())


def test_a_request_that_waits_for_its_own_share_is_passed_by_others() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=8))
        async with places.taken(6, "attacker"):
            waiting = asyncio.create_task(places.taken(6, "attacker").__aenter__())
            await asyncio.sleep(0)
            assert places.waiting == 1
            async with places.taken(1, "somebody else"):
                assert places.active == 7
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    asyncio.run(scene())


def test_one_client_leaves_room_in_the_queue() -> None:
    async def scene() -> None:
        places = Places(GatewayLimits(max_active=4, max_waiting=4))
        async with places.taken(3, "attacker"):
            crowd = [asyncio.create_task(places.taken(3, "attacker").__aenter__()) for _ in range(8)]
            for _ in range(3):
                await asyncio.sleep(0)
            assert places.waiting == 3
            for one in crowd:
                one.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(scene())


def test_an_answer_that_nobody_reads_gives_its_places_back(checkpoint: Path) -> None:
    body = json.dumps(
        {"model": "tiny", "prompt": "a", "n": 32, "max_tokens": 16384, "stream": True, "logprobs": 20}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head = f"{head}Content-Length: {len(body)}\r\n\r\n"
    with gateway(checkpoint, reader_seconds=0.5) as served, contextlib.ExitStack() as sockets:
        address = urlsplit(served.url)
        reader = sockets.enter_context(contextlib.closing(socket.socket()))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((address.hostname, address.port))
        reader.sendall(head.encode() + body)
        until("it writes", lambda: served.metric("blocktrain_gateway_active_generations") > 0)
        until("it has stopped", lambda: served.metric("blocktrain_gateway_active_generations") == 0)
        assert served.metric("blocktrain_gateway_cancelled_total") == 1


# --- 2.5: bodies of errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (CompletionRequest, "prompt", [-1] * MANY),
        (CompletionRequest, "prompt", [[]] * MANY),
        (CompletionRequest, "prompt", [{}] * MANY),
        (CompletionRequest, "prompt", [[-1] * MANY]),
        (CompletionRequest, "stop", [0] * MANY),
        (CompletionRequest, "logit_bias", dict.fromkeys(map(str, range(MANY)), "x")),
        (ChatRequest, "messages", [0] * MANY),
        (ChatRequest, "messages", [{"role": "user", "content": [0] * MANY}]),
        (ChatRequest, "messages", [dict.fromkeys(map(str, range(MANY)), 0)]),
    ],
    ids=lambda value: None if isinstance(value, list | dict) else str(value),
)
def test_a_body_of_wrong_elements_is_refused_at_the_first(
    model: type[CompletionRequest] | type[ChatRequest], field: str, value: object
) -> None:
    """Each element made an error for each arm of a union: 14 s and 3 GB for 2 MB."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate({"model": "tiny", field: value})
    assert refused.value.error_count() < 20


def test_such_a_body_is_answered_soon_and_others_beside_it(checkpoint: Path) -> None:
    body = json.dumps({"model": "tiny", "prompt": [-1] * MANY})
    with gateway(checkpoint) as served, served.http() as client:
        begun = time.process_time()
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert time.process_time() - begun < 3
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        assert client.get("/healthz").status_code == 200


# --- 2.8 and 2.9: connections -----------------------------------------------------------------------------


def test_silent_sockets_are_closed_and_make_room(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,100 of them held all 1,024 descriptors of a gateway for as long as they liked."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 16)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with gateway(checkpoint) as served, contextlib.ExitStack() as sockets:
        silent = [sockets.enter_context(connected(served.url, "127.0.0.2")) for _ in range(40)]
        with served.http() as client:
            assert client.get("/healthz").status_code == 200
        for one in silent:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""


def test_a_head_that_does_not_end_gets_the_gateways_own_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with gateway(checkpoint) as served, connected(served.url) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        head, body = slow.recv(65536).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_a_body_that_dribbles_is_given_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktrain.serving.gateway.access.BODY_SECONDS", 0.3)
    with gateway(checkpoint) as served, connected(served.url) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")
