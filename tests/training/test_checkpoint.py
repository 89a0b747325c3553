"""A model on disk: what is written comes back, and what is damaged is refused with its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import safetensors.torch
import torch

from blocktrain.config import Recipe
from blocktrain.errors import CheckpointError
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block, make_codebook
from blocktrain.model.families import codebook_rows
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import load_checkpoint, save_checkpoint
from tests.tiny import adaptive, shaken, tiny_recipe

CPU = torch.device("cpu")


def model_of(recipe: Recipe) -> tuple[list[Block], torch.Tensor]:
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    blocks = [shaken(objective.build(b, seed=b), seed=b) for b in range(recipe.model.blocks)]
    return blocks, make_codebook(codebook_rows(recipe.model, recipe.objective, 256), recipe.model.width, 1)


def saved(path: Path, *overrides: str) -> tuple[Recipe, list[Block], torch.Tensor]:
    recipe = tiny_recipe(*overrides)
    blocks, codebook = model_of(recipe)
    pooling = Pooling((1 / len(blocks),) * len(blocks))
    save_checkpoint(path, recipe, CorpusHash("ab" * 32), blocks, codebook, pooling)
    return recipe, blocks, codebook


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "checkpoint"
    saved(path)
    return path


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("objective.kind=chain", "model.blocks=3"),
        ("objective.hint_probability=0",),
        ("model.mixer=none",),
        ("model.convolution=0",),
        ("objective.codebook=learned", "training.order=turns"),
        ("objective.codebook=own", "objective.hint_probability=0"),
        ("name=naïve ✓",),
    ],
    ids=str,
)
def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    recipe, blocks, codebook = saved(tmp_path / "checkpoint", *overrides)
    loaded = load_checkpoint(tmp_path / "checkpoint", CPU)
    assert loaded.recipe == recipe
    assert loaded.corpus_sha256 == "ab" * 32
    assert loaded.pooling.weights == pytest.approx([1 / len(blocks)] * len(blocks))
    assert torch.equal(loaded.codebook_VD, codebook)
    for block, other in zip(blocks, loaded.blocks, strict=True):
        assert not other.training
        expected, found = block.state_dict(), other.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_checkpoint_is_json_and_one_safetensors_file_per_block(original: Path) -> None:
    names = {file.name for file in original.iterdir()}
    assert names == {"config.json", "codebook.safetensors", "block-00.safetensors", "block-01.safetensors"}
    tensors = safetensors.numpy.load_file(original / "block-01.safetensors")
    assert tensors["embedding.weight"].shape == (256, 32)
    assert tensors["layers.0.attention.q.weight"].dtype == "float32"
    config = json.loads((original / "config.json").read_text())
    assert config["recipe"]["model"]["width"] == 32
    assert [entry["bytes"] for entry in config["blocks"]] == [
        (original / entry["file"]).stat().st_size for entry in config["blocks"]
    ]


def test_a_stage_may_load_only_its_own_blocks(original: Path) -> None:
    loaded = load_checkpoint(original, CPU, only=[1])
    whole = load_checkpoint(original, CPU)
    assert len(loaded.blocks) == 1
    assert torch.equal(*(adaptive(one).embedding.weight for one in (loaded.blocks[0], whole.blocks[1])))


def test_saving_again_replaces_the_whole_folder(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint", "model.blocks=3")
    saved(tmp_path / "checkpoint", "model.blocks=1")
    assert not (tmp_path / "checkpoint" / "block-02.safetensors").exists()
    assert len(load_checkpoint(tmp_path / "checkpoint", CPU).blocks) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_the_environment_does_not_reach_a_saved_recipe(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_MODEL_WIDTH", "64")
    assert load_checkpoint(original, CPU).recipe.model.width == 32


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def retensor(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing block": (lambda c: (c / "block-01.safetensors").unlink(), "block-01.safetensors is missing"),
    "a truncated block": (
        lambda c: (c / "block-01.safetensors").write_bytes((c / "block-01.safetensors").read_bytes()[:-1000]),
        "block-01.safetensors is truncated",
    ),
    "an empty block": (
        lambda c: (c / "block-00.safetensors").write_bytes(b""),
        "block-00.safetensors is truncated",
    ),
    "a block that is something else": (
        lambda c: (c / "block-00.safetensors").write_bytes(b"PK\3\4 pickle of a stranger" * 50),
        "block-00.safetensors is truncated or not safetensors",
    ),
    "a block that is a folder": (
        lambda c: replaced_by_a_folder(c / "block-00.safetensors"),
        "block-00.safetensors",
    ),
    "a missing tensor": (
        lambda c: retensor(c / "block-01.safetensors", lambda t: t.pop("out.weight")),
        r"block 1 .*tensor out.weight: expected float32 \[32, 32\], found none",
    ),
    "a surplus tensor": (
        lambda c: retensor(c / "block-01.safetensors", lambda t: t.update(evil=torch.zeros(3))),
        r"tensor evil: expected none, found float32 \[3\]",
    ),
    "a tensor of another shape": (
        lambda c: retensor(c / "block-00.safetensors", lambda t: t.update({"out.weight": torch.zeros(4, 4)})),
        r"tensor out.weight: expected float32 \[32, 32\], found float32 \[4, 4\]",
    ),
    "a tensor of another dtype": (
        lambda c: retensor(
            c / "block-00.safetensors",
            lambda t: t.update({"out.weight": torch.zeros(32, 32, dtype=torch.int8)}),
        ),
        r"tensor out.weight: expected float32 \[32, 32\], found int8 \[32, 32\]",
    ),
    "a missing codebook": (
        lambda c: (c / "codebook.safetensors").unlink(),
        "codebook.safetensors is missing",
    ),
    "a codebook of another shape": (
        lambda c: retensor(c / "codebook.safetensors", lambda t: t.update(table=torch.zeros(256, 16))),
        r"table: expected float32 \[256, 32\], found float32 \[256, 16\]",
    ),
    "a codebook of another dtype": (
        lambda c: retensor(c / "codebook.safetensors", lambda t: t.update(table=torch.zeros(256, 32).half())),
        r"table: expected float32 \[256, 32\], found float16 \[256, 32\]",
    ),
    "a changed weight": (
        lambda c: retensor(c / "block-01.safetensors", lambda t: t["out.weight"].add_(1)),
        "block-01.safetensors: expected sha256",
    ),
    "a changed codebook": (
        lambda c: retensor(c / "codebook.safetensors", lambda t: t["table"].add_(1)),
        "codebook.safetensors: expected sha256",
    ),
    "a recipe of a block that no machine holds": (
        lambda c: rewrite(c / "config.json", lambda config: config["recipe"]["model"].update(width=2**22)),
        r"expected float32 \[256, 4194304\]",
    ),
    "a recipe of more layers than tensors": (
        lambda c: rewrite(
            c / "config.json", lambda config: config["recipe"]["model"].update(layers_per_block=4096)
        ),
        "too few for the recipe's 4096 layers",
    ),
    "a recipe of an endless context": (
        lambda c: rewrite(c / "config.json", lambda config: config["recipe"]["model"].update(context=2**40)),
        "model.context must be at most",
    ),
    "a config without the blocks' hashes": (
        lambda c: rewrite(c / "config.json", lambda config: config.update(blocks=[])),
        "no sha256 of block 0",
    ),
    "no config": (lambda c: (c / "config.json").unlink(), "has no config.json"),
    "a config that is not JSON": (
        lambda c: (c / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "a config that is not text": (lambda c: (c / "config.json").write_bytes(b"\xff\0"), "config.json"),
    "a config of something else": (
        lambda c: (c / "config.json").write_text('{"model_type": "gpt2"}'),
        "is not a",
    ),
    "a config that is a list": (lambda c: (c / "config.json").write_text("[]"), "is not a"),
    "a config of another version": (
        lambda c: rewrite(c / "config.json", lambda config: config.update(version=99)),
        "version 99; this program reads 1",
    ),
    "a config without a recipe": (
        lambda c: rewrite(c / "config.json", lambda config: config.pop("recipe")),
        "damaged.*recipe",
    ),
    "a recipe that is a list": (
        lambda c: rewrite(c / "config.json", lambda config: config.update(recipe=[1])),
        "damaged",
    ),
    "a recipe with a key of the future": (
        lambda c: rewrite(c / "config.json", lambda config: config["recipe"]["model"].update(wings=2)),
        "damaged.*model.wings",
    ),
    "a pooling weight too few": (
        lambda c: rewrite(c / "config.json", lambda config: config.update(pooling=[1.0])),
        r"expected 2 pooling weights, found \[1.0\]",
    ),
    "a pooling weight that is no number": (
        lambda c: rewrite(c / "config.json", lambda config: config.update(pooling=[0.5, float("nan")])),
        r"expected finite pooling weights, found \[0.5, nan\]",
    ),
    "a pooling that is a number": (
        lambda c: rewrite(c / "config.json", lambda config: config.update(pooling=3)),
        "damaged",
    ),
    "a recipe of more blocks than files": (
        lambda c: rewrite(
            c / "config.json",
            lambda config: (config["recipe"]["model"].update(blocks=3), config.update(pooling=[0.3] * 3)),
        ),
        "block-02.safetensors is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(copy: Path, damage: str) -> None:
    spoil, complaint = DAMAGE[damage]
    spoil(copy)
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(copy, CPU)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        load_checkpoint(tmp_path / "absent", CPU)
