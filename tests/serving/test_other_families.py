"""Blocks of the families `llama` and `qwen3`, independent or serial, are served as any others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import resolve_recipe
from blocktrain.ids import CorpusHash
from blocktrain.model.generation import LocalModel, generate
from blocktrain.model.pooling import Pooling
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.requests import RequestError
from blocktrain.training.checkpoint import load_checkpoint, save_checkpoint
from blocktrain.training.setup import Setup
from tests.serving.cluster import cluster, text_of
from tests.tiny import shaken

MODEL = {"width": 32, "heads": 4, "kv_heads": 2, "layers_per_block": 1, "blocks": 3, "context": 48}
CASES: dict[str, tuple[dict[str, Any], Pooling, tuple[tuple[int, ...], ...]]] = {
    "independent": ({"model": {"family": "qwen3"}}, Pooling((0.5, 0.3, 0.2)), ((0,), (1, 2))),
    "unequal": (
        {
            "model": {
                "family": "qwen3",
                "block_layers": (2, 1, 1),
                "block_widths": (64, 32, 32),
                "block_heads": (4, 2, 4),
            }
        },
        Pooling((0.5, 0.3, 0.2)),
        ((0,), (1, 2)),
    ),
    "unequal, ours": (
        {
            "model": {"kv_heads": None, "block_layers": (2, 1, 1), "block_heads": (4, 2, 4)},
            "objective": {"hint_probability": 0.0},
        },
        Pooling((0.5, 0.3, 0.2)),
        ((0,), (1, 2)),
    ),
    "serial": (
        {"model": {"family": "llama"}, "objective": {"kind": "serial"}},
        Pooling((0.0, 0.0, 1.0)),
        ((0, 1, 2),),
    ),
}
PROMPTS = (b"The class of the", b"x" * 60)


def made(folder: Path, settings: dict[str, Any], pooling: Pooling) -> Path:
    recipe = resolve_recipe({**settings, "model": {**MODEL, **settings["model"]}})
    setup = Setup.of(recipe)
    blocks = [shaken(setup.initial(index), seed=index) for index in range(3)]
    save_checkpoint(folder, recipe, CorpusHash("ab" * 32), blocks, setup.codebook()(), pooling)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_way_of_serving_writes_the_text_of_the_model(case: str, tmp_path: Path) -> None:
    settings, pooling, groups = CASES[case]
    path = made(tmp_path / "checkpoint", settings, pooling)
    loaded = load_checkpoint(path, torch.device("cpu"))
    expected = []
    for prompt in PROMPTS:
        model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
        expected.append(list(generate(model, list(prompt), max_tokens=24, seed=3, temperature=0.8)))

    async def written(engine: TextEngine, mode: str) -> list[list[int]]:
        sampling: dict[str, Any] = {"seed": 3, "temperature": 0.8, "mode": mode}
        return [(await text_of(engine, prompt, 24, **sampling))[0] for prompt in PROMPTS]

    async def all_ways() -> None:
        local = LocalEngine(path)
        await local.start()
        assert await written(local, "verify") == expected
        async with cluster(path, groups) as remote:
            assert await written(remote.engine, "ar") == expected
            assert await written(remote.engine, "verify") == expected
            with pytest.raises(RequestError, match="sweep is not offered"):
                await written(remote.engine, "sweep")

    asyncio.run(all_ways())
