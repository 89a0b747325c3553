"""A checkpoint as a Hugging Face folder, and back, bit for bit.

    config.json                        the shape in the usual words, and under "blocktrain" everything else
    model-0000i-of-0000n.safetensors   one per block (tensors "blocks.0.…") and one for the codebook
    model.safetensors.index.json       which tensor is in which file
    tokenizer.json, tokenizer_config.json
    README.md                          the model card

Covered, for a folder from a stranger: JSON files are read up to a limit; file names cannot leave the folder;
sizes, sha256, tensor names, types and shapes are checked before a tensor is made; nothing is executed, no
file that is not named above is read. Not covered: whether the weights are any good.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from blocktrain.data.bpe import FileTokenizer
from blocktrain.data.dataset import TOKENIZER
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.data.tokenizer_files import (
    LINE_FEED,
    TOKENIZER_CONFIG,
    byte_letters,
    byte_tokenizer,
    tokenizer_config,
)
from blocktrain.errors import CheckpointError, UserError
from blocktrain.training.checkpoint import (
    CODEBOOK_FILE,
    FORMAT,
    FORMAT_VERSION,
    Description,
    block_file,
    block_kinds,
    check_kinds,
    check_layers,
    check_sha256,
    codebook_kind,
    file_entry,
    read_config,
    write_checkpoint,
)
from blocktrain.training.storage import read_tensors, replaced_folder, write_file, write_json, write_tensors

EXPORT_FORMAT = "blocktrain-export"
EXPORT_VERSION = 1
MODEL_TYPE = "blocktrain"
INDEX_FILE = "model.safetensors.index.json"
CODEBOOK_TENSOR = "codebook.table"
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
# A whole match leaves no way out of the folder: no slash, no dots but the last.
SHARD_NAME = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def shard_file(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def tensor_prefix(block: int) -> str:
    return f"blocks.{block}."


def export_checkpoint(checkpoint: Path, to: Path, card: str) -> None:
    """Write the folder; the checkpoint's files are checked on the way."""
    config = read_config(checkpoint)
    described = Description.of(config, checkpoint)
    refuse_occupied(to)
    with replaced_folder(to) as folder:
        weight_map: dict[str, str] = {}
        entries, total = [], 0
        for name, tensors in _shards(checkpoint, described):
            # transformers refuses a file whose metadata does not name the framework.
            write_tensors(folder / name, tensors, {"format": "pt"})
            entries.append(file_entry(folder / name))
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)
        write_json(folder / "config.json", _config(described, config, entries))
        write_tokenizer(folder, described.tokenizer, described.recipe.model.context)
        write_file(folder / "README.md", card.encode())


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    if isinstance(tokenizer, FileTokenizer):
        write_file(folder / TOKENIZER, tokenizer.content)
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(context, tokenizer.end_text))
    else:
        write_json(folder / TOKENIZER, byte_tokenizer())
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config(context, byte_letters()[LINE_FEED]))


def refuse_occupied(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--to {folder} is not an empty folder; choose another or remove it first")


def _shards(checkpoint: Path, described: Description) -> Iterator[tuple[str, dict[str, Tensor]]]:
    num_blocks = described.recipe.model.blocks
    if len(described.block_sha256) != num_blocks:
        raise CheckpointError(f"{checkpoint / 'config.json'} is damaged: expected {num_blocks} blocks")
    for block, digest in enumerate(described.block_sha256):
        file = checkpoint / block_file(block)
        tensors, _ = read_tensors(file)
        check_sha256(file, digest)
        prefix = tensor_prefix(block)
        yield shard_file(block, num_blocks + 1), {prefix + name: one for name, one in tensors.items()}
    tensors, _ = read_tensors(checkpoint / CODEBOOK_FILE)
    yield shard_file(num_blocks, num_blocks + 1), {CODEBOOK_TENSOR: tensors["table"]}


def _config(
    described: Description, config: Mapping[str, Any], entries: list[dict[str, Any]]
) -> dict[str, Any]:
    model = described.recipe.model
    own = {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "checkpoint": dict(config),
        "files": {entry["file"]: {key: entry[key] for key in ("sha256", "bytes")} for entry in entries},
    }
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["BlockTrain"],
        "dtype": "float32",
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers_before(model.blocks),
        "max_position_embeddings": model.context,
        "vocab_size": described.setup().vocabulary,
        MODEL_TYPE: own,
    }


def import_checkpoint(folder: Path, to: Path) -> None:
    """Read a folder that `export_checkpoint` wrote, wherever it has been since."""
    own = _read_own_config(folder)
    described = Description.of(own["checkpoint"], folder)
    refuse_occupied(to)
    # In this order: bytes, then names and shapes, then the index; no tensor exists before all three agree.
    shards = _checked_shards(folder, own["files"])
    expected = _expected_kinds(folder, described, shards)
    # Other programs go by the index, so it must tell the truth.
    found = read_json(folder / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    if found != {tensor: name for name, kinds in expected.items() for tensor in kinds}:
        raise CheckpointError(f"{folder / INDEX_FILE} is damaged: its weight_map is not that of the files")
    for name, kinds in expected.items():
        check_kinds(kinds, shards[name], str(folder / name))
    *block_shards, codebook_shard = expected
    codebook, _ = read_tensors(folder / codebook_shard)
    write_checkpoint(
        to,
        described.recipe,
        described.corpus_sha256,
        (
            {
                key.removeprefix(tensor_prefix(block)): one
                for key, one in read_tensors(folder / name)[0].items()
            }
            for block, name in enumerate(block_shards)
        ),
        codebook[CODEBOOK_TENSOR],
        described.pooling,
        described.tokenizer,
    )


def _read_own_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json", MAX_CONFIG_BYTES)
    own = config.get(MODEL_TYPE)
    if config.get("model_type") != MODEL_TYPE or not isinstance(own, dict):
        told = (
            f" (its model_type is {str(config.get('model_type'))[:40]!r})" if "model_type" in config else ""
        )
        if "format" in config:
            told = ", but a checkpoint already: every verb takes it as it is"
        raise CheckpointError(f"{folder} is not a folder written by `blocktrain export`{told}")
    if own.get("format") != EXPORT_FORMAT or own.get("version") != EXPORT_VERSION:
        raise CheckpointError(
            f"{folder} is {str(own.get('format'))[:40]!r} version {str(own.get('version'))[:40]}; this "
            f"program reads {EXPORT_FORMAT!r} version {EXPORT_VERSION}"
        )
    inner = own.get("checkpoint")
    found = (inner.get("format"), inner.get("version")) if isinstance(inner, dict) else None
    if found != (FORMAT, FORMAT_VERSION) or not isinstance(own.get("files"), dict):
        raise CheckpointError(
            f"{folder / 'config.json'} is damaged: no {FORMAT} version {FORMAT_VERSION} in it"
        )
    return own


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise CheckpointError(f"{path} is longer than {max_bytes} bytes")
        value = json.loads(content)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: expected an object")
    return value


def _checked_shards(folder: Path, files: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The kinds of the tensors in each file, once its size and hash are those written down."""
    shards = {}
    for name, entry in sorted(files.items()):
        path = folder / name
        if SHARD_NAME.fullmatch(name) is None or not isinstance(entry, dict):
            raise CheckpointError(f"{folder / 'config.json'} names a file {name[:80]!r}; expected model-…")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        # The size first: hashing a file of a stranger's length could take hours.
        if path.stat().st_size != entry.get("bytes"):
            raise CheckpointError(
                f"{path} is truncated or another file: expected {entry.get('bytes')} bytes, found "
                f"{path.stat().st_size}"
            )
        check_sha256(path, str(entry.get("sha256")))
        shards[name] = {tensor: f"{dtype} {shape}" for tensor, (dtype, shape) in kinds_in(path).items()}
    return shards


def kinds_in(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of each tensor, from the header alone."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: (DTYPES.get(part.get_dtype(), part.get_dtype()), list(part.get_shape()))
                for name, part in parts.items()
            }
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is not safetensors: {error}") from None


def _expected_kinds(
    folder: Path, described: Description, shards: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    """What each file must hold, by the recipe: block after block, then the codebook."""
    model, objective = described.recipe.model, described.setup().objective
    names = [shard_file(number, model.blocks + 1) for number in range(min(model.blocks, len(shards)) + 1)]
    if sorted(shards) != names:
        raise CheckpointError(
            f"{folder}: expected {model.blocks + 1} safetensors files for {model.blocks} blocks and the "
            f"codebook, found {len(shards)}"
        )
    expected = {}
    for block, name in enumerate(names[:-1]):
        check_layers(model.of_block(block).layers_per_block, shards[name], str(folder / name))
        kinds = block_kinds(objective, block)
        expected[name] = {tensor_prefix(block) + tensor: kind for tensor, kind in kinds.items()}
    expected[names[-1]] = {CODEBOOK_TENSOR: codebook_kind(objective)}
    return expected
