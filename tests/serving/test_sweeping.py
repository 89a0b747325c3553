"""Mode `sweep` over stages: the local composition, one traversal, spares, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.model.sweep import begin_sweep, refine, sweep_noise
from blocktrain.serving.blocks import Refinement
from blocktrain.serving.engine.fanout import FanoutConfig
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.questions import run_of_blocks
from blocktrain.serving.engine.requests import GenerationStats, StagesUnavailableError
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.wire.frame_metadata import (
    Failure,
    FailureCode,
    Refine,
    decode_metadata,
    encode_metadata,
)
from blocktrain.wire.frames import (
    Codec,
    Frame,
    FrameType,
    Header,
    encode_frame,
    encode_ids,
    encode_rows,
)
from tests.serving.cluster import cluster, text_of
from tests.serving.stages import greeted, reply, start_stage

PROMPT = b"The function returns "


def local_text(checkpoint: Path, prompt: bytes, max_tokens: int, **settings: object) -> list[int]:
    async def written() -> list[int]:
        engine = LocalEngine(checkpoint)
        await engine.start()
        text, _ = await text_of(engine, prompt, max_tokens, mode="sweep", **settings)
        await engine.close()
        return text

    return asyncio.run(written())


@pytest.mark.parametrize("passes", [1, 3])
def test_a_chain_over_stages_is_the_local_composition(sweep_checkpoint: Path, passes: int) -> None:
    loaded = load_checkpoint(sweep_checkpoint, torch.device("cpu"))
    z0 = sweep_noise(5, len(PROMPT), len(PROMPT) + 39, loaded.recipe.model.width)[None]
    known = torch.tensor([list(PROMPT)])
    with torch.no_grad():
        sweep = begin_sweep(loaded.objective, known, 40, z0)
        blocks = dict(enumerate(loaded.blocks))
        expected = refine(loaded.objective, blocks, loaded.codebook_VD, sweep, passes)[1][0]
    task = Refinement(known=list(PROMPT), num_new=40, seed=5, position=len(PROMPT), passes=passes)

    async def served() -> np.ndarray:
        async with cluster(sweep_checkpoint) as c:
            deadline = asyncio.get_running_loop().time() + 60
            return await c.engine.refine(task, deadline, GenerationStats())

    assert np.abs(asyncio.run(served()) - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("groups", [[[0], [1], [2]], [[0, 1], [2]], [[0, 2], [1]], [[0, 1, 2]]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_served_sweep_text_is_the_local_one_in_one_traversal(
    sweep_checkpoint: Path, groups: Sequence[Sequence[int]], temperature: float
) -> None:
    settings = {"seed": 7, "temperature": temperature, "passes": 2}

    async def served() -> tuple[list[int], GenerationStats]:
        async with cluster(sweep_checkpoint, groups) as c:
            return await text_of(c.engine, PROMPT, 48, mode="sweep", **settings)

    text, stats = asyncio.run(served())
    assert text == local_text(sweep_checkpoint, PROMPT, 48, **settings)
    assert stats.traversals == 1
    assert stats.wire_bytes_received > 48 * 1024


def test_text_longer_than_half_a_context_takes_more_traversals(sweep_checkpoint: Path) -> None:
    async def served() -> tuple[list[int], GenerationStats]:
        async with cluster(sweep_checkpoint) as c:
            return await text_of(c.engine, PROMPT * 10, 120, mode="sweep", logprobs=1)

    text, stats = asyncio.run(served())
    assert len(text) == 120
    assert stats.traversals == 3


def test_a_dead_stage_is_replaced_by_a_spare_and_the_text_stays(sweep_checkpoint: Path) -> None:
    async def served() -> tuple[list[int], GenerationStats]:
        async with cluster(sweep_checkpoint, [[0], [1], [2], [1, 2]]) as c:
            for dying in (1, 2):

                def die(kind: FrameType, raw: bytes) -> list[bytes] | None:
                    return None if kind == FrameType.REFINE else [raw]

                c.proxies[dying].to_stage = die
            return await text_of(c.engine, PROMPT, 30, mode="sweep", seed=3)

    text, stats = asyncio.run(served())
    assert text == local_text(sweep_checkpoint, PROMPT, 30, seed=3)
    assert stats.degraded_blocks == []


def test_a_lost_block_without_a_spare_is_named(sweep_checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(sweep_checkpoint, fanout=FanoutConfig(degrade_seconds=0.3)) as c:
            c.proxies[1].accepting = False
            c.proxies[1].cut()
            with pytest.raises(StagesUnavailableError, match="sweep needs every block, and block 1 is lost"):
                await text_of(c.engine, PROMPT, 30, mode="sweep")

    asyncio.run(served())


def test_a_run_of_blocks_ends_at_the_first_gap() -> None:
    assert run_of_blocks(0, frozenset({0, 1, 3})) == (0, 1)
    assert run_of_blocks(3, frozenset({0, 1, 3})) == (3,)


# ---- what a stage says to clumsy clients ----

HEADER = Header(FrameType.REFINE, Codec.F32, session=1, rows=4)
GOOD = Refine([0, 1], 3, 1, 3, 1, False)
IDS = encode_ids([1, 2, 3], 256)
ROWS = encode_rows(np.full((4, 256), 0.1), Codec.F32)


def ask_one(path: Path, header: Header, metadata: bytes, payload: bytes) -> Frame:
    async def asked() -> Frame:
        stage = await start_stage(path, [0, 1])
        stream = await greeted(stage)
        frame = await reply(stream, encode_frame(header, metadata, payload))
        await stream.close()
        await stage.close()
        return frame

    return asyncio.run(asked())


def test_rows_between_blocks_are_mixtures(sweep_checkpoint: Path) -> None:
    frame = ask_one(sweep_checkpoint, HEADER, encode_metadata(GOOD), IDS)
    assert (frame.type, frame.header.rows) == (FrameType.REFINED, 4)
    rows = np.frombuffer(frame.payload, "<f4").reshape(4, 256)
    assert rows.min() >= 0
    assert rows.sum(axis=1).max() <= 1.001


@pytest.mark.parametrize(
    ("change", "payload"),
    [
        ({"blocks": [1, 0]}, IDS),
        ({"blocks": [0, 2]}, IDS),
        ({"blocks": [2]}, IDS),
        ({"blocks": []}, IDS),
        ({"num_known": 0}, IDS),
        ({"num_known": 2}, IDS),
        ({"num_known": 94}, bytes(94)),
        ({"begun": True}, IDS),
        ({"begun": True}, IDS + ROWS[:-1]),
        ({"begun": True}, IDS + encode_rows(np.full((4, 256), np.nan), Codec.F32)),
        ({}, IDS + ROWS),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else f"{len(value)} bytes",
)
def test_a_refinement_that_makes_no_sense_is_refused(
    sweep_checkpoint: Path, change: dict[str, object], payload: bytes
) -> None:
    values = {name: getattr(GOOD, name) for name in Refine.__struct_fields__} | change
    frame = ask_one(sweep_checkpoint, HEADER, encode_metadata(Refine(**values)), payload)
    assert frame.type == FrameType.FAILED
    assert decode_metadata(frame, Failure).code == FailureCode.BAD_REQUEST


def test_a_stage_of_a_model_without_sweep_says_so(checkpoint: Path) -> None:
    frame = ask_one(checkpoint, HEADER, encode_metadata(GOOD), IDS)
    assert "not trained for sweep" in decode_metadata(frame, Failure).sentence
