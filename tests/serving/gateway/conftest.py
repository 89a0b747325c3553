"""A real gateway on a free port over the tiny checkpoint, and the official client pointed at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from blocktrain.serving.engine_api import TextEngine
from blocktrain.serving.gateway import GatewayConfig, create_app
from blocktrain.serving.local_engine import LocalEngine

START_SECONDS = 20.0


@dataclass(frozen=True)
class Served:
    url: str
    app: FastAPI

    def http(self, **options: object) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30.0, **options)

    def openai(self, key: str = "none", **options: object) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60.0, **options}
        )

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over all labels."""
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(map(float, values))


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        threading.Event().wait(0.01)


@contextmanager
def serve(app: FastAPI) -> Iterator[Served]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), START_SECONDS)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", app)
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def serve_engine(engine: TextEngine, config: GatewayConfig | None = None) -> Iterator[Served]:
    with serve(create_app(engine, config)) as served:
        yield served


@pytest.fixture(scope="session")
def engine_of(checkpoint: Path) -> Callable[[], LocalEngine]:
    return lambda: LocalEngine(checkpoint)


@pytest.fixture(scope="session")
def served(checkpoint: Path) -> Iterator[Served]:
    with serve_engine(LocalEngine(checkpoint)) as served:
        yield served


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client
