"""A model of transformers comes in, is trained by a judged swarm, goes out and is loaded there again."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import open_text
from blocktrain.data.dataset import Dataset
from blocktrain.local.assembly import save_model
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.engine.requests import GenerationRequest
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.hugging_face import export_folder, import_folder
from tests.end_to_end.swarm_kit import TINY, Coordinator, Kit

CPU = torch.device("cpu")


def made(folder: Path, family: str, dataset: Dataset) -> None:
    import transformers

    kinds: dict[str, Any] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config, model = kinds[family]
    shape = config(
        vocab_size=dataset.manifest.vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=family == "qwen3",
    )
    torch.manual_seed(0)
    model(shape).save_pretrained(folder)
    shutil.copy(dataset.folder / "tokenizer.json", folder / "tokenizer.json")


def swarm_recipe(imported: Recipe, dataset: Dataset) -> Recipe:
    recipe = imported.to_dict()
    recipe |= {key: {**recipe[key], **TINY[key]} for key in ("training", "evaluation", "swarm", "trust")}  # type: ignore[dict-item]
    recipe["data"]["dataset"] = str(dataset.folder)
    recipe["swarm"] |= {"rounds": 4, "steps_per_round": 5, "codec": "sign"}
    recipe["trust"]["judge"] = "coordinator"
    recipe["training"] |= {"batch": 8, "micro_batch": 4, "recompute": True}
    return resolve_recipe(recipe)


def held_out_ce(folder: Path, recipe: Recipe) -> float:
    loaded = load_checkpoint(folder, CPU)
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, recipe.evaluation, seed=0)
    return evaluator.score_one(loaded.blocks[0], open_text(recipe).first_tokens("held_out", 2000)).ce


async def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    engine = LocalEngine(folder)
    await engine.start()
    request = GenerationRequest(prompt, max_tokens=count, temperature=0.0, seed=0, mode="verify")
    return [token async for chunk in engine.generate(request) for token in chunk.tokens]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_folder_is_trained_by_a_swarm_and_loads_again(
    family: str, kit: Kit, dataset: Dataset, tmp_path: Path
) -> None:
    import transformers

    made(tmp_path / "theirs", family, dataset)
    imported = import_folder(tmp_path / "theirs", tmp_path / "begin")
    recipe = swarm_recipe(imported, dataset)
    coordinator = Coordinator(kit, recipe, options=["--from", str(tmp_path / "begin")]).start()
    options = ["--data-dir", str(kit.folder / "worker"), "--device", "cpu"]
    worker = kit.start("worker", ["worker", "--coordinator", coordinator.url, *options])
    status = coordinator.finished()
    assert worker.wait(30) == 0, worker.text()
    assert status.blocks[0].head_version == 4
    assert coordinator.verify().merges == 4

    save_model(coordinator.url, tmp_path / "trained")
    before, after = (held_out_ce(tmp_path / name, recipe) for name in ("begin", "trained"))
    assert after < before - 0.05
    export_folder(tmp_path / "trained", tmp_path / "out", "card")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == family
    prompt = open_text(recipe).first_tokens("held_out", 40).tolist()[:8]
    with torch.no_grad():
        written = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert asyncio.run(greedy(tmp_path / "trained", prompt, 12)) == written[0, 8:].tolist()
    assert import_folder(tmp_path / "out", tmp_path / "back").model == recipe.model
