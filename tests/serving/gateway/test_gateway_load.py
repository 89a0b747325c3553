from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.limits import GatewayLimits
from tests.waiting import PATIENCE_SECONDS, until

from .conftest import Served, serve_engine, served_by, stages

EngineOf = Callable[[], LocalEngine]

FAIR = 0.8
"""Jain's index over what streams had when the first was complete; see docs/history for what we see."""


def active(served: Served) -> float:
    return served.metric("blocktrain_gateway_active_generations")


def cancelled(served: Served) -> float:
    return served.metric("blocktrain_gateway_cancelled_total")


def test_others_are_answered_while_the_schema_is_made(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked, go_on = FastAPI.openapi, list[str](), threading.Event()

    def held_up(app: FastAPI) -> dict[str, Any]:
        asked.append(threading.current_thread().name)
        assert go_on.wait(PATIENCE_SECONDS)
        return made(app)

    monkeypatch.setattr(FastAPI, "openapi", held_up)
    with serve_engine(engine_of()) as served, ThreadPoolExecutor(3) as pool, served.http() as client:
        readers = [pool.submit(client.get, "/openapi.json") for _ in range(3)]
        until("it is being made", lambda: asked)
        assert client.get("/healthz").status_code == 200
        go_on.set()
        pages = [reader.result(PATIENCE_SECONDS) for reader in readers]
    assert len(asked) == 1
    assert all("/v1/completions" in page.json()["paths"] for page in pages)


def test_a_client_that_leaves_a_stream_ends_its_generation(served: Served, client: openai.OpenAI) -> None:
    before = cancelled(served)
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=16_000, stream=True, n=2)
    next(iter(stream))
    assert active(served) == 2
    stream.close()
    until("it is cancelled", lambda: active(served) == 0 and cancelled(served) == before + 1)


def test_a_client_that_leaves_before_its_answer_ends_its_generation(served: Served) -> None:
    before = cancelled(served)
    host, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as raw:
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": 16000}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        raw.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        until("it writes", lambda: active(served) == 1)
    until("it is cancelled", lambda: active(served) == 0 and cancelled(served) == before + 1)


def test_an_answer_that_takes_too_long_is_given_up(engine_of: EngineOf) -> None:
    config = GatewayConfig(limits=GatewayLimits(request_seconds=0.3))
    with serve_engine(engine_of(), config) as served, served.openai() as client:
        with pytest.raises(openai.InternalServerError) as failure:
            client.completions.create(model="tiny", prompt="x", max_tokens=16_000)
        assert failure.value.status_code == 504
        assert failure.value.code == "deadline_exceeded"
        with pytest.raises(openai.APIError, match="deadline"):
            list(client.completions.create(model="tiny", prompt="x", max_tokens=16_000, stream=True))
        assert active(served) == 0


def test_beyond_its_places_and_queue_the_door_answers_429(engine_of: EngineOf) -> None:
    config = GatewayConfig(limits=GatewayLimits(max_active=2, max_waiting=0))
    with serve_engine(engine_of(), config) as served, served.openai() as client:
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=16_000, n=2, stream=True)
        next(iter(stream))
        for streamed in (False, True):
            with pytest.raises(openai.RateLimitError) as refusal:
                client.completions.create(model="tiny", prompt="x", max_tokens=1, stream=streamed)
            assert refusal.value.code == "rate_limit_exceeded"
            assert int(refusal.value.response.headers["retry-after"]) >= 1
        assert served.metric("blocktrain_gateway_refusals_total") == 2
        stream.close()
        until("all have ended", lambda: active(served) == 0)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_those_who_wait_get_their_turn(engine_of: EngineOf) -> None:
    config = GatewayConfig(limits=GatewayLimits(max_active=2, max_waiting=10))
    with serve_engine(engine_of(), config) as served:
        outcomes = asyncio.run(crowd(served, 8, 4))
        assert [outcome.tokens for outcome in outcomes] == [4] * 8


class Outcome:
    """How one stream of a crowd went: how many bytes came, and when."""

    def __init__(self) -> None:
        self.tokens = 0
        self.times: list[float] = []
        self.refused = False


async def watch(client: openai.AsyncOpenAI, number: int, max_tokens: int, outcome: Outcome) -> None:
    try:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"{number}: ",
            max_tokens=max_tokens,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
        )
    except openai.RateLimitError:
        outcome.refused = True
        return
    async for chunk in stream:
        if chunk.choices:
            outcome.times.append(time.monotonic())
        else:
            assert chunk.usage is not None
            assert chunk.usage is not None
            outcome.tokens = chunk.usage.completion_tokens


async def crowd(served: Served, size: int, max_tokens: int) -> list[Outcome]:
    outcomes = [Outcome() for _ in range(size)]
    options: dict[str, Any] = {"api_key": "x", "max_retries": 0, "timeout": 300.0}
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", **options) as client:
        await asyncio.gather(*(watch(client, i, max_tokens, outcome) for i, outcome in enumerate(outcomes)))
    return outcomes


def fairness(shares: list[int]) -> float:
    """Jain's index: 1 when all have as much, 1/n when one has everything."""
    total = sum(shares)
    return total * total / (len(shares) * sum(share * share for share in shares)) if total else 1.0


def check_fair(outcomes: list[Outcome], max_tokens: int) -> None:
    """Everybody got everything, and when the first was complete nobody was far behind.

    In pieces of text, not seconds: a busy machine slows all streams alike."""
    assert not any(outcome.refused for outcome in outcomes)
    assert [outcome.tokens for outcome in outcomes] == [max_tokens] * len(outcomes)
    first_end = min(outcome.times[-1] for outcome in outcomes)
    shares = [sum(time <= first_end for time in outcome.times) for outcome in outcomes]
    idle = sum(share == 0 for share in shares)
    print(f"shares {min(shares)} to {max(shares)}, {idle} idle, fairness {fairness(shares):.3f}")
    assert idle <= len(outcomes) // 20, f"{idle} streams had nothing when another was complete"
    assert fairness(shares) >= FAIR, f"fairness {fairness(shares):.3f} of {sorted(shares)}"


def test_fairness_is_one_for_equal_shares_and_falls_with_a_favourite() -> None:
    assert fairness([5] * 40) == 1
    assert fairness([20] * 20 + [0] * 20) == 0.5
    assert fairness([32] + [1] * 39) < FAIR


def test_forty_streams_progress_side_by_side(engine_of: EngineOf) -> None:
    with serve_engine(engine_of()) as served:
        check_fair(asyncio.run(crowd(served, 40, 24)), 24)
        assert active(served) == 0


@pytest.mark.slow
def test_two_hundred_streams_progress_side_by_side(engine_of: EngineOf) -> None:
    with serve_engine(engine_of()) as served:
        check_fair(asyncio.run(crowd(served, 200, 32)), 32)
        assert active(served) == 0


@pytest.mark.slow
def test_two_hundred_streams_share_three_stages(checkpoint: Path) -> None:
    with (
        stages(checkpoint, [0], [1], [2]) as running,
        served_by(checkpoint, [stage.address for stage in running]) as served,
    ):
        check_fair(asyncio.run(crowd(served, 200, 32)), 32)
        assert active(served) == 0
        assert served.metric("blocktrain_gateway_degraded_total") == 0


@pytest.mark.slow
def test_past_the_limit_some_are_refused_and_the_others_complete(engine_of: EngineOf) -> None:
    config = GatewayConfig(limits=GatewayLimits(max_active=50, max_waiting=25))
    with serve_engine(engine_of(), config) as served:
        outcomes = asyncio.run(crowd(served, 200, 24))
        refused = [outcome for outcome in outcomes if outcome.refused]
        assert 50 <= len(refused) <= 125
        assert all(outcome.tokens == 24 for outcome in outcomes if not outcome.refused)
        assert served.metric("blocktrain_gateway_waiting_requests") == active(served) == 0
