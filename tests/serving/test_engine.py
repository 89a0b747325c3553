"""A model served as stages equals the whole model: log-probs, scores and text, in every mode."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.config import EvaluationConfig
from blocktrain.model.generation import LocalModel, generate
from blocktrain.serving.engine import rows
from blocktrain.serving.engine.engine import SCORING_WINDOWS_AT_ONCE
from blocktrain.serving.engine.link import LinkConfig
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.remote import EngineConfig, RemoteEngine, StageRefusedError
from blocktrain.serving.engine.requests import (
    DeadlineError,
    GenerationRequest,
    GenerationStats,
    RequestError,
    StagesUnavailableError,
)
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.wire.frames import Codec, FrameType
from blocktrain.wire.identity import Identity
from tests.serving.cluster import HOUR, PROMPTS, cluster, drain, text_of
from tests.serving.stages import start_stage
from tests.waiting import until_async

LENGTHS = [None, 0, 1, 2, 3, 7, 16, 32]


def test_served_log_probs_equal_the_local_model(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))

    async def served() -> None:
        async with cluster(checkpoint) as c:
            for prompt, mode in itertools.product(PROMPTS, ("ar", "verify")):
                request = GenerationRequest(list(prompt), 8, mode=mode, logprobs=256, draft_tokens=3)  # type: ignore[arg-type]
                tokens = list(prompt)
                model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
                async for chunk in c.engine.generate(request):
                    assert chunk.logprobs is not None
                    for token, found in zip(chunk.tokens, chunk.logprobs, strict=True):
                        expected = model.next_log_probs(tokens).numpy()
                        row = np.empty(256)
                        row[[t for t, _ in found.top]] = [p for _, p in found.top]
                        np.testing.assert_allclose(row, expected, atol=1e-4)
                        assert found.logprob == row[found.token]
                        tokens.append(token)

    asyncio.run(served())


def test_scores_equal_training_evaluation(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))
    text = (b"The value of the expression is a new list. " * 9)[:350]
    tokens = loaded.tokenizer.encode(text)
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, EvaluationConfig(), seed=0)
    expected = evaluator.score(loaded.blocks, loaded.pooling, tokens, euler=False).consensus.ce

    async def served() -> tuple[float, float]:
        local = LocalEngine(checkpoint)
        await local.start()
        async with cluster(checkpoint, [[0, 1], [2]]) as c:
            scores = [await engine.score(list(text), top=2) for engine in (c.engine, local)]
        await local.close()
        assert all(len(score) == len(text) - 1 for score in scores)
        assert [s.token for s in scores[0]] == list(text[1:])
        return tuple(-float(np.mean([s.logprob for s in score])) for score in scores)  # type: ignore[return-value]

    for ce in asyncio.run(served()):
        assert ce == pytest.approx(expected, abs=1e-5)


def test_a_long_text_is_scored_a_few_windows_at_a_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = most = 0

    async def served() -> None:
        engine = LocalEngine(checkpoint)
        rows_of = engine.window_rows

        async def watched(ids: Sequence[int], deadline: float, stats: GenerationStats) -> rows.Rows:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            found = await rows_of(ids, deadline, stats)
            under_way -= 1
            return found

        monkeypatch.setattr(engine, "window_rows", watched)
        text = [120] * (12 * engine.model.context)
        assert len(await engine.score(text)) == len(text) - 1
        await engine.close()

    asyncio.run(served())
    assert most == SCORING_WINDOWS_AT_ONCE


def test_verify_is_ar_for_any_draft_length_and_both_are_the_local_model(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint, torch.device("cpu"))

    async def served() -> None:
        lengths = itertools.cycle(LENGTHS)
        async with cluster(checkpoint, [[0, 1], [2]]) as c:
            for seed, (prompt, temperature) in enumerate(itertools.product(PROMPTS[::2], (0.0, 1.0))):
                settings = {"seed": seed, "temperature": temperature}
                model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
                local = list(generate(model, list(prompt), max_tokens=24, **settings))  # type: ignore[arg-type]
                ar, stats = await text_of(c.engine, prompt, 24, mode="ar", **settings)
                assert ar == local
                assert stats.traversals == 24 + stats.exact_passes
                k = next(lengths)
                verify, _ = await text_of(c.engine, prompt, 24, draft_tokens=k, **settings)
                assert verify == ar, f"K = {k}, temperature {temperature}"

    asyncio.run(served())


def test_passes_of_fixed_shapes_write_the_same_texts(checkpoint: Path) -> None:
    async def served(graphs: bool) -> list[list[int]]:
        async with cluster(checkpoint, [[0, 1], [2]], stage={"graphs": graphs}) as c:
            writing = [
                text_of(c.engine, prompt, 12, mode=mode, seed=seed, draft_tokens=5)
                for seed, prompt in enumerate(PROMPTS[:2])
                for mode in ("ar", "verify")
            ]
            # At once, so that they share passes.
            return [text for text, _ in await asyncio.gather(*writing)]

    fixed, free = asyncio.run(served(True)), asyncio.run(served(False))
    assert fixed == free
    assert fixed[::2] == fixed[1::2]


@pytest.mark.parametrize("settings", [{"top_p": 0.7}, {"temperature": 0.5}, {"logprobs": 1}])
def test_verify_is_ar_with_other_sampling(checkpoint: Path, settings: dict[str, object]) -> None:
    async def served() -> None:
        async with cluster(checkpoint) as c:
            for prompt in PROMPTS[:3]:
                ar, _ = await text_of(c.engine, prompt, 24, mode="ar", seed=5, **settings)
                verify, _ = await text_of(c.engine, prompt, 24, seed=5, draft_tokens=6, **settings)
                assert verify == ar

    asyncio.run(served())


def test_text_does_not_depend_on_the_blocks_that_draft(checkpoint: Path) -> None:
    async def served(count: int) -> tuple[list[int], GenerationStats]:
        async with cluster(checkpoint, draft_blocks=count) as c:
            return await text_of(c.engine, PROMPTS[3], 120, seed=4, draft_tokens=12)

    (one, alone), (two, together), (three, all_of_them) = (asyncio.run(served(n)) for n in (1, 2, 3))
    assert one == two == three
    assert all_of_them.accepted > 0.9 * all_of_them.drafted
    assert alone.traversals > all_of_them.traversals
    assert together.traversals >= all_of_them.traversals


@pytest.mark.parametrize("codec", [Codec.F32, Codec.Q16, Codec.Q8])
def test_text_does_not_depend_on_the_codec(checkpoint: Path, codec: Codec) -> None:
    async def served() -> None:
        local = LocalEngine(checkpoint)
        await local.start()
        async with cluster(checkpoint, [[0], [1, 2]], codec=codec, best_tokens=0) as c:
            for seed, prompt in enumerate(PROMPTS[:2]):
                expected, _ = await text_of(local, prompt, 32, mode="ar", seed=seed)
                for mode in ("ar", "verify"):
                    found, stats = await text_of(c.engine, prompt, 32, mode=mode, seed=seed)
                    assert found == expected
                    if codec == Codec.F32:
                        assert stats.exact_passes <= 1
        await local.close()

    asyncio.run(served())


def test_exact_passes_settle_near_ties_to_the_same_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def text(tolerance: float) -> tuple[list[int], int]:
        monkeypatch.setattr(rows, "FLOAT32_TOLERANCE", tolerance)
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            tokens, stats = await text_of(c.engine, PROMPTS[0], 60, seed=1)
            return tokens, stats.exact_passes

    usual, _ = asyncio.run(text(1e-4))
    careful, passes = asyncio.run(text(0.2))
    assert careful == usual
    assert passes > 3


def test_concurrent_requests_share_passes_and_keep_their_texts(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0], [1, 2]]) as c:
            seeds = range(12)
            alone = [await text_of(c.engine, PROMPTS[s % 7], 16, seed=s) for s in seeds]
            together = await asyncio.gather(*(text_of(c.engine, PROMPTS[s % 7], 16, seed=s) for s in seeds))
            assert [t for t, _ in together] == [t for t, _ in alone]
            batches = c.stages[0].metrics.batch_sessions
            samples = {s.name.rsplit("_", 1)[1]: s.value for m in batches.collect() for s in m.samples}
            assert samples["sum"] > samples["count"], "some forward pass held more than one session"

    asyncio.run(served())


def test_evicted_sessions_resend_their_ids_and_keep_their_text(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            expected = [(await text_of(c.engine, p, 16, seed=3))[0] for p in PROMPTS[:4]]
        async with cluster(checkpoint, [[0, 1, 2]], stage={"max_sessions": 2}) as c:
            found = await asyncio.gather(*(text_of(c.engine, p, 16, seed=3) for p in PROMPTS[:4]))
            assert [tokens for tokens, _ in found] == expected
            assert sum(stats.retries for _, stats in found) > 0
            assert c.stages[0].sessions.num_evicted > 0

    asyncio.run(served())


def test_stats_count_what_crossed_the_wire(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0], [1], [2]]) as c:
            _, ar = await text_of(c.engine, PROMPTS[0], 20, mode="ar")
            _, verify = await text_of(c.engine, PROMPTS[0], 20, draft_tokens=8)
            assert verify.traversals < ar.traversals
            assert verify.drafted <= 8 * verify.traversals
            assert verify.tokens == ar.tokens == 20
            assert 20 - verify.traversals <= verify.accepted < 20
            # The best tokens' row for each token from each stage, and those of drafts that were wrong.
            assert 3 * 20 * 512 > verify.wire_bytes_received >= 3 * 20 * 100

    asyncio.run(served())


def test_cancellation_and_completion_free_the_caches(checkpoint: Path) -> None:
    async def served() -> None:
        # Text and drafts may be long enough to be kept for others.
        async with cluster(checkpoint, kept_sessions=0) as c:
            generation = c.engine.generate(GenerationRequest(list(PROMPTS[0]), 500))
            await anext(generation)
            assert all(len(stage.sessions) == 1 for stage in c.stages)
            await generation.aclose()
            await until_async(lambda: not any(len(stage.sessions) for stage in c.stages))
            task = asyncio.create_task(drain(c.engine.generate(GenerationRequest(list(PROMPTS[0]), 500))))
            await until_async(lambda: all(len(stage.sessions) == 1 for stage in c.stages))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until_async(lambda: not any(len(stage.sessions) for stage in c.stages))
            assert len(c.engine.running) == 0

    asyncio.run(served())


def test_a_forgotten_generation_frees_its_caches(checkpoint: Path) -> None:
    async def served() -> None:
        # Text and drafts may be long enough to be kept for others.
        async with cluster(checkpoint, kept_sessions=0) as c:

            async def forget() -> None:
                async for _ in c.engine.generate(GenerationRequest(list(PROMPTS[0]), 500)):
                    break

            await forget()
            gc.collect()
            await until_async(lambda: not any(len(stage.sessions) for stage in c.stages))
            assert len(c.engine.running) == 0

    asyncio.run(served())


def test_many_requests_leak_nothing(checkpoint: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2]]) as c:
            await text_of(c.engine, PROMPTS[2], 2)
            tasks, files = len(asyncio.all_tasks()), open_files()
            for wave in range(15):
                requests = (text_of(c.engine, PROMPTS[2], 2, seed=wave * 10 + i) for i in range(10))
                await asyncio.gather(*requests)
            await until_async(lambda: not len(c.stages[0].sessions))
            await until_async(lambda: len(asyncio.all_tasks()) <= tasks)
            assert open_files() <= files
            assert not c.engine.links[0]._pending
            assert len(c.engine.running) == 0

    asyncio.run(served())


def test_deadline_ends_a_request_and_says_how_far_it_came(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, kept_sessions=0) as c:
            for proxy in c.proxies:
                proxy.delay_seconds = 0.1
            with pytest.raises(DeadlineError, match="of 500 tokens"):
                await text_of(c.engine, PROMPTS[0], 500, deadline_seconds=0.7)
            with pytest.raises(DeadlineError):
                await c.engine.score(list(b"abc" * 100), deadline_seconds=0.05)
            for proxy in c.proxies:
                proxy.delay_seconds = 0.0
            await until_async(lambda: not any(len(stage.sessions) for stage in c.stages))

    asyncio.run(served())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [256]}, "outside 0..255"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"draft_tokens": 33}, "draft_tokens"),
        ({"logprobs": 300}, "logprobs"),
        ({"mode": "sweep"}, "mode sweep is not offered by 'tiny'.*objective.sweep_probability"),
        ({"passes": 17}, "passes must be between 1 and 16"),
        ({"passes": 2}, "passes are for mode sweep"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(
    checkpoint: Path, settings: dict[str, object], words: str
) -> None:
    values = {"prompt": [1], "max_tokens": 1} | settings
    with pytest.raises(RequestError, match=words):
        GenerationRequest(**values).check(LocalEngine(checkpoint).model)  # type: ignore[arg-type]


def test_a_stage_with_another_checkpoint_is_refused_by_name(checkpoint: Path, other_checkpoint: Path) -> None:
    async def served() -> None:
        stage = await start_stage(other_checkpoint, [0, 1, 2])
        engine = RemoteEngine(checkpoint, EngineConfig(stages=[stage.address]))
        with pytest.raises(StageRefusedError, match=r"'other'.*'tiny'.*same checkpoint"):
            await engine.start()
        await stage.close()

    asyncio.run(served())


def test_a_missing_block_is_named(checkpoint: Path) -> None:
    async def served() -> None:
        async with cluster(checkpoint, [[0], [2]]) as c:
            ready, sentence = c.engine.ready
            assert not ready
            assert "no stage serves block 1 of 3" in sentence
            with pytest.raises(StagesUnavailableError, match="--blocks 1"):
                c.engine.generate(GenerationRequest([1], 1))

    asyncio.run(served())


def test_a_dead_spare_does_not_hold_up_the_start(checkpoint: Path) -> None:
    async def served() -> None:
        stage = await start_stage(checkpoint, [0, 1, 2])
        places = [stage.address, Address("127.0.0.1", 1)]
        engine = RemoteEngine(checkpoint, EngineConfig(stages=places, start_seconds=HOUR))
        await engine.start()
        assert engine.ready == (True, "ready")
        await engine.close()
        await stage.close()

    asyncio.run(served())


def test_an_unreachable_stage_is_named_in_the_log_alone(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def served() -> None:
        engine = RemoteEngine(checkpoint, EngineConfig(stages=[Address("127.0.0.1", 1)], start_seconds=0.3))
        await engine.start()
        ready, sentence = engine.ready
        assert not ready
        assert "127.0.0.1" not in sentence
        assert "lost stage address=127.0.0.1:1" in caplog.text
        await engine.close()

    asyncio.run(served())


def test_a_token_is_asked_for(checkpoint: Path) -> None:
    async def served() -> None:
        stage = await start_stage(checkpoint, [0, 1, 2], token="correct horse battery")
        wrong = RemoteEngine(checkpoint, EngineConfig(stages=[stage.address], token="guess"))
        with pytest.raises(StageRefusedError, match="token"):
            await wrong.start()
        right = RemoteEngine(checkpoint, EngineConfig(stages=[stage.address], token="correct horse battery"))
        await right.start()
        assert right.ready == (True, "ready")
        await right.close()
        await stage.close()

    asyncio.run(served())


def test_tls_with_a_pinned_key(checkpoint: Path) -> None:
    async def served() -> None:
        identity, stranger = Identity.generate(), Identity.generate()
        stage = await start_stage(checkpoint, [0, 1, 2], identity=identity)
        host, port = stage.address.host, stage.address.port

        def engine(pin: str | None, start_seconds: float) -> RemoteEngine:
            place = Address(host, port, pin)
            return RemoteEngine(checkpoint, EngineConfig(stages=[place], start_seconds=start_seconds))

        pinned = engine(identity.worker_id, HOUR)
        await pinned.start()
        local = LocalEngine(checkpoint)
        await local.start()
        expected, _ = await text_of(local, PROMPTS[0], 8)
        assert (await text_of(pinned, PROMPTS[0], 8))[0] == expected
        await local.close()
        await pinned.close()
        for pin in (stranger.worker_id, None):
            refused = engine(pin, 0.3)
            await refused.start()
            assert not refused.ready[0]
            await refused.close()
        await stage.close()

    asyncio.run(served())


def test_the_round_trip_to_each_stage_is_measured(checkpoint: Path) -> None:
    patient = LinkConfig(ping_seconds=0.01, connect_seconds=HOUR, dead_seconds=HOUR)

    async def served() -> None:
        async with cluster(checkpoint, link=patient) as c:
            while any(link.round_trip_seconds is None for link in c.engine.links):
                await c.engine.fanout.wait_for_change(1.0)
            assert all(0 < (link.round_trip_seconds or 0) < HOUR for link in c.engine.links)

    asyncio.run(served())


def test_of_two_copies_the_near_one_is_asked(checkpoint: Path) -> None:
    patient = LinkConfig(ping_seconds=0.01, connect_seconds=HOUR, dead_seconds=HOUR)
    asked: list[FrameType] = []

    def counted(kind: FrameType, raw: bytes) -> list[bytes]:
        asked.append(kind)
        return [raw]

    async def served() -> None:
        async with cluster(checkpoint, [[0, 1, 2], [0, 1, 2]], link=patient) as c:
            far, near = c.engine.links
            c.proxies[0].delay_seconds = 0.1
            while near.round_trip_seconds is None or (far.round_trip_seconds or 0) < 0.1:
                await c.engine.fanout.wait_for_change(0.01)
            c.proxies[0].to_stage = counted
            for seed in range(8):
                await text_of(c.engine, PROMPTS[0], 4, seed=seed)
            assert FrameType.TRAVERSE not in asked

    asyncio.run(served())


def test_a_closed_engine_leaves_its_blocks_without_a_search_for_garbage(checkpoint: Path) -> None:
    """What a gateway loaded before it serves is in no such search (`starting.keep_what_is_loaded`)."""
    engines = [LocalEngine(checkpoint)]
    held = weakref.ref(engines[0].batcher.held)

    async def write() -> None:
        engine = engines.pop()
        await text_of(engine, b"Note", 3)
        await engine.close()

    gc.disable()
    try:
        asyncio.run(write())
        assert held() is None
    finally:
        gc.enable()
