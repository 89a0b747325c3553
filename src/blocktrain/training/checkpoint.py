"""A trained model on disk: config.json, codebook.safetensors and one safetensors file per block.

Everything read back is checked against the recipe in config.json before it is used: names, shapes and
dtypes. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.tokenizer import Tokenizer, load_tokenizer
from blocktrain.errors import CheckpointError, RecipeError
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.storage import read_tensors, replaced_folder, write_json, write_tensors

FORMAT = "blocktrain-checkpoint"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    recipe: Recipe
    corpus_sha256: CorpusHash
    objective: Objective
    blocks: list[Block]
    codebook_VD: Tensor
    pooling: list[float]
    tokenizer: Tokenizer


def block_file(index: int) -> str:
    return f"block-{index:02d}.safetensors"


def save_checkpoint(
    path: Path,
    recipe: Recipe,
    corpus_sha256: CorpusHash,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    pooling: Sequence[float],
) -> None:
    with replaced_folder(path) as folder:
        entries = []
        for index, block in enumerate(blocks):
            file = folder / block_file(index)
            write_tensors(file, block.state_dict())
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            entries.append({"file": file.name, "sha256": digest, "bytes": file.stat().st_size})
        write_tensors(folder / "codebook.safetensors", {"table": codebook_VD})
        write_json(
            folder / "config.json",
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "recipe": recipe.to_dict(),
                "corpus_sha256": corpus_sha256,
                "pooling": list(pooling),
                "blocks": entries,
            },
        )


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint folder at {path}; expected a folder with config.json")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = " (did you mean its folder checkpoint/?)" if (path / "checkpoint").is_dir() else ""
        raise CheckpointError(f"{path} has no config.json{hint}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise CheckpointError(f"{path / 'config.json'} is not a {FORMAT}")
    if config.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} is checkpoint version {config.get('version')}; this program reads {FORMAT_VERSION}"
        )
    return config


def load_checkpoint(path: Path, device: torch.device, only: Sequence[int] | None = None) -> Checkpoint:
    """The whole model, or only some of its blocks (as a stage holds them)."""
    config = read_config(path)
    try:
        recipe = resolve_recipe(config["recipe"])
        pooling = [float(weight) for weight in config["pooling"]]
        corpus = CorpusHash(str(config["corpus_sha256"]))
    except (KeyError, TypeError, ValueError, RecipeError) as error:
        raise CheckpointError(f"{path / 'config.json'} is damaged: {error}") from None
    if len(pooling) != recipe.model.blocks or not all(map(math.isfinite, pooling)):
        raise CheckpointError(f"{path}: expected {recipe.model.blocks} pooling weights, found {pooling}")
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    objective = Objective(recipe.model, recipe.objective, vocabulary=tokenizer.vocabulary)
    indices = range(recipe.model.blocks) if only is None else only
    blocks = [_load_block(path / block_file(i), objective, i).to(device).eval() for i in indices]
    codebook = _load_codebook(path / "codebook.safetensors", tokenizer.vocabulary, recipe.model.width)
    return Checkpoint(recipe, corpus, objective, blocks, codebook.to(device), pooling, tokenizer)


def _load_block(path: Path, objective: Objective, index: int) -> Block:
    tensors, _ = read_tensors(path)
    block = objective.build(index, seed=0)
    load_weights(block, tensors, where=f"block {index} ({path})")
    return block


def load_weights(block: Block, tensors: dict[str, Tensor], *, where: str) -> None:
    state = block.state_dict()
    for name in sorted(state.keys() | tensors.keys()):
        expected, found = _kind(state.get(name)), _kind(tensors.get(name))
        if expected != found:
            raise CheckpointError(
                f"{where}: tensor {name}: expected {expected}, found {found}; the file belongs to another "
                "recipe or is damaged"
            )
    block.load_state_dict(tensors)


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _load_codebook(path: Path, vocabulary: int, width: int) -> Tensor:
    tensors, _ = read_tensors(path)
    table = tensors.get("table")
    expected = f"float32 {[vocabulary, width]}"
    if table is None or _kind(table) != expected:
        raise CheckpointError(f"{path}: tensor table: expected {expected}, found {_kind(table)}")
    return table
