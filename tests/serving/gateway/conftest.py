"""A real gateway on a free port over the tiny checkpoint, and the official client pointed at it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch

import blocktrain
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.serving.stage.main import load_blocks
from blocktrain.serving.stage.stage import Stage, StageConfig
from blocktrain.serving.transport import Address
from tests.waiting import PATIENCE_SECONDS


def cost_of(answer: openai.types.Completion) -> dict[str, Any]:
    """What a completion cost, as the gateway says beside the usual usage."""
    assert answer.usage is not None
    assert answer.usage.model_extra is not None
    cost: dict[str, Any] = answer.usage.model_extra["blocktrain"]
    return cost


@dataclass(frozen=True)
class Served:
    url: str

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30.0, **options)

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60.0, **options}
        )

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over all labels."""
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(map(float, values))


@contextmanager
def serve_engine(engine: TextEngine, config: GatewayConfig | None = None) -> Iterator[Served]:
    with background_gateway(engine, config) as url:
        yield Served(url)


class StageThread:
    """A stage with an event loop of its own; `kill` is as abrupt as a process that ends."""

    def __init__(self, checkpoint: Path, blocks: list[int], port: int = 0) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        held, shape = load_blocks(checkpoint, blocks, torch.device("cpu"))
        opening = Stage.open(held, shape, StageConfig(listen=Address("127.0.0.1", port)))
        self.stage = asyncio.run_coroutine_threadsafe(opening, self.loop).result(PATIENCE_SECONDS)
        self.address = self.stage.address

    def kill(self) -> None:
        if self.loop.is_running():
            asyncio.run_coroutine_threadsafe(self.stage.close(), self.loop).result(PATIENCE_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(10)
            self.loop.close()


@contextmanager
def stages(checkpoint: Path, *groups: list[int], port: int = 0) -> Iterator[list[StageThread]]:
    running = [StageThread(checkpoint, blocks, port) for blocks in groups]
    try:
        yield running
    finally:
        for stage in running:
            stage.kill()


@contextmanager
def served_by(checkpoint: Path, addresses: list[Address], seconds: float = 10.0) -> Iterator[Served]:
    engine = RemoteEngine(checkpoint, EngineConfig(stages=addresses, start_seconds=seconds))
    with background_gateway(engine) as url:
        yield Served(url)


@pytest.fixture(scope="session", autouse=True)
def same_source_in_children() -> Iterator[None]:
    """Programs that tests start run the code under test, whatever is installed."""
    source = str(Path(blocktrain.__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", source, prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


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
