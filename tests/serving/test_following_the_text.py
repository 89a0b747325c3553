"""Weights that follow the text, served: the same text in every mode, from any stages; any subset answers."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from blocktrain.config import EvaluationConfig
from blocktrain.model.generation import LocalModel, generate
from blocktrain.serving.engine.fanout import FanoutConfig
from blocktrain.serving.engine.link import LinkConfig
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.requests import GenerationRequest
from blocktrain.serving.fingerprint import fingerprint
from blocktrain.serving.gateway.main import background_gateway
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.evaluation import Evaluator
from tests.serving.cluster import HOUR, PROMPTS, cluster, drain, text_of

CPU = torch.device("cpu")


def test_verify_is_ar_and_both_are_the_local_model(following_checkpoint: Path, checkpoint: Path) -> None:
    """Beyond the context too, where the window slides and the record starts over."""
    loaded, plain = load_checkpoint(following_checkpoint, CPU), load_checkpoint(checkpoint, CPU)

    async def served() -> int:
        differ = 0
        lengths = itertools.cycle([None, 1, 7, 32])
        async with cluster(following_checkpoint, [[0, 1], [2]]) as c:
            for seed, prompt in enumerate(PROMPTS[2:6]):
                settings = {"seed": seed, "temperature": float(seed % 2)}
                model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
                local = list(generate(model, list(prompt), max_tokens=24, **settings))  # type: ignore[arg-type]
                ar, _ = await text_of(c.engine, prompt, 24, mode="ar", **settings)
                verify, _ = await text_of(c.engine, prompt, 24, draft_tokens=next(lengths), **settings)
                assert local == ar == verify
                fixed = LocalModel(plain.objective, plain.blocks, plain.codebook_VD, plain.pooling)
                differ += local != list(generate(fixed, list(prompt), max_tokens=24, **settings))  # type: ignore[arg-type]
        return differ

    assert asyncio.run(served()) > 0, "the weights must matter, or this shows nothing"


def test_scores_equal_training_evaluation_and_weights_come_with_them(following_checkpoint: Path) -> None:
    loaded = load_checkpoint(following_checkpoint, CPU)
    text = (b"The value of the expression is a new list. " * 9)[:350]
    tokens = loaded.tokenizer.encode(text)
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, EvaluationConfig(), seed=0)
    expected = evaluator.score(loaded.blocks, loaded.pooling, tokens, euler=False).consensus.ce

    async def served() -> None:
        local = LocalEngine(following_checkpoint)
        async with cluster(following_checkpoint, [[0, 1], [2]]) as c:
            remote_scores, local_scores = [await one.score(list(text)) for one in (c.engine, local)]
        await local.close()
        for scores in (remote_scores, local_scores):
            assert -np.mean([score.logprob for score in scores]) == pytest.approx(expected, abs=1e-5)
            # A window's first position has seen nothing: its weights are the prior.
            assert scores[96].weights == pytest.approx(loaded.pooling.weights)
            assert scores[95].weights != pytest.approx(loaded.pooling.weights, rel=0.1)
        for one, other in zip(remote_scores, local_scores, strict=True):
            assert sum(one.weights) == pytest.approx(1)
            assert one.weights == pytest.approx(other.weights, abs=1e-5)

    asyncio.run(served())


def test_stages_that_come_and_go_change_nothing(following_checkpoint: Path) -> None:
    """What a stage knows of a text is a function of its ids: a spare works it out again."""
    # No spare is asked because the machine is busy: which stages hold the text is looked up below.
    quick = FanoutConfig(degrade_seconds=0.5, hedge_seconds=HOUR)
    link = LinkConfig(connect_seconds=HOUR, suspect_seconds=HOUR, dead_seconds=HOUR)

    async def served() -> None:
        local = LocalEngine(following_checkpoint)
        request = GenerationRequest(list(PROMPTS[0]), 60, seed=9, draft_tokens=2)
        expected = await drain(local.generate(request))
        await local.close()
        async with cluster(following_checkpoint, [[0], [1, 2], [0], [1, 2]], fanout=quick, link=link) as c:
            generation, written, asked = c.engine.generate(request), list[int](), set[int]()
            async for chunk in generation:
                written += chunk.tokens
                if generation.stats.traversals >= 3 and not asked:
                    [session] = c.engine.running
                    asked = set(next(iter(session.windows.values())).caches)
                    for number in asked:
                        await c.stages[number].close()
            assert written == expected
            assert generation.stats.degraded_blocks == []
            # Some blocks alone still answer, with weights among those that are there.
            await c.stages[({0, 2} - asked).pop()].close()
            tokens, stats = await text_of(c.engine, PROMPTS[0], 10, seed=9)
            assert len(tokens) == 10
            assert stats.degraded_blocks == [0]
            [score] = await c.engine.score(list(b"ab"))
            assert score.weights[0] == 0
            assert sum(score.weights) == pytest.approx(1)

    asyncio.run(served())


def test_a_completion_can_tell_what_each_block_counted_for(following_checkpoint: Path) -> None:
    body = {"model": "tiny", "prompt": "The value", "max_tokens": 12, "seed": 1, "block_weights": True}
    prior = load_checkpoint(following_checkpoint, CPU).pooling.weights
    with (
        background_gateway(LocalEngine(following_checkpoint)) as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        told = http.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]
        assert told["logprobs"] is None
        assert len(told["block_weights"]) == 9 + 12
        assert told["block_weights"][0] is None
        assert told["block_weights"][1] == pytest.approx(prior)
        assert all(sum(weights) == pytest.approx(1) for weights in told["block_weights"][1:])
        ar = http.post("/v1/completions", json={**body, "mode": "ar"}).json()["choices"][0]
        assert ar["text"] == told["text"].removeprefix("The value")
        assert ar["block_weights"][5] == pytest.approx(told["block_weights"][9 + 5], abs=1e-5)
        plain = http.post("/v1/completions", json={**body, "block_weights": False}).json()["choices"][0]
        assert "block_weights" not in plain
        refused = http.post("/v1/completions", json={**body, "mode": "sweep"}).json()["error"]
        assert "blocks take turns" in refused["message"]


def test_another_pooling_is_another_model(following_checkpoint: Path, checkpoint: Path) -> None:
    one, other = (
        fingerprint(path, load_checkpoint(path, CPU)) for path in (following_checkpoint, checkpoint)
    )
    assert one.model_hash != other.model_hash
