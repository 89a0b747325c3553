"""Engine, stages and proxies in one event loop, and the text they make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.serving.engine.engine import Generation, TextEngine
from blocktrain.serving.engine.fanout import FanoutConfig
from blocktrain.serving.engine.link import LinkConfig
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats
from blocktrain.serving.stage.stage import Stage
from tests.serving.proxy import Proxy
from tests.serving.stages import start_stage

PROMPTS = [
    b"The class of the",
    b"def main(self):\n    ",
    b"Note",
    b"In this case, the value is returned as a string and the",
    b"\n\n",
    b"x" * 90,
    b"If the argument is not given, " * 5,
]

HOUR = 3600.0
PATIENT: dict[str, Any] = {
    "start_seconds": HOUR,
    "fanout": FanoutConfig(degrade_seconds=HOUR),
    "link": LinkConfig(connect_seconds=HOUR, dead_seconds=HOUR),
}
"""No stage is given up because the machine is busy. A process that dies is noticed at once all the same."""


UNHURRIED: dict[str, Any] = {
    "start_seconds": HOUR,
    "fanout": FanoutConfig(degrade_seconds=HOUR, hedge_seconds=HOUR),
    "link": LinkConfig(connect_seconds=HOUR, suspect_seconds=HOUR, dead_seconds=HOUR),
}
"""And no spare is asked because a stage is slow: only one that died is gone around."""


@dataclass
class Cluster:
    engine: RemoteEngine
    stages: list[Stage]
    proxies: list[Proxy]


@asynccontextmanager
async def cluster(
    path: Path,
    groups: Sequence[Sequence[int]] = ((0,), (1,), (2,)),
    *,
    stage: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """A stage per group of blocks, each behind a proxy; patient, where `config` says nothing else."""
    stages = [await start_stage(path, blocks, **(stage or {})) for blocks in groups]
    proxies = [await Proxy(stage.address).start() for stage in stages]
    engine = RemoteEngine(path, EngineConfig(stages=[p.address for p in proxies], **{**PATIENT, **config}))
    try:
        await engine.start()
        yield Cluster(engine, stages, proxies)
    finally:
        await engine.close()
        for proxy in proxies:
            await proxy.close()
        for running in stages:
            await running.close()


async def drain(generation: Generation) -> list[int]:
    return [token async for chunk in generation for token in chunk.tokens]


async def text_of(
    engine: TextEngine, prompt: Sequence[int], max_tokens: int = 32, **settings: Any
) -> tuple[list[int], GenerationStats]:
    generation = engine.generate(GenerationRequest(list(prompt), max_tokens, **settings))
    return await drain(generation), generation.stats
