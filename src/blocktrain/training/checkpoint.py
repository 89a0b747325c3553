"""A trained model on disk: config.json, codebook.safetensors and one safetensors file per block.

Everything read back is checked before it is used: names, shapes and dtypes against the recipe in
config.json (before a block of that shape is made), and the files' sha256. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.bpe import FileTokenizer
from blocktrain.data.dataset import TOKENIZER, checked_tokenizer
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.errors import CheckpointError, RecipeError
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block
from blocktrain.model.families import codebook_rows
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling
from blocktrain.training.setup import Setup
from blocktrain.training.storage import read_tensors, replaced_folder, write_file, write_json, write_tensors

FORMAT = "blocktrain-checkpoint"
FORMAT_VERSION = 1
CODEBOOK_FILE = "codebook.safetensors"
UNKNOWN_TEXT = CorpusHash("0" * 64)
"""Of a model that was trained elsewhere."""
WITHOUT_TENSORS = ("heads", "rope_theta", "rope_scaling", "norm_eps")
"""Settings of [model] that change what weights compute and leave no trace in their shapes."""


@dataclass(frozen=True)
class Checkpoint:
    recipe: Recipe
    corpus_sha256: CorpusHash
    objective: Objective
    blocks: list[Block]
    codebook_VD: Tensor
    pooling: Pooling
    tokenizer: Tokenizer


def block_file(index: int) -> str:
    return f"block-{index:02d}.safetensors"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    return {"file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size}


def save_checkpoint(
    path: Path,
    recipe: Recipe,
    corpus_sha256: CorpusHash,
    blocks: Sequence[Block],
    codebook_VD: Tensor,
    pooling: Pooling,
    tokenizer: Tokenizer | None = None,
) -> None:
    """`tokenizer`: None for bytes."""
    states = (block.state_dict() for block in blocks)
    write_checkpoint(path, recipe, corpus_sha256, states, codebook_VD, pooling, tokenizer)


def write_checkpoint(
    path: Path,
    recipe: Recipe,
    corpus_sha256: CorpusHash,
    blocks: Iterable[Mapping[str, Tensor]],
    codebook_VD: Tensor,
    pooling: Pooling,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Each block's tensors are asked for when their turn comes, so that one at a time is in memory."""
    with replaced_folder(path) as folder:
        entries = []
        for index, tensors in enumerate(blocks):
            write_tensors(folder / block_file(index), tensors)
            entries.append(file_entry(folder / block_file(index)))
        # Written though the seed gives it: another torch may draw other numbers, and a learned one is in no
        # seed.
        write_tensors(folder / CODEBOOK_FILE, {"table": codebook_VD})
        told = {}
        if isinstance(tokenizer, FileTokenizer):
            write_file(folder / TOKENIZER, tokenizer.content)
            told = {"tokenizer": file_entry(folder / TOKENIZER)}
        codebook = file_entry(folder / CODEBOOK_FILE)
        config = checkpoint_config(recipe, corpus_sha256, pooling, entries, codebook)
        write_json(folder / "config.json", config | told)


def checkpoint_config(
    recipe: Recipe,
    corpus_sha256: CorpusHash,
    pooling: Pooling,
    blocks: Sequence[Mapping[str, Any]],
    codebook: Mapping[str, Any],
) -> dict[str, Any]:
    """What config.json says; `blocks` and `codebook` are entries of their files."""
    follows = {"pooling_follows_text": pooling.how_it_follows} if pooling.follows_text else {}
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "recipe": recipe.to_dict(),
        "corpus_sha256": corpus_sha256,
        "pooling": list(pooling.weights),
        **follows,
        "blocks": list(blocks),
        "codebook": codebook,
    }


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
            f"{path} is checkpoint version {config.get('version')}; this program reads {FORMAT_VERSION}: "
            "use a newer blocktrain"
        )
    return config


@dataclass(frozen=True)
class Description:
    """A checkpoint's config.json, checked."""

    recipe: Recipe
    corpus_sha256: CorpusHash
    pooling: Pooling
    block_sha256: list[str]
    codebook_sha256: str | None
    """None in checkpoints of before it was written down."""
    tokenizer: Tokenizer

    @classmethod
    def of(cls, config: Mapping[str, Any], where: Path) -> Description:
        try:
            recipe = resolve_recipe(config["recipe"])
            pooling = Pooling.read(config["pooling"], config.get("pooling_follows_text"))
            corpus = CorpusHash(str(config["corpus_sha256"]))
            digests = [str(entry["sha256"]) for entry in config["blocks"]]
            codebook = str(config["codebook"]["sha256"]) if "codebook" in config else None
            tokenizer: Tokenizer = ByteTokenizer()
            if "tokenizer" in config:
                from_file = checked_tokenizer(where / TOKENIZER, str(config["tokenizer"]["sha256"]))
                # Text that is trained on here has no such token. A model that was imported and then trained
                # here met one before, but not in the text that it was last fitted to.
                if corpus == UNKNOWN_TEXT:
                    from_file.begin_texts()
                tokenizer = from_file
        except (KeyError, TypeError, ValueError, RecipeError) as error:
            raise CheckpointError(f"{where / 'config.json'} is damaged: {error}") from None
        if len(pooling.weights) != recipe.model.blocks:
            found = list(pooling.weights)
            raise CheckpointError(f"{where}: expected {recipe.model.blocks} pooling weights, found {found}")
        return cls(recipe, corpus, pooling, digests, codebook, tokenizer)

    def setup(self) -> Setup:
        return Setup.of(self.recipe, self.tokenizer.vocabulary)


def load_checkpoint(path: Path, device: torch.device, only: Sequence[int] | None = None) -> Checkpoint:
    """The whole model, or only some of its blocks (as a stage holds them)."""
    described = Description.of(read_config(path), path)
    recipe, objective = described.recipe, described.setup().objective
    indices = range(recipe.model.blocks) if only is None else only
    blocks = []
    for index in indices:
        file = path / block_file(index)
        tensors, _ = read_tensors(file)
        found = {name: kind(tensor) for name, tensor in tensors.items()}
        # First: building the block that a stranger's recipe describes could take all memory.
        check_layers(recipe.model.of_block(index).layers_per_block, found, str(file))
        check_kinds(block_kinds(objective, index), found, f"block {index} ({file})")
        if index >= len(described.block_sha256):
            raise CheckpointError(f"{path / 'config.json'} is damaged: no sha256 of block {index}")
        check_sha256(file, described.block_sha256[index])
        # The seed does not matter: every weight is replaced, as the kinds above were all there.
        block = objective.build(index, seed=0)
        block.load_state_dict(tensors)
        blocks.append(block.to(device).eval())
    tensors, _ = read_tensors(path / CODEBOOK_FILE)
    found = {name: kind(tensor) for name, tensor in tensors.items()}
    check_kinds({"table": codebook_kind(objective)}, found, str(path / CODEBOOK_FILE))
    if described.codebook_sha256 is not None:
        check_sha256(path / CODEBOOK_FILE, described.codebook_sha256)
    return Checkpoint(
        recipe,
        described.corpus_sha256,
        objective,
        blocks,
        tensors["table"].to(device),
        described.pooling,
        described.tokenizer,
    )


def starting_blocks(path: Path, setup: Setup) -> tuple[list[Block], Tensor]:
    """A checkpoint's blocks and codebook as the first weights of a run of another recipe."""
    loaded, recipe = load_checkpoint(path, torch.device("cpu")), setup.recipe
    if len(loaded.blocks) != recipe.model.blocks:
        raise CheckpointError(
            f"{path} has {len(loaded.blocks)} blocks, the recipe {recipe.model.blocks}; set model.blocks"
        )
    if loaded.tokenizer.vocabulary != setup.vocabulary:
        raise CheckpointError(
            f"{path} has a tokenizer of {loaded.tokenizer.vocabulary} tokens, the recipe's text "
            f"{setup.vocabulary}; prepare the text with the tokenizer of the checkpoint"
        )
    blocks = []
    for index, block in enumerate(loaded.blocks):
        theirs, ours = (model.of_block(index) for model in (loaded.recipe.model, recipe.model))
        for key in WITHOUT_TENSORS:
            if getattr(theirs, key) != getattr(ours, key):
                raise CheckpointError(
                    f"{path}: block {index} was trained with model.{key} = {getattr(theirs, key)}, the "
                    f"recipe has {getattr(ours, key)}; set it as in {path / 'config.json'}"
                )
        fresh = setup.initial(index)
        load_weights(fresh, block.state_dict(), where=f"block {index} of {path}, for the recipe's model")
        blocks.append(fresh)
    # Blocks know their targets by the codebook's vectors: with others they would begin worse than at random.
    if recipe.objective.codebook == "fixed" and not torch.equal(loaded.codebook_VD, setup.codebook()()):
        raise CheckpointError(
            f"{path} has another codebook than the recipe's, which is drawn from the seed; set seed = "
            f'{loaded.recipe.seed}, or train a checkpoint with objective.codebook = "fixed"'
        )
    return blocks, loaded.codebook_VD


def block_kinds(objective: Objective, index: int) -> dict[str, str]:
    """Type and shape of every tensor of a block, without making one."""
    # Shapes without memory, so that checking a huge claim is free.
    with torch.device("meta"):
        return {name: kind(tensor) for name, tensor in objective.build(index, seed=0).state_dict().items()}


def load_weights(block: Block, tensors: dict[str, Tensor], *, where: str) -> None:
    expected = {name: kind(tensor) for name, tensor in block.state_dict().items()}
    check_kinds(expected, {name: kind(tensor) for name, tensor in tensors.items()}, where)
    block.load_state_dict(tensors)


def check_layers(layers: int, found: Mapping[str, str], where: str) -> None:
    """Every layer has tensors: a recipe that claims more layers than that is not laid out at all."""
    if layers > len(found):
        raise CheckpointError(f"{where}: {len(found)} tensors are too few for the recipe's {layers} layers")


def check_kinds(expected: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    for name in sorted(expected.keys() | found.keys()):
        one, other = expected.get(name, "none"), found.get(name, "none")
        if one != other:
            raise CheckpointError(
                f"{where}: tensor {name}: expected {one}, found {other}; the file belongs to another "
                "recipe or is damaged"
            )


def check_sha256(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise CheckpointError(
            f"{path}: expected sha256 {expected[:12]}… as in config.json, found {found[:12]}…; "
            "the file is damaged or from another run, copy the checkpoint again"
        )


def kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def codebook_kind(objective: Objective) -> str:
    rows = codebook_rows(objective.model, objective.config, objective.vocabulary)
    return f"float32 {[rows, objective.model.width]}"
