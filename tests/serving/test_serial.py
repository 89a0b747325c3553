"""Parts of a serial model on stages that hand on to one another: the text is that of the whole model."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blocktrain.data.bpe import train_bpe
from blocktrain.errors import UserError
from blocktrain.local.launcher import LaunchConfig, stage_programs
from blocktrain.model.generation import LocalModel, generate
from blocktrain.serving.engine import pipeline
from blocktrain.serving.engine.fanout import Candidate, FanoutConfig
from blocktrain.serving.engine.link import LinkConfig
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.lookup import looked_up
from blocktrain.serving.engine.pipeline import cheapest_chain
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats, StagesUnavailableError
from blocktrain.serving.stage.main import load_blocks
from blocktrain.serving.transport import ConnectionLostError
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.hugging_face import import_folder
from blocktrain.wire.frame_metadata import Ask, Failure, Handed, Hop, decode_metadata, encode_metadata
from blocktrain.wire.frames import (
    ActivationCodec,
    Codec,
    FrameType,
    Header,
    encode_activations,
    encode_frame,
)
from blocktrain.wire.identity import load_or_create
from tests.serving.cluster import HOUR, PATIENT, cluster, text_of
from tests.serving.stages import greeted, reply, spawn, start_stage, tokens_computed, wait_ready
from tests.tiny import prose
from tests.waiting import until_async

LINK = LinkConfig(connect_seconds=HOUR, ping_seconds=0.1, suspect_seconds=0.5, dead_seconds=2.0)
WAITS: dict[str, Any] = {"fanout": FanoutConfig(degrade_seconds=HOUR, slow_seconds=HOUR), "link": LINK}
GIVES_UP: dict[str, Any] = {"fanout": FanoutConfig(degrade_seconds=0.5), "link": LINK}
# The window slides over the second.
PROMPTS = (b"The class of the", b"x" * 40)
NEW_TOKENS = 24


@cache
def expected_text(path: Path, prompt: bytes, temperature: float) -> list[int]:
    loaded = load_checkpoint(path, torch.device("cpu"))
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
    return list(generate(model, list(prompt), max_tokens=NEW_TOKENS, seed=3, temperature=temperature))


@pytest.mark.parametrize(
    ("groups", "graphs"),
    [
        (((0,), (1,), (2,)), False),
        (((0,), (1,), (2,)), True),
        (((0, 1), (1, 2)), False),
        (((0, 1), (1, 2)), True),
        (((2,), (0, 1)), False),
        (((2,), (0, 1)), True),
    ],
)
def test_stages_in_series_write_the_text_of_the_whole_model(
    serial: Path, groups: Sequence[Sequence[int]], graphs: bool
) -> None:
    async def served() -> None:
        async with cluster(serial, groups, stage={"graphs": graphs}) as c:
            for temperature in (0.0, 1.0):
                for mode in ("ar", "verify"):
                    texts = await asyncio.gather(
                        *(
                            text_of(c.engine, prompt, NEW_TOKENS, seed=3, temperature=temperature, mode=mode)
                            for prompt in PROMPTS
                        )
                    )
                    expected = [expected_text(serial, prompt, temperature) for prompt in PROMPTS]
                    assert [tokens for tokens, _ in texts] == expected
                    assert all(stats.retries == 0 for _, stats in texts)
            # Every cache is freed: those that are kept for other texts, when the engine is closed.
            await c.engine.close()
            await until_async(lambda: not any(len(stage.sessions) for stage in c.stages))

    asyncio.run(served())


def test_scores_and_log_probs_through_the_chain_are_those_of_one_process(serial: Path) -> None:
    text = list(b"A text that is longer than the context of this model, so that it takes two windows.")

    async def served() -> None:
        local = LocalEngine(serial)
        expected = await local.score(text, top=2)
        async with cluster(serial, ((0,), (1, 2))) as c:
            found = await c.engine.score(text, top=2)
        await local.close()
        assert [one.token for one in found] == [one.token for one in expected]
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)

    asyncio.run(served())


def test_a_chain_whose_addresses_do_not_fit_into_a_question_is_refused_with_a_sentence(
    serial: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def served() -> None:
        async with cluster(serial, ((0,), (1,), (2,))) as c:
            monkeypatch.setattr(pipeline, "MAX_CHAIN_BYTES", 50)
            with pytest.raises(
                StagesUnavailableError, match=r"3 stages take \d+ bytes; expected at most 50: "
            ):
                await text_of(c.engine, PROMPTS[0], NEW_TOKENS, seed=3, mode="ar")

    asyncio.run(served())


def test_the_best_tokens_and_then_whole_rows_come_through_the_chain(serial: Path) -> None:
    async def served() -> GenerationStats:
        async with cluster(serial, best_tokens=1) as c:
            tokens, stats = await text_of(c.engine, PROMPTS[0], NEW_TOKENS, seed=3, mode="ar")
            assert tokens == expected_text(serial, PROMPTS[0], 1.0)
            return stats

    # One token has no other to be better than.
    assert asyncio.run(served()).second_questions == NEW_TOKENS


@pytest.mark.parametrize("activations", [ActivationCodec.BF16, ActivationCodec.Q8])
def test_shorter_activations_change_scores_a_little(serial: Path, activations: ActivationCodec) -> None:
    text = list(b"A text that is scored with rounded activations.")

    async def scores(**config: Any) -> list[float]:
        async with cluster(serial, **config) as c:
            return [one.logprob for one in await c.engine.score(text)]

    exact, rounded = asyncio.run(scores()), asyncio.run(scores(activations=activations))
    errors = [abs(one - other) for one, other in zip(exact, rounded, strict=True)]
    assert 0 < max(errors) < 0.3


def test_an_imported_model_writes_what_transformers_writes(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    make: Any = transformers.LlamaForCausalLM
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer.json").write_bytes(train_bpe([prose(4000).decode()], 300))
    import_folder(tmp_path / "folder", tmp_path / "checkpoint", parts=3)
    prompt = [7, 250, 3, 99, 120]
    known = torch.tensor([prompt])
    written = model.generate(known, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(known))

    async def served() -> list[int]:
        async with cluster(tmp_path / "checkpoint") as c:
            return (await text_of(c.engine, prompt, 40, temperature=0.0))[0]

    assert asyncio.run(served()) == written[0, len(prompt) :].tolist()


# --- what goes wrong ------------------------------------------------------------------------------------


async def disturbed_text(engine: RemoteEngine, path: Path, disturb: Callable[[], None]) -> GenerationStats:
    """A text in which something happens after a few traversals; it must be the usual one."""
    request = GenerationRequest(list(PROMPTS[0]), NEW_TOKENS, seed=3, mode="ar", deadline_seconds=HOUR)
    generation, tokens, disturbed = engine.generate(request), list[int](), False
    async for chunk in generation:
        tokens += chunk.tokens
        if len(tokens) >= 5 and not disturbed:
            disturb()
            disturbed = True
    assert tokens == expected_text(path, PROMPTS[0], 1.0)
    return generation.stats


def test_kill_9_of_any_part_with_a_spare_changes_nothing(serial: Path) -> None:
    """One after another, the first stage of every part is killed; its spare goes on."""
    processes = [wait_ready(one) for one in [spawn(serial, part) for part in ("0", "1", "2") * 2]]

    async def served() -> None:
        engine = RemoteEngine(serial, EngineConfig(stages=[p.address for p in processes], **PATIENT))
        await engine.start()
        try:
            for victim in range(3):
                # The chain goes through the victim: every other stage of its part is asked last.
                for link in engine.links:
                    link.slow_until = HOUR**2 if link.number == victim + 3 else 0.0
                stats = await disturbed_text(engine, serial, processes[victim].kill)
                assert stats.retries > 0
        finally:
            await engine.close()

    try:
        asyncio.run(served())
    finally:
        for process in processes:
            process.stop()


def test_resets_stalls_and_unreachable_neighbours_change_nothing(serial: Path) -> None:
    async def served() -> None:
        async with cluster(serial, ((0,), (1,), (2,), (1,)), **WAITS) as c:

            def through(link: int) -> None:
                c.engine.links[4 - link].slow_until = HOUR**2
                c.engine.links[link].slow_until = 0.0

            # The gateway reaches the spare, the stage before it does not.
            through(3)
            c.proxies[3].accepting = False
            assert (await disturbed_text(c.engine, serial, lambda: None)).retries > 0
            assert c.engine.links[3].slow_until > 0
            c.proxies[3].accepting = True
            through(1)
            assert (await disturbed_text(c.engine, serial, c.proxies[2].cut)).retries > 0
            assert (await disturbed_text(c.engine, serial, c.proxies[1].stall)).retries > 0
            c.proxies[1].heal()

    asyncio.run(served())


def test_what_is_lost_between_two_stages_is_asked_for_again(serial: Path) -> None:
    lost: list[FrameType] = []

    def lose_one(kind: FrameType, raw: bytes) -> list[bytes]:
        if kind != FrameType.HAND_ON or len(lost) == 2:
            return [raw]
        lost.append(kind)
        return []

    async def served() -> None:
        hasty = FanoutConfig(degrade_seconds=HOUR, hedge_seconds=0.02)
        async with cluster(serial, fanout=hasty) as c:
            c.proxies[2].to_stage = lose_one
            stats = await disturbed_text(c.engine, serial, lambda: None)
            assert stats.retries >= 2
            assert len(lost) == 2

    asyncio.run(served())


def test_a_part_that_is_gone_is_an_error_that_names_it(serial: Path) -> None:
    async def served() -> None:
        async with cluster(serial, **GIVES_UP) as c:
            c.proxies[1].accepting = False
            c.proxies[1].cut()
            with pytest.raises(StagesUnavailableError, match="no stage serves part 1 now"):
                await text_of(c.engine, PROMPTS[0], mode="ar")
            assert c.engine.ready[0] is False
            c.proxies[1].accepting = True
            await until_async(lambda: c.engine.ready[0])
            assert len((await text_of(c.engine, PROMPTS[0], 5, mode="ar"))[0]) == 5

    asyncio.run(served())


def test_stages_hand_on_over_tls_with_their_token(serial: Path, tmp_path: Path) -> None:
    secret = "a secret of some length"

    async def served() -> None:
        identity = load_or_create(tmp_path / "key")
        stages = [await start_stage(serial, [part], identity=identity, token=secret) for part in range(3)]
        addresses = [replace(stage.address, pin=identity.worker_id) for stage in stages]
        engine = RemoteEngine(serial, EngineConfig(stages=addresses, token=secret, **PATIENT))
        await engine.start()
        tokens, _ = await text_of(engine, PROMPTS[0], NEW_TOKENS, seed=3)
        assert tokens == expected_text(serial, PROMPTS[0], 1.0)
        await engine.close()
        for stage in stages:
            await stage.close()

    asyncio.run(served())


def handed(ask: Ask, payload: bytes, *, kind: FrameType = FrameType.TRAVERSE, **names: int) -> bytes:
    header = Header(FrameType.HAND_ON, Codec.F32, session=1, traversal=1, **{"rows": 1, **names})
    return encode_frame(header, encode_metadata(Handed("test", kind, ask)), payload)


NEXT = [Hop("127.0.0.1:9", [2])]
VALUES = encode_activations(np.zeros((2, 32), np.float32), ActivationCodec.F32)
NOT_FINITE = encode_activations(np.full((2, 32), np.nan, np.float32), ActivationCodec.F32)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "blocks of others": (handed(Ask([0], onward=NEXT), b"ab" + VALUES), "expected blocks among"),
    "no next stage": (handed(Ask([1]), b"ab" + VALUES), "the next stage unless the last"),
    "no address": (handed(Ask([1], onward=[Hop("x", [2])]), b"ab" + VALUES), "expected an address"),
    "another machine": (handed(Ask([1], onward=[Hop("10.0.0.1:9", [2])]), b"ab" + VALUES), "without a token"),
    "a closed port": (handed(Ask([1], onward=NEXT), b"ab" + VALUES), "cannot hand on"),
    "short activations": (handed(Ask([1], onward=NEXT), b"ab" + VALUES[:-1]), "expected 1 positions"),
    "not finite": (handed(Ask([1], onward=NEXT), b"ab" + NOT_FINITE), "expected finite activations"),
    "beyond the context": (handed(Ask([1], onward=NEXT), b"ab" + VALUES, base=47), "positions up to 48"),
    "more rows than ids": (handed(Ask([1], onward=NEXT), b"ab" + VALUES, rows=3), "expected 1 to 2 rows"),
    "a question in it": (handed(Ask([1], onward=NEXT), b"ab" + VALUES, kind=FrameType.PING), "found PING"),
}


def test_hostile_frames_from_another_stage_get_a_sentence(serial: Path) -> None:
    async def served() -> None:
        stage = await start_stage(serial, [1])
        stream = await greeted(stage)
        for name, (raw, expected) in HOSTILE.items():
            frame = await reply(stream, raw)
            assert frame.type == FrameType.FAILED, name
            assert expected in decode_metadata(frame, Failure).sentence, name
        # What the next stage would get is not there yet, and a cache that goes on from nothing is refused.
        alone = encode_frame(
            Header(FrameType.TRAVERSE, Codec.F32, session=5, traversal=1, rows=1),
            encode_metadata(Ask([1], onward=NEXT)),
            b"ab",
        )
        assert (await reply(stream, alone)).type == FrameType.RESEND
        # A client that is not connected gets no answer, and takes nothing with it.
        stranger = encode_frame(
            Header(FrameType.HAND_ON, Codec.F32, rows=1),
            encode_metadata(Handed("nobody", FrameType.TRAVERSE, Ask([1], onward=NEXT))),
            b"ab" + VALUES,
        )
        await stream.write(stranger)
        assert (await reply(stream, encode_frame(Header(FrameType.PING)))).type == FrameType.PONG
        huge = bytearray(handed(Ask([1], onward=NEXT), b""))
        struct.pack_into("<I", huge, 40, 1 << 30)
        struct.pack_into("<I", huge, 48, zlib.crc32(bytes(huge[:48])))
        with pytest.raises(ConnectionLostError):
            await reply(stream, bytes(huge))
        await stream.close()
        await stage.close()

    asyncio.run(served())


def test_a_stage_holds_neighbouring_parts(serial: Path) -> None:
    with pytest.raises(UserError, match=r"neighbouring parts, found \[0, 2\]"):
        load_blocks(serial, [0, 2], torch.device("cpu"))


def candidate(link: int, *blocks: int, **settings: Any) -> Candidate:
    return Candidate(link, frozenset(blocks), **settings)


def test_the_cheapest_chain_is_short_quick_and_warm() -> None:
    assert cheapest_chain(3, [candidate(0, 0), candidate(1, 2)]).missing == (1,)
    whole = [candidate(0, 0, 1), candidate(1, 1, 2), candidate(2, 2)]
    assert [link for link, _ in cheapest_chain(3, whole).legs] in ([0, 1], [0, 2])
    assert cheapest_chain(3, [*whole, candidate(3, 0, 1, 2)]).legs == [(3, (0, 1, 2))]
    slow = [*whole, candidate(3, 0, 1, 2, slow=True)]
    assert 3 not in [link for link, _ in cheapest_chain(3, slow).legs]
    warm = [candidate(0, 0, 1, warm=True), candidate(1, 2), candidate(2, 2, warm=True)]
    assert cheapest_chain(3, warm, spread=1).legs == [(0, (0, 1)), (2, (2,))]
    near = [candidate(0, 0), candidate(1, 1, round_trip_seconds=0.2), candidate(2, 1), candidate(3, 2)]
    assert [link for link, _ in cheapest_chain(3, near).legs] == [0, 2, 3]
    # Equal stages are shared out by the session's number.
    equal = [candidate(0, 0, 1, 2), candidate(1, 0, 1, 2)]
    assert {cheapest_chain(3, equal, spread=spread).legs[0][0] for spread in (0, 1)} == {0, 1}


def test_guesses_are_what_followed_last_time() -> None:
    assert looked_up([1, 2, 3, 9, 1, 2], 2) == [3, 9]
    assert looked_up([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4], "the last time counts"
    assert looked_up([5, 1, 2, 3, 1, 2, 4, 5, 1, 2], 1) == [3], "longer likeness counts more"
    assert looked_up([1, 2, 3], 4) == []
    assert looked_up([7], 4) == []
    assert looked_up([7, 7, 7, 7], 4) == [7, 7, 7, 7]
    # 0x01000000 twice has the bytes of 1 at no place where a token begins.
    assert looked_up([1 << 24, 1 << 24, 0, 1, 1], 1) == []


def test_repeated_text_is_guessed_and_takes_fewer_traversals(serial: Path) -> None:
    async def served() -> None:
        async with cluster(serial) as c:
            # A bias that leaves one token alone makes a text that repeats itself.
            tokens, stats = await text_of(c.engine, PROMPTS[0], 48, logit_bias=((97, 1000.0),))
            assert tokens == [97] * 48
            assert stats.accepted > 24
            assert stats.traversals < 24
            # Within one window every position is computed once, and no draft that held a second time.
            before = [tokens_computed(stage) for stage in c.stages]
            prompt = b"abcdefgh"
            _, stats = await text_of(c.engine, prompt, 40, logit_bias=((97, 1000.0),))
            assert stats.accepted > 20
            expected = len(prompt) + 39 + stats.drafted - stats.accepted
            assert [tokens_computed(stage) for stage in c.stages] == [expected + one for one in before]
            # And one who guesses wrong guesses less.
            _, stats = await text_of(c.engine, b"abcabcabcabc", NEW_TOKENS, draft_tokens=8, seed=3)
            assert 0 < stats.drafted < NEW_TOKENS

    asyncio.run(served())


def test_serve_deals_out_the_parts_of_a_serial_model(serial: Path, tmp_path: Path) -> None:
    programs = stage_programs(LaunchConfig(checkpoint=serial, num_stages=4, logs=tmp_path))
    assert [program.name for program in programs] == [
        "stage 0 (blocks 0)",
        "stage 1 (blocks 1)",
        "stage 2 (blocks 2)",
        "stage 3 (blocks 0)",
    ]
