"""Texts that begin alike: the second is sent from where it parts from the first, and is the same text."""

from __future__ import annotations

import asyncio
from pathlib import Path

from blocktrain.serving.engine.questions import KeptSessions, StageCache
from blocktrain.wire.frames import HEADER_BYTES, FrameType, decode_header
from tests.serving.cluster import cluster, text_of
from tests.serving.stages import LIMITS
from tests.waiting import until_async

SHARED = b"The arguments of the function are given in the order "
ENDINGS = [b"of the list.", b"in which they", b"of the list that"]


def test_a_shared_beginning_is_sent_once_and_changes_no_text(checkpoint: Path) -> None:
    async def served() -> None:
        prompts = [SHARED + ending for ending in ENDINGS]
        async with cluster(checkpoint, [[0, 1], [2]], kept_sessions=0) as c:
            expected = [await text_of(c.engine, prompt, 16, seed=2) for prompt in prompts]
        async with cluster(checkpoint, [[0, 1], [2]]) as c:
            bases: list[int] = []

            def noted(kind: FrameType, raw: bytes) -> list[bytes]:
                header = decode_header(raw[:HEADER_BYTES], LIMITS)
                if kind == FrameType.TRAVERSE and header.traversal == 1:
                    bases.append(header.base)
                return [raw]

            c.proxies[0].to_stage = noted
            found = [await text_of(c.engine, prompt, 16, seed=2, mode="ar") for prompt in prompts]
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            first, *others = (stats for _, stats in found)
            for stats in others:
                assert stats.wire_bytes_sent < first.wire_bytes_sent
                assert stats.retries == 0
            # The tokens that were not sent.
            assert bases[0] == 0
            assert len(bases) == 3
            assert min(bases[1:]) >= len(SHARED)
            assert all(len(stage.sessions) == 3 for stage in c.stages)
            # As many at once as like to begin with what is kept.
            together = await asyncio.gather(*(text_of(c.engine, prompt, 16, seed=2) for prompt in prompts))
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected]

    asyncio.run(served())


def test_a_stage_that_lost_the_kept_session_is_sent_all_ids(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]], kept_sessions=1) as c:
            expected, _ = await text_of(c.engine, SHARED, 8, seed=1)
            sessions = c.stages[0].sessions
            await until_async(lambda: len(sessions) == 1)
            sessions.expire(now=float("inf"))
            found, stats = await text_of(c.engine, SHARED, 8, seed=1)
            assert found == expected
            assert stats.retries == 1
            # One is kept, and the one before was freed.
            await until_async(lambda: len(sessions) == 1)

    asyncio.run(served())


def test_what_is_kept_is_bounded_and_looked_up_by_stage_and_blocks() -> None:
    kept = KeptSessions(most=2)
    texts = {number: [number] * 3 + list(range(100)) for number in range(3)}
    for number, ids in texts.items():
        freed = kept.keep(number, {0: StageCache(0, (0, 1), 0, ids)})
        assert list(freed) == ([0] if number == 2 else [])
    assert kept.like(0, (0, 1), texts[1] + [7]) == (1, texts[1])
    assert kept.like(0, (0,), texts[1]) is None
    assert kept.like(1, (0, 1), texts[1]) is None
    assert kept.like(0, (0, 1), texts[0]) is None
    # Used last, it stays; the other makes room.
    assert list(kept.keep(5, {})) == [2]
    assert set(kept.drop()) == {1, 5}


def test_a_closed_engine_keeps_nothing_on_its_stages(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            await text_of(c.engine, SHARED, 4)
            held = c.stages[0].sessions
            assert len(held) == 1
            await c.engine.close()
            await until_async(lambda: len(held) == 0)

    asyncio.run(served())
