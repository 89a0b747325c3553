"""Parts of a serial model on stages that hand on to one another: the text is that of the whole model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import resolve_recipe
from blocktrain.ids import CorpusHash
from blocktrain.model.generation import LocalModel, generate
from blocktrain.model.pooling import Pooling
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.training.checkpoint import load_checkpoint, save_checkpoint
from blocktrain.training.setup import Setup
from tests.serving.cluster import cluster, text_of
from tests.tiny import shaken
from tests.waiting import until_async

MODEL = {"family": "llama", "width": 32, "heads": 4, "kv_heads": 2, "layers_per_block": 1, "blocks": 3}
RECIPE: dict[str, Any] = {"model": {**MODEL, "context": 48}, "objective": {"kind": "serial"}}
# The second slides over the context twice.
PROMPTS = (b"The class of the", b"x" * 40)
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts with random weights that say something."""
    recipe = resolve_recipe(RECIPE)
    setup = Setup.of(recipe)
    parts = [shaken(setup.initial(index), seed=index) for index in range(3)]
    folder = tmp_path_factory.mktemp("serial")
    save_checkpoint(
        folder, recipe, CorpusHash("ab" * 32), parts, setup.codebook()(), Pooling((0.0, 0.0, 1.0))
    )
    return folder


def expected_text(path: Path, prompt: bytes, temperature: float) -> list[int]:
    loaded = load_checkpoint(path, torch.device("cpu"))
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
    return list(generate(model, list(prompt), max_tokens=NEW_TOKENS, seed=3, temperature=temperature))


@pytest.mark.parametrize("groups", [((0,), (1,), (2,)), ((0, 1), (1, 2)), ((2,), (0, 1))])
def test_stages_in_series_write_the_text_of_the_whole_model(
    serial: Path, groups: Sequence[Sequence[int]]
) -> None:
    async def served() -> None:
        async with cluster(serial, groups) as c:
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
            # Every cache is freed when its text is complete.
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
