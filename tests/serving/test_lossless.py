"""Lossless at length: 200 held-out prompts, every draft length, two temperatures, failures on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.config import DataConfig
from blocktrain.data.corpora import load_corpus
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest
from tests.serving.cluster import HOUR, PATIENT, cluster, drain, text_of
from tests.serving.stages import StageProcess, spawn, wait_ready
from tests.waiting import POLL_SECONDS, until_async

NUM_PROMPTS = 200
TOKENS = 40


def held_out_prompts(count: int) -> list[bytes]:
    valid = load_corpus(DataConfig(max_bytes=200_000), 10_000).valid
    step = len(valid) // count
    return [valid[i * step :][: 10 + (37 * i) % 120] for i in range(count)]


async def write_all(
    engine: RemoteEngine | LocalEngine,
    prompts: list[bytes],
    finished: Callable[[int], None] = lambda prompt: None,
    **settings: object,
) -> list[list[int]]:
    """A few at a time, so that texts are written among each other's rows."""
    gate = asyncio.Semaphore(6)
    lengths = random.Random(0)

    async def one(i: int, prompt: bytes) -> list[int]:
        async with gate:
            drawn = {"draft_tokens": lengths.randint(0, 32)} if settings.get("mode") == "verify" else {}
            tokens, stats = await text_of(
                engine,
                prompt,
                TOKENS,
                seed=i,
                temperature=float(i % 2),
                deadline_seconds=HOUR,
                **settings,
                **drawn,
            )
            assert stats.degraded_blocks == []
            finished(i)
            return tokens

    return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
def test_verify_is_ar_for_200_prompts_across_kills_and_resets(checkpoint: Path) -> None:
    prompts = held_out_prompts(NUM_PROMPTS)

    async def local() -> list[list[int]]:
        engine = LocalEngine(checkpoint)
        await engine.start()
        texts = await write_all(engine, prompts, mode="ar")
        await engine.close()
        return texts

    async def served(stages: list[StageProcess]) -> tuple[list[list[int]], list[list[int]]]:
        engine = RemoteEngine(checkpoint, EngineConfig(stages=[one.address for one in stages], **PATIENT))
        await engine.start()
        ar = await write_all(engine, prompts, mode="ar")
        written: list[int] = []
        writing = asyncio.create_task(write_all(engine, prompts, written.append, mode="verify"))
        for victim, enough in ((0, NUM_PROMPTS // 4), (1, NUM_PROMPTS // 2)):
            while len(written) < enough and not writing.done():
                await asyncio.sleep(POLL_SECONDS)
            assert not writing.done(), "the stage must die while texts are being written"
            stages[victim].kill()
        verify = await writing
        await engine.close()
        return ar, verify

    stages = [wait_ready(p) for p in [spawn(checkpoint, blocks) for blocks in ("0", "1-2", "0-1", "1-2")]]
    try:
        expected = asyncio.run(local())
        ar, verify = asyncio.run(served(stages))
    finally:
        for stage in stages:
            stage.stop()
    assert ar == expected
    assert verify == expected


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
def test_a_thousand_requests_leak_nothing(checkpoint: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def served() -> None:
        async with cluster(checkpoint, [[0], [1, 2]]) as c:
            await text_of(c.engine, b"warm", 4)
            tasks, files = len(asyncio.all_tasks()), open_files()
            chance = random.Random(1)
            for wave in range(100):
                if wave % 10 == 5:
                    c.proxies[wave // 10 % 2].cut()
                await asyncio.gather(*(one(c.engine, chance, wave) for _ in range(10)))
            await until_async(lambda: not any(len(stage.sessions) for stage in c.stages))
            await until_async(lambda: len(asyncio.all_tasks()) <= tasks)
            await until_async(lambda: open_files() <= files)
            assert len(c.engine.running) == 0

    async def one(engine: RemoteEngine, chance: random.Random, seed: int) -> None:
        generation = engine.generate(
            GenerationRequest(list(b"The value"), 8, seed=seed, deadline_seconds=HOUR)
        )
        if chance.random() < 0.3:
            await anext(generation)
            await generation.aclose()
        else:
            assert len(await drain(generation)) == 8

    asyncio.run(served())


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
def test_200_streams_at_once_make_fair_progress(checkpoint: Path) -> None:
    """Every stream has its first tokens before half of them have all of theirs."""

    async def served() -> None:
        async with cluster(checkpoint, [[0], [1, 2]]) as c:
            events: list[str] = []

            async def stream(seed: int) -> None:
                request = GenerationRequest(list(b"The class"), 24, seed=seed, deadline_seconds=HOUR)
                generation = c.engine.generate(request)
                tokens = list((await anext(generation)).tokens)
                events.append("begun")
                tokens += await drain(generation)
                events.append("finished")
                assert len(tokens) == 24
                assert generation.stats.degraded_blocks == []

            await asyncio.gather(*(stream(seed) for seed in range(200)))
            last_begun = len(events) - 1 - events[::-1].index("begun")
            assert events[:last_begun].count("finished") < 100

    asyncio.run(served())
