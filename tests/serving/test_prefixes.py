"""Texts that begin alike: the second is sent from where it parts from the first, and is the same text."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blocktrain.model.generation import window_start
from blocktrain.serving.blocks import HeldBlocks, RowWork
from blocktrain.serving.engine.questions import KeptSessions, StageCache
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.wire.frame_metadata import Ask, Failure, Handed, decode_metadata, encode_metadata
from blocktrain.wire.frames import (
    HEADER_BYTES,
    ActivationCodec,
    Codec,
    FrameType,
    Header,
    decode_header,
    decode_rows,
    encode_activations,
    encode_frame,
    prefix_checksum,
)
from tests.serving.cluster import HOUR, UNHURRIED, cluster, text_of
from tests.serving.stages import LIMITS, greeted, reply, spawn, start_stage, tokens_computed, wait_ready
from tests.waiting import until_async

SHARED = b"The arguments of the function are given in the order "
ENDINGS = [b"of the list.", b"in which they", b"of the list that"]


def first_traversals(c: Any) -> list[Header]:
    """Will have the header of each session's first traversal through the first stage's proxy."""
    begun: list[Header] = []

    def noted(kind: FrameType, raw: bytes) -> list[bytes]:
        header = decode_header(raw[:HEADER_BYTES], LIMITS)
        if kind == FrameType.TRAVERSE and header.traversal == 1:
            begun.append(header)
        return [raw]

    c.proxies[0].to_stage = noted
    return begun


def test_a_shared_beginning_is_sent_once_and_changes_no_text(checkpoint: Path) -> None:
    async def served() -> None:
        prompts = [SHARED + ending for ending in ENDINGS]
        async with cluster(checkpoint, [[0, 1], [2]], kept_sessions=0) as c:
            expected = [await text_of(c.engine, prompt, 16, seed=2) for prompt in prompts]
        async with cluster(checkpoint, [[0, 1], [2]]) as c:
            begun = first_traversals(c)
            found = [await text_of(c.engine, prompt, 16, seed=2, mode="ar") for prompt in prompts]
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            first, *others = (stats for _, stats in found)
            for stats in others:
                assert stats.wire_bytes_sent < first.wire_bytes_sent
                assert stats.retries == 0
            # The tokens that were not sent.
            bases = [header.base for header in begun]
            assert bases[0] == 0
            assert len(bases) == 3
            assert min(bases[1:]) >= len(SHARED)
            assert all(len(stage.sessions) == 3 for stage in c.stages)
            # As many at once as like to begin with what is kept.
            together = await asyncio.gather(*(text_of(c.engine, prompt, 16, seed=2) for prompt in prompts))
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected]

    asyncio.run(served())


def test_texts_that_outgrow_the_context_share_both_windows(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            begun, context = first_traversals(c), c.engine.shape.context
            prompt = (SHARED * context)[:context]
            expected, _ = await text_of(c.engine, prompt, 6, seed=1, mode="ar")
            assert [header.base for header in begun] == [0, 0]
            computed = tokens_computed(c.stages[0])
            found, stats = await text_of(c.engine, prompt, 6, seed=1, mode="ar")
            assert found == expected
            # All of the first window but the token whose row is asked for, and all of the second one.
            second = context + 1 - window_start(context + 1, context)
            assert [header.base for header in begun[2:]] == [context - 1, second - 1]
            assert tokens_computed(c.stages[0]) - computed == stats.traversals
            # Written on from before the place where the context slides, too.
            other, _ = await text_of(c.engine, prompt[:-2], 6, seed=3)
            again, _ = await text_of(c.engine, prompt[:-2], 6, seed=3, mode="ar")
            assert other == again

    asyncio.run(served())


def test_a_prompt_that_was_read_for_drafts_is_drafted_behind_at_once(checkpoint: Path) -> None:
    prompt = list(SHARED)

    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            begun = first_traversals(c)
            first = c.engine.generate(GenerationRequest(prompt, 40, seed=1))
            expected = list((await anext(first)).tokens)
            drafting = c.engine.drafting
            await until_async(lambda: drafting.has_read(prompt, len(drafting.blocks)))
            expected += [token async for chunk in first for token in chunk.tokens]
            found, _ = await text_of(c.engine, bytes(prompt), 40, seed=1)
            assert found == expected
            # The first text of a prompt does not wait until the gateway has read it too.
            assert begun[0].rows == 1 < begun[1].rows

    asyncio.run(served())


def test_choices_of_one_prompt_have_it_read_once(checkpoint: Path) -> None:
    prompt = SHARED + SHARED[:20]

    async def served() -> None:
        async with cluster(checkpoint, [[0, 1], [2]], kept_sessions=0) as c:
            expected = [await text_of(c.engine, prompt, 6, seed=seed, mode="ar") for seed in range(8)]
            # Each of the five tokens that were read, and the prompt.
            assert [tokens_computed(stage) for stage in c.stages] == [8 * (len(prompt) + 5)] * 2
        async with cluster(checkpoint, [[0, 1], [2]]) as c:
            texts = (text_of(c.engine, prompt, 6, seed=seed, mode="ar") for seed in range(8))
            found = await asyncio.gather(*texts)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            assert sum(stats.retries for _, stats in found) == 0
            # The last token of the prompt is read by each: its row is the first that each asks for.
            once = len(prompt) - 1 + 8 * (1 + 5)
            assert [tokens_computed(stage) for stage in c.stages] == [once] * 2

    asyncio.run(served())


@pytest.mark.parametrize("model", ["checkpoint", "serial"])
def test_a_text_begins_with_the_caches_of_one_that_is_being_written(
    model: str, request: pytest.FixtureRequest
) -> None:
    path, prompt = request.getfixturevalue(model), SHARED[:36]

    async def served() -> None:
        async with cluster(path, kept_sessions=0) as c:
            expected = [(await text_of(c.engine, prompt, 6, seed=seed, mode="ar"))[0] for seed in (1, 2)]
        async with cluster(path) as c:
            first = c.engine.generate(GenerationRequest(list(prompt), 6, seed=1, mode="ar"))
            tokens = [token for _ in range(3) for token in (await anext(first)).tokens]
            before = [tokens_computed(stage) for stage in c.stages]
            found, stats = await text_of(c.engine, prompt, 6, seed=2, mode="ar")
            # The last token of the prompt is computed again for its row, and five that were written.
            after = [tokens_computed(stage) for stage in c.stages]
            assert [now - then for now, then in zip(after, before, strict=True)] == [6] * len(before)
            assert stats.retries == 0
            tokens += [token async for chunk in first for token in chunk.tokens]
            assert [tokens, found] == expected

    asyncio.run(served())


def test_caches_that_hold_a_given_up_draft_are_no_beginning(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))
    held = HeldBlocks(loaded, range(len(loaded.blocks)))
    caches = held.new_caches((0,))
    held.rows([RowWork([1, 2, 3, 4], 1, (0,), caches)])
    for known, fits in (([1, 2], True), ([1, 2, 3], True), ([1, 2, 5], False), ([1, 2, 3, 4, 5], False)):
        work = RowWork([6], 1, (0,), held.new_caches((0,)), len(known), like=caches, known=known)
        assert work.runnable == fits


def test_texts_that_wait_for_one_which_is_given_up_are_the_same(checkpoint: Path) -> None:
    prompt = SHARED + SHARED[:20]

    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            expected = [(await text_of(c.engine, prompt, 6, seed=seed, mode="ar"))[0] for seed in range(3)]
            c.engine.release(c.engine.kept.drop())
            await until_async(lambda: not len(c.stages[0].sessions))
            batcher, computing = c.stages[0].newest.batcher, threading.Event()
            # The stage is busy with another text until all three wait, and the first is released.
            batcher.executor.submit(computing.wait)
            other = asyncio.create_task(text_of(c.engine, b"Note", 1, mode="ar"))
            await until_async(lambda: len(c.stages[0].sessions) == 1 and not batcher.num_waiting)
            texts = [
                asyncio.create_task(text_of(c.engine, prompt, 6, seed=seed, mode="ar")) for seed in range(3)
            ]
            await until_async(lambda: batcher.num_waiting == 3)
            texts[0].cancel()
            await asyncio.gather(texts[0], return_exceptions=True)
            c.engine.release(c.engine.kept.drop())
            await until_async(lambda: len(c.stages[0].sessions) == 3)
            computing.set()
            await other
            found = await asyncio.gather(*texts[1:])
            assert [tokens for tokens, _ in found] == expected[1:]
            assert [stats.retries for _, stats in found] == [1, 1]

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
        freed = kept.keep(number, {0: StageCache(0, (0, 1), ids)})
        assert list(freed) == ([0] if number == 2 else [])
    assert kept.like({0: (0, 1)}, texts[1] + [7], running=True) == (1, texts[1])
    assert kept.like({0: (0,)}, texts[1], running=True) is None
    assert kept.like({1: (0, 1)}, texts[1], running=True) is None
    assert kept.like({0: (0, 1)}, texts[0], running=True) is None
    # Used last, it stays; the other makes room.
    assert list(kept.keep(5, {})) == [2]
    assert set(kept.drop()) == {1, 5}


def test_texts_of_one_prompt_push_out_each_other_before_other_prompts() -> None:
    kept, prompts = KeptSessions(most=3), [[number] * 40 for number in range(3)]

    def keep(number: int, ids: list[int]) -> list[int]:
        return list(kept.keep(number, {0: StageCache(0, (0, 1), ids)}))

    for number, prompt in enumerate(prompts):
        assert keep(number, prompt + [7] * 30) == []
    # Of prompt 1 two more, which share more than half of what either has.
    assert keep(3, prompts[1] + [8] * 30) == [1]
    assert keep(4, prompts[1] + [9] * 30) == [3]
    # One whose own part is the larger one counts as a text of its own, so the least recently used goes.
    assert keep(5, prompts[1] + [10] * 50) == [4]
    assert keep(6, prompts[2] + [11] * 50) == [2]
    assert keep(7, [12] * 80) == [0]
    assert set(kept.drop()) == {5, 6, 7}


def test_a_chain_of_stages_computes_a_shared_beginning_once(serial: Path) -> None:
    beginning = SHARED[:36]
    prompts = [beginning + ending for ending in (b"of a", b"the ", b"in x")]

    async def served() -> None:
        async with cluster(serial, kept_sessions=0) as c:
            expected = [await text_of(c.engine, prompt, 8, seed=2, mode="ar") for prompt in prompts]
        async with cluster(serial) as c:
            for i, (prompt, (tokens, _)) in enumerate(zip(prompts, expected, strict=True)):
                before = [tokens_computed(stage) for stage in c.stages]
                found, stats = await text_of(c.engine, prompt, 8, seed=2, mode="ar")
                assert found == tokens
                assert stats.retries == 0
                # The last token of a text is not read. Endings part at their first byte.
                new = len(prompt) + 7 - (len(beginning) if i else 0)
                assert [tokens_computed(stage) for stage in c.stages] == [one + new for one in before]
            # As many at once as like to begin with what is kept, with guesses.
            together = await asyncio.gather(*(text_of(c.engine, prompt, 8, seed=2) for prompt in prompts))
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected]
            assert all(len(stage.sessions) == 6 for stage in c.stages)

    asyncio.run(served())


def test_a_stage_of_a_chain_that_was_killed_has_the_chain_sent_all_ids(serial: Path) -> None:
    prompt = SHARED[:40]
    processes = [wait_ready(one) for one in [spawn(serial, part) for part in ("0", "1", "2")]]

    async def served() -> None:
        engine = RemoteEngine(serial, EngineConfig(stages=[one.address for one in processes], **UNHURRIED))
        await engine.start()
        expected, first = await text_of(engine, prompt, 8, seed=2, mode="ar")
        found, second = await text_of(engine, prompt, 8, seed=2, mode="ar")
        assert found == expected
        assert second.retries == 0
        assert second.wire_bytes_sent < first.wire_bytes_sent
        for victim in range(3):
            processes[victim].kill()
            await until_async(lambda: not engine.ready[0])
            address = processes[victim].address.text
            processes.append(wait_ready(spawn(serial, str(victim), listen=address)))
            await until_async(lambda: engine.ready[0])
            found, stats = await text_of(engine, prompt, 8, seed=2, mode="ar")
            assert found == expected
            assert stats.retries == 1
        await engine.close()

    try:
        asyncio.run(served())
    finally:
        for process in processes:
            process.stop()


def test_a_chain_that_breaks_at_a_shared_beginning_is_gone_around(serial: Path) -> None:
    prompt = SHARED[:40]

    async def served() -> None:
        async with cluster(serial, ((0,), (1,), (2,), (1,)), **UNHURRIED) as c:
            # The spare is asked last.
            c.engine.links[3].slow_until = HOUR**2
            expected, _ = await text_of(c.engine, prompt, 8, seed=2, mode="ar")
            bases: list[int] = []

            def dies(kind: FrameType, raw: bytes) -> list[bytes]:
                if kind != FrameType.HAND_ON:
                    return [raw]
                bases.append(decode_header(raw[:HEADER_BYTES], LIMITS).base)
                c.proxies[1].accepting = False
                c.proxies[1].cut()
                return []

            c.proxies[1].to_stage = dies
            found, stats = await text_of(c.engine, prompt, 8, seed=2, mode="ar")
            assert found == expected
            assert bases == [len(prompt) - 1]
            assert stats.retries > 0
            # It had nothing of the text that the chain began with.
            assert tokens_computed(c.stages[3]) == len(prompt) + 7

    asyncio.run(served())


def test_what_no_kept_session_of_the_client_has_is_asked_for_again(serial: Path) -> None:
    """Frames as the stage before would hand them on, to one that has the last parts."""
    text = list(b"The values that are handed on, and more.")
    values = np.random.default_rng(1).standard_normal((len(text), 32)).astype(np.float32)

    def handed(
        start: int, end: int, ask: Ask, session: int, client: str = "test", base: int | None = None
    ) -> bytes:
        at = start if base is None else base
        header = Header(FrameType.HAND_ON, Codec.F32, session=session, traversal=1, base=at, rows=1)
        metadata = encode_metadata(Handed(client, FrameType.TRAVERSE, ask))
        payload = bytes(text[start:end]) + encode_activations(values[start:end], ActivationCodec.F32)
        return encode_frame(header, metadata, payload)

    def like(session: int, base: int, **fields: Any) -> Ask:
        return Ask(**{"blocks": [1, 2], "prefix": prefix_checksum(text[:base]), "like": session, **fields})

    async def served() -> None:
        stage = await start_stage(serial, [1, 2])
        stream, other = await greeted(stage), await greeted(stage, "other")
        assert (await reply(stream, handed(0, 36, Ask([1, 2]), 1))).type == FrameType.LOG_PROBS
        whole = await reply(stream, handed(0, 40, Ask([1, 2]), 2))
        before = tokens_computed(stage)
        lacking = {
            "a session that never was": handed(36, 40, like(99, 36), 3),
            "itself": handed(36, 40, like(3, 36), 3),
            "more than it has": handed(37, 40, like(1, 37), 3),
            "another beginning": handed(36, 40, like(1, 36, prefix=7), 3),
            "other parts": handed(36, 40, like(1, 36, blocks=[2]), 3),
        }
        for name, raw in lacking.items():
            assert (await reply(stream, raw)).type == FrameType.RESEND, name
        # Sessions belong to the client that is named, and it is another's that is asked for.
        await stream.write(handed(36, 40, like(1, 36), 3, "other"))
        assert (await other.read(LIMITS)).type == FrameType.RESEND
        beyond = handed(36, 40, like(1, 36), 3, base=45)
        for raw, words in ((beyond, "positions up to 48"), (handed(36, 40, like(-1, 36), 3), "Handed")):
            frame = await reply(stream, raw)
            assert frame.type == FrameType.FAILED
            assert words in decode_metadata(frame, Failure).sentence
        # Nothing was computed or kept for any of them.
        assert tokens_computed(stage) == before
        assert len(stage.sessions) == 2
        # And what it has, it goes on from.
        found = await reply(stream, handed(36, 40, like(1, 36), 3))
        assert found.type == FrameType.LOG_PROBS
        assert tokens_computed(stage) == before + 4
        rows = [decode_rows(one.payload, Codec.F32, 1, 256) for one in (whole, found)]
        assert np.abs(rows[0] - rows[1]).max() < 1e-4
        for one in (stream, other):
            await one.close()
        await stage.close()

    asyncio.run(served())


def test_a_closed_engine_keeps_nothing_on_its_stages(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            await text_of(c.engine, SHARED, 4)
            held = c.stages[0].sessions
            assert len(held) == 1
            await c.engine.close()
            await until_async(lambda: len(held) == 0)

    asyncio.run(served())
