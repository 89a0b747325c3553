"""Lossless at length: 200 held-out prompts, every draft length, two temperatures, failures on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import DataConfig
from blocktrain.data.corpora import load_corpus
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats
from tests.serving.cluster import HOUR, UNHURRIED, cluster, drain, text_of
from tests.serving.killing import Killer
from tests.serving.stages import StageProcess, spawn, wait_ready
from tests.waiting import until_async

NUM_PROMPTS = 200
TOKENS = 40


def held_out_prompts(count: int) -> list[bytes]:
    valid = load_corpus(DataConfig(max_bytes=200_000), 10_000).valid
    step = len(valid) // count
    return [valid[i * step :][: 10 + (37 * i) % 120] for i in range(count)]


async def write_all(
    engine: RemoteEngine | LocalEngine,
    prompts: list[bytes],
    wrote: Callable[[int, list[int]], None] = lambda prompt, text: None,
    **settings: Any,
) -> tuple[list[list[int]], list[GenerationStats]]:
    """A few at a time, so that texts are written among each other's rows. `wrote` is told of every text that
    begins or was written on, and how it reads by then."""
    gate = asyncio.Semaphore(6)
    lengths = random.Random(0)

    async def one(i: int, prompt: bytes) -> tuple[list[int], GenerationStats]:
        async with gate:
            drawn: dict[str, Any] = {"seed": i, "temperature": float(i % 2), "deadline_seconds": HOUR}
            if settings.get("mode") == "verify":
                drawn["draft_tokens"] = lengths.randint(0, 32)
            request = GenerationRequest(list(prompt), TOKENS, **settings, **drawn)
            generation, tokens = engine.generate(request), list[int]()
            wrote(i, list(prompt))
            async for chunk in generation:
                tokens += chunk.tokens
                wrote(i, [*prompt, *tokens])
            assert generation.stats.degraded_blocks == []
            return tokens, generation.stats

    written = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    return [tokens for tokens, _ in written], [stats for _, stats in written]


@pytest.mark.slow
@pytest.mark.timeout(HOUR)
def test_verify_is_ar_for_200_prompts_across_kills(checkpoint: Path) -> None:
    """A stage of each part dies, and each has tokens under way that a text waits for."""
    prompts = held_out_prompts(NUM_PROMPTS)

    async def local() -> list[list[int]]:
        engine = LocalEngine(checkpoint)
        await engine.start()
        texts, _ = await write_all(engine, prompts, mode="ar")
        await engine.close()
        return texts

    async def served(stages: list[StageProcess]) -> tuple[list[list[int]], list[list[int]]]:
        killer = Killer()
        addresses = [(await killer.watch(one)).address for one in stages]
        engine = RemoteEngine(checkpoint, EngineConfig(stages=addresses, **UNHURRIED))
        await engine.start()
        ar, plain = await write_all(engine, prompts, mode="ar")
        assert not any(stats.retries for stats in plain)
        finished = 0

        def wrote(number: int, text: list[int]) -> None:
            nonlocal finished
            killer.texts[number] = text
            if len(text) == len(prompts[number]) + TOKENS:
                del killer.texts[number]
                finished += 1
            dead = len(killer.killed)
            if killer.victim is None and dead < 2 and finished >= (dead + 1) * NUM_PROMPTS // 4:
                killer.victim = dead
            killer.kill_if_awaited()

        verify, disturbed = await write_all(engine, prompts, wrote, mode="verify")
        assert [victim for victim, _ in killer.killed] == [0, 1]
        assert all(disturbed[number].retries for _, number in killer.killed)
        await engine.close()
        await killer.close()
        return ar, verify

    stages = [wait_ready(one) for one in [spawn(checkpoint, blocks) for blocks in ("0", "1-2") * 2]]
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
