"""Only the best tokens of each row travel, and the text is that of whole rows all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blocktrain.model.pooling import Pooling
from blocktrain.model.sampling import EXACT_TOLERANCE, Sampler, best_scores, choose, normalised
from blocktrain.serving.blocks import WeighedRows
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import BEST_TOKENS
from blocktrain.serving.engine.rows import Part, best_pooled
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import Ask, Draw, encode_metadata
from blocktrain.wire.frames import Codec, FrameType, Header
from tests.serving.cluster import PROMPTS, cluster, text_of
from tests.serving.stages import greeted, reply, start_stage

POOLING = Pooling((0.5, 0.2, 0.3))
FOLLOWING = Pooling(POOLING.weights, decays=(0.9,), taus=(0.5,))
STAGES = ((0,), (1, 2))


def log_probs(vocabulary: int, random: np.random.Generator) -> list[NDArray[np.float64]]:
    """One row of each block. A few tokens are likely, as in text, and blocks differ by half a nat or so."""
    likely = 3.0 * random.standard_normal(vocabulary)
    return [normalised(likely + 0.5 * random.standard_normal(vocabulary)) for _ in POOLING.weights]


def sent(
    rows: list[NDArray[np.float64]],
    logs: NDArray[np.float64] | None,
    sampler: Sampler,
    position: int,
    most: int,
    stages: Sequence[tuple[int, ...]] = STAGES,
) -> list[Part]:
    """What stages would send of these blocks' rows, through the wire's encoding."""
    parts, vocabulary = [], len(rows[0])
    for blocks in stages:
        weights = np.array([POOLING.weights[block] for block in blocks])
        log_weights = np.empty((1, 0))
        if logs is not None:
            weights, log_weights = np.exp(normalised(logs[list(blocks)])), logs[None, list(blocks)]
        row = (weights @ np.array([rows[block] for block in blocks])).astype(np.float32)
        total = float(sum(weights))
        ids, scores = best_scores(row[None], [(sampler, position)], total, most)
        (payload,) = frames.encode_best(ids, scores, vocabulary, [1])
        assert len(payload) == frames.best_bytes(min(most, vocabulary), vocabulary)
        ids, scores, tolerance = frames.decode_best(payload, 1, min(most, vocabulary), vocabulary)
        parts.append(Part(blocks, WeighedRows(scores, log_weights), tolerance, ids))
    return parts


@pytest.mark.parametrize(
    ("temperature", "follows_text"), [(0.0, False), (0.5, True), (1.0, False), (1.0, True), (1.5, False)]
)
@pytest.mark.parametrize("stages", [STAGES, ((0, 1, 2),)])
def test_what_the_best_tokens_settle_is_what_whole_rows_choose(
    stages: Sequence[tuple[int, ...]], temperature: float, follows_text: bool
) -> None:
    vocabulary, positions, random = 1024, 1000, np.random.default_rng(7)
    sampler, asked_again = Sampler(seed=11, temperature=temperature), 0
    for position in range(positions):
        rows = log_probs(vocabulary, random)
        logs = random.standard_normal(len(rows)) if follows_text else None
        weights = np.array(POOLING.weights) if logs is None else np.exp(normalised(logs))
        parts = sent(rows, logs, sampler, position, BEST_TOKENS, stages)
        found = best_pooled(parts, FOLLOWING if follows_text else POOLING, vocabulary, temperature)
        choice = found.choose(0, sampler, [0] * position)
        expected = choose(normalised(weights @ np.array(rows)), sampler, position, EXACT_TOLERANCE)
        asked_again += not choice.settled
        assert not choice.settled or choice.token == expected.token
    print(f"temperature {temperature}: {asked_again} of {positions} choices asked for whole rows")
    # At most one choice in fifty: more would cost more time than the bytes they save.
    assert asked_again <= positions / 50


def test_a_row_over_32768_tokens_takes_less_than_400_bytes() -> None:
    vocabulary = 32_768
    rows = log_probs(vocabulary, np.random.default_rng(0))
    sampler = Sampler(seed=3)
    parts = sent(rows, None, sampler, 5, BEST_TOKENS)
    choice = best_pooled(parts, POOLING, vocabulary, 1.0).choose(0, sampler, [0] * 5)
    whole = normalised(np.array(POOLING.weights) @ np.array(rows))
    assert choice.settled
    assert choice.token == choose(whole, sampler, 5, EXACT_TOLERANCE).token
    # A traversal of nine rows whose frame is shared, with four rows in five accepted.
    traversal = frames.HEADER_BYTES + 9 * frames.best_bytes(BEST_TOKENS, vocabulary)
    assert traversal / (9 * 0.8) < 400


def test_a_token_that_no_stage_sent_leaves_the_choice_open() -> None:
    # Each stage is sure of a token that the other finds impossible; a third one is second to both.
    first, second = np.full(64, -20.0), np.full(64, -20.0)
    first[1], second[2], first[3], second[3] = -0.1, -0.1, -3.0, -3.0
    rows = [normalised(first), normalised(second), normalised(second)]
    sampler = Sampler(temperature=0.0)
    open_choice = best_pooled(sent(rows, None, sampler, 0, 1), POOLING, 64, 0.0).choose(0, sampler, [])
    assert not open_choice.settled
    choice = best_pooled(sent(rows, None, sampler, 0, 4), POOLING, 64, 0.0).choose(0, sampler, [])
    assert (choice.settled, choice.token) == (True, 3)


@pytest.mark.parametrize("few", [4, BEST_TOKENS])
def test_text_is_the_same_with_the_best_tokens_alone(checkpoint: Path, few: int) -> None:
    async def scenario() -> None:
        local = LocalEngine(checkpoint)
        tokens = asked_again = 0
        async with cluster(checkpoint, best_tokens=few) as c:
            for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "mode": "ar"}):
                expected = [await text_of(local, prompt, seed=5, **settings) for prompt in PROMPTS[:2]]
                found = await asyncio.gather(
                    *(text_of(c.engine, prompt, seed=5, **settings) for prompt in PROMPTS[:2])
                )
                assert [text for text, _ in found] == [text for text, _ in expected]
                tokens += sum(len(text) for text, _ in found)
                asked_again += sum(stats.second_questions for _, stats in found)
        await local.close()
        print(f"{few} tokens of 256: {asked_again} second questions for {tokens} tokens of text")
        # So few settle not every choice of a model that has hardly learned; the text is right all the same.
        assert (asked_again > 0) == (few == 4)

    asyncio.run(scenario())


def test_whole_rows_are_asked_for_where_more_than_noise_decides(checkpoint: Path) -> None:
    async def scenario() -> None:
        async with cluster(checkpoint, best_tokens=16) as c:
            plain = await text_of(c.engine, PROMPTS[0], seed=1, mode="ar")
            for wish in ({"logprobs": 2}, {"top_p": 0.9}, {"top_k": 5}, {"logit_bias": ((101, 2.0),)}):
                _, stats = await text_of(c.engine, PROMPTS[0], seed=1, mode="ar", **wish)
                assert stats.second_questions == 0
                assert stats.wire_bytes_received > 2 * plain[1].wire_bytes_received

    asyncio.run(scenario())


def test_text_is_the_same_where_pooling_follows_the_text(following_checkpoint: Path) -> None:
    async def scenario() -> None:
        local = LocalEngine(following_checkpoint)
        expected, _ = await text_of(local, PROMPTS[0], 48, seed=2)
        await local.close()
        async with cluster(following_checkpoint, best_tokens=48) as c:
            assert (await text_of(c.engine, PROMPTS[0], 48, seed=2))[0] == expected

    asyncio.run(scenario())


def test_a_stage_refuses_best_tokens_without_a_way_to_draw(checkpoint: Path) -> None:
    async def scenario() -> None:
        stage = await start_stage(checkpoint, [0])
        stream = await greeted(stage)
        ids = frames.encode_ids([1, 2, 3], 256)
        header = Header(FrameType.TRAVERSE, Codec.BEST, session=1, rows=1)
        try:
            answer = await reply(stream, frames.encode_frame(header, encode_metadata(Ask([0])), ids))
            assert answer.type == FrameType.FAILED
            payloads = []
            # With the first no score would be finite: it is none at all.
            for temperature in (1e-320, 0.0, 1.0):
                draw = encode_metadata(Ask([0], draw=Draw(0, 3, temperature, 8)))
                answer = await reply(stream, frames.encode_frame(header, draw, ids))
                payloads.append(answer.payload)
            assert len(payloads[0]) == frames.best_bytes(8, 256)
            assert payloads[0] == payloads[1] != payloads[2]
        finally:
            await stream.close()
            await stage.close()

    asyncio.run(scenario())
