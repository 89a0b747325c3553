"""Dead, slow, silent and lying stages: the text stays the same where a spare exists, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blocktrain.model.pooling import Pooling
from blocktrain.serving.engine.fanout import FanoutConfig
from blocktrain.serving.engine.link import LinkConfig
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats, StagesUnavailableError
from blocktrain.wire.frames import FrameType
from tests.serving.cluster import HOUR, PATIENT, PROMPTS, Cluster, cluster, text_of
from tests.serving.proxy import Reorder, Trouble, flip_a_byte, half_then_close, lose, once_in, twice
from tests.serving.stages import StageProcess, spawn, start_stage, wait_ready
from tests.waiting import until_async

LENGTH = 24
SPARES = [[0], [1, 2], [0], [1, 2]]
LINK = LinkConfig(connect_seconds=HOUR, ping_seconds=0.1, suspect_seconds=0.5, dead_seconds=2.0)
WAITS: dict[str, Any] = {
    "fanout": FanoutConfig(degrade_seconds=HOUR, hedge_seconds=0.3, slow_seconds=HOUR),
    "link": LINK,
}
"""Turns to a spare soon, and never goes on without a block."""
GIVES_UP: dict[str, Any] = {"fanout": FanoutConfig(degrade_seconds=0.5, hedge_seconds=0.3), "link": LINK}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    """What an undisturbed model writes."""

    async def local() -> list[int]:
        engine = LocalEngine(checkpoint)
        await engine.start()
        tokens, _ = await text_of(engine, PROMPTS[0], LENGTH, mode="ar", seed=9)
        await engine.close()
        return tokens

    return asyncio.run(local())


async def write(c: Cluster | RemoteEngine, **settings: object) -> tuple[list[int], GenerationStats]:
    engine = c if isinstance(c, RemoteEngine) else c.engine
    return await text_of(engine, PROMPTS[0], LENGTH, seed=9, draft_tokens=2, **settings)


async def write_disturbed(
    engine: RemoteEngine, disturb: Callable[[], None]
) -> tuple[list[int], GenerationStats]:
    """The same text, with something happening after the third traversal."""
    request = GenerationRequest(list(PROMPTS[0]), LENGTH, seed=9, draft_tokens=2, deadline_seconds=HOUR)
    generation = engine.generate(request)
    tokens: list[int] = []
    traversals = 0
    async for chunk in generation:
        tokens += chunk.tokens
        traversals += 1
        if traversals == 3:
            disturb()
    return tokens, generation.stats


def test_reset_connections_change_nothing_without_a_spare(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint) as c:
            tokens, stats = await write_disturbed(c.engine, c.proxies[1].cut)
            assert tokens == expected
            assert stats.degraded_blocks == []

    asyncio.run(served())


TROUBLES: dict[str, Callable[[], tuple[Trouble | None, Trouble | None]]] = {
    "corrupted requests": lambda: (once_in(4, FrameType.TRAVERSE, flip_a_byte), None),
    "corrupted replies": lambda: (None, once_in(4, FrameType.LOG_PROBS, flip_a_byte)),
    "duplicated requests": lambda: (once_in(1, FrameType.TRAVERSE, twice), None),
    "duplicated replies": lambda: (None, once_in(1, FrameType.LOG_PROBS, twice)),
    "truncated requests": lambda: (once_in(5, FrameType.TRAVERSE, half_then_close), None),
    "truncated replies": lambda: (None, once_in(5, FrameType.LOG_PROBS, half_then_close)),
    "reordered replies": lambda: (None, Reorder(FrameType.LOG_PROBS)),
    "reordered requests": lambda: (Reorder(FrameType.TRAVERSE), None),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_damaged_streams_change_nothing(checkpoint: Path, expected: list[int], name: str) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1], [2]], **WAITS) as c:
            requests, replies = TROUBLES[name]()
            c.proxies[0].to_stage = requests or c.proxies[0].to_stage
            c.proxies[0].to_engine = replies or c.proxies[0].to_engine
            results = await asyncio.gather(*(write(c) for _ in range(2)))
            assert c.proxies[0].num_troubled > 0
            for tokens, stats in results:
                assert tokens == expected
                assert stats.degraded_blocks == []

    asyncio.run(served())


def test_a_lost_reply_is_asked_of_the_spare(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint, SPARES, **WAITS) as c:
            for proxy in c.proxies[:2]:
                proxy.to_engine = once_in(5, FrameType.LOG_PROBS, lose)
            tokens, stats = await write(c)
            assert tokens == expected
            assert stats.degraded_blocks == []

    asyncio.run(served())


def test_a_slow_stage_is_overtaken_by_its_spare(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint, SPARES, **WAITS) as c:
            slow: list[int] = []

            def slow_down() -> None:
                slow.extend(link.number for link in c.engine.links if link.latency_seconds is not None)
                for number in slow:
                    c.proxies[number].delay_seconds = HOUR

            tokens, stats = await write_disturbed(c.engine, slow_down)
            assert tokens == expected
            assert stats.retries > 0
            assert stats.degraded_blocks == []
            now = asyncio.get_running_loop().time()
            assert all(c.engine.links[number].slow_until > now for number in slow), "asked last from then on"

    asyncio.run(served())


def test_a_partition_with_a_spare_changes_nothing(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint, SPARES, **WAITS) as c:

            def partition() -> None:
                for link in c.engine.links:
                    if link.latency_seconds is not None:
                        c.proxies[link.number].stall()

            tokens, stats = await write_disturbed(c.engine, partition)
            assert tokens == expected
            assert stats.degraded_blocks == []
            for proxy in c.proxies:
                proxy.heal()

    asyncio.run(served())


def test_a_partition_without_a_spare_degrades_and_heals(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint, **GIVES_UP) as c:
            tokens, stats = await write_disturbed(c.engine, c.proxies[2].stall)
            assert len(tokens) == LENGTH
            assert stats.degraded_blocks == [2]
            assert "degraded" in c.engine.ready[1]
            now = asyncio.get_running_loop().time()
            gone_since = c.engine.fanout._missing_since(2, now, began=now)
            assert gone_since < now - 0.5, "what is known to be gone is not waited for again"
            c.engine.fanout.config = FanoutConfig(degrade_seconds=HOUR)
            c.proxies[2].heal()
            await until_async(lambda: c.engine.ready == (True, "ready"))
            tokens, stats = await write(c)
            assert tokens == expected
            assert stats.degraded_blocks == []

    asyncio.run(served())


def test_a_short_partition_is_waited_out(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint) as c:

            def partition() -> None:
                c.proxies[0].stall()
                asyncio.get_running_loop().call_later(0.8, c.proxies[0].heal)

            tokens, stats = await write_disturbed(c.engine, partition)
            assert tokens == expected
            assert stats.degraded_blocks == []

    asyncio.run(served())


def test_all_stages_gone_is_an_error_and_not_a_hang(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, **GIVES_UP) as c:

            def vanish() -> None:
                for proxy in c.proxies:
                    proxy.accepting = False
                    proxy.cut()

            with pytest.raises(StagesUnavailableError, match="no stage can be reached"):
                await write_disturbed(c.engine, vanish)
            assert not c.engine.ready[0]

    asyncio.run(served())


def test_a_draining_stage_hands_over_to_its_spare(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            spare = await start_stage(checkpoint, [0, 1, 2])
            places = [c.stages[0].address, spare.address]
            engine = RemoteEngine(checkpoint, EngineConfig(stages=places, **PATIENT))
            await engine.start()
            stopping: list[asyncio.Task[None]] = []

            def drain() -> None:
                used = next(link.number for link in engine.links if link.latency_seconds is not None)
                stopping.append(asyncio.create_task([c.stages[0], spare][used].drain()))

            tokens, stats = await write_disturbed(engine, drain)
            assert tokens == expected
            assert stats.degraded_blocks == []
            await asyncio.gather(*stopping)
            await engine.close()
            await spare.close()

    asyncio.run(served())


def test_blocks_whose_last_stage_drains_are_left_out_in_time_and_asked_again_later(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, **GIVES_UP) as c:
            draining = c.engine.links[1]
            draining.draining = True  # GOODBYE came, and the stage takes long to finish what it has
            # Counted from the question, and not again at every look: that would last until the deadline.
            _, stats = await text_of(c.engine, PROMPTS[0], 1, seed=9, mode="ar", deadline_seconds=HOUR)
            assert stats.degraded_blocks == [1]
            c.engine.fanout.config = FanoutConfig(degrade_seconds=HOUR)
            generation = asyncio.create_task(text_of(c.engine, PROMPTS[0], 1, seed=9, mode="ar"))
            await until_async(lambda: len(c.engine.running) == 1)
            draining.draining = False
            draining.changed()
            _, stats = await generation
            assert stats.degraded_blocks == []

    asyncio.run(served())


def test_blocks_whose_only_stage_fails_every_question_are_left_out_in_time(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, **GIVES_UP) as c:
            # It is connected, and fails whatever it is asked.
            c.stages[1].newest.held.pooling = Pooling((float("nan"),) * 3)
            tokens, stats = await text_of(c.engine, PROMPTS[0], 1, seed=9, mode="ar", deadline_seconds=HOUR)
            assert len(tokens) == 1
            assert stats.degraded_blocks == [1]
            assert stats.retries > 1, "it was asked again, and given up after degrade_seconds"

    asyncio.run(served())


@pytest.fixture(scope="module")
def processes(checkpoint: Path) -> Iterator[list[StageProcess]]:
    """Stages as processes: all blocks twice."""
    started = [spawn(checkpoint, "0-2", "--metrics-port", "0") for _ in range(2)]
    ready = [wait_ready(process) for process in started]
    yield ready
    for stage in ready:
        stage.stop()


def test_kill_9_mid_generation_changes_nothing_with_a_spare(
    checkpoint: Path, expected: list[int], processes: list[StageProcess]
) -> None:
    async def served() -> None:
        engine = RemoteEngine(checkpoint, EngineConfig(stages=[p.address for p in processes], **PATIENT))
        await engine.start()
        assert engine.ready == (True, "ready")

        def kill() -> None:
            used = next(link.number for link in engine.links if link.latency_seconds is not None)
            processes[used].kill()

        tokens, stats = await write_disturbed(engine, kill)
        assert tokens == expected
        assert stats.degraded_blocks == []
        await engine.close()

    asyncio.run(served())
    survivor = next(p for p in processes if p.process.poll() is None)
    assert survivor.terminate() == 0, "SIGTERM drains and exits cleanly"


@pytest.mark.slow
def test_kill_9_of_each_stage_with_and_without_a_spare(checkpoint: Path, expected: list[int]) -> None:
    async def served(victim: int, *, spare: bool) -> None:
        groups = ["0", "1", "2"] + (["0-2"] if spare else [])
        running = [wait_ready(process) for process in [spawn(checkpoint, group) for group in groups]]
        engine = RemoteEngine(checkpoint, EngineConfig(stages=[p.address for p in running]))
        try:
            await engine.start()
            # The spare holds most blocks and would be asked for all of them: make it the last resort.
            for link in engine.links[3:]:
                link.slow_until = float("inf")
            tokens, stats = await write_disturbed(engine, running[victim].kill)
            if spare:
                assert tokens == expected
            assert len(tokens) == LENGTH
            assert stats.degraded_blocks == ([] if spare else [victim])
        finally:
            await engine.close()
            for stage in running:
                stage.stop()

    for victim in range(3):
        asyncio.run(served(victim, spare=True))
        asyncio.run(served(victim, spare=False))


@pytest.mark.slow
def test_a_stage_that_returns_after_five_seconds_is_used_again(checkpoint: Path, expected: list[int]) -> None:
    async def served() -> None:
        async with cluster(checkpoint) as c:

            def partition() -> None:
                c.proxies[1].stall()
                asyncio.get_running_loop().call_later(5.0, c.proxies[1].heal)

            tokens, stats = await write_disturbed(c.engine, partition)
            assert len(tokens) == LENGTH
            assert stats.degraded_blocks in ([], [1])
            await until_async(lambda: c.engine.ready == (True, "ready"))
            tokens, stats = await write(c)
            assert tokens == expected

    asyncio.run(served())
