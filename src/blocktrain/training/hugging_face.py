"""Models of the families `llama` and `qwen3` as folders that other programs load, and such folders back.

    config.json                      LlamaForCausalLM or Qwen3ForCausalLM, and under "blocktrain" the recipe
    model.safetensors                or model-0000i-of-0000n.safetensors and their index
    tokenizer.json, tokenizer_config.json, README.md

One block, or the parts of a serial model, make one folder. Independent blocks make a folder each, block-00
and so on, beside pool.json, which has their pooling weights. Tensors travel one at a time, so that memory
does not grow with the model.

Covered, for a folder from a stranger: JSON files are read up to a limit; file names cannot leave the folder;
names, types and shapes are checked before a tensor is made; nothing is executed or unpickled. Not covered:
whether the weights are any good, and a tokenizer file whose own pattern never ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from blocktrain.config import ModelConfig, Recipe, RopeScaling, resolve_recipe
from blocktrain.data.bpe import FileTokenizer
from blocktrain.data.dataset import TOKENIZER
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.data.tokenizer_files import byte_tokenizer
from blocktrain.errors import CheckpointError, RecipeError, UserError
from blocktrain.ids import CorpusHash
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import (
    UNKNOWN_TEXT,
    Description,
    block_file,
    block_kinds,
    check_kinds,
    check_layers,
    check_sha256,
    codebook_kind,
    read_config,
    write_checkpoint,
)
from blocktrain.training.exchange import (
    INDEX_FILE,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    MODEL_TYPE,
    SHARD_NAME,
    kinds_in,
    read_json,
    refuse_occupied,
    shard_file,
    write_tokenizer,
)
from blocktrain.training.setup import Setup
from blocktrain.training.storage import LazyTensors, replaced_folder, write_file, write_json, write_tensors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WHOLE_FILE = "model.safetensors"
POOL_FILE = "pool.json"
MAX_SHARD_BYTES = 4 << 30
"""A larger model is several files, as the Hub and most programs like them."""
ROWS_VALUES = 1 << 22
"""Values of a tensor that are compared at once."""
FLOATS = {"float32", "float16", "bfloat16", "float64"}
EMBEDDING, NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


# --- out ------------------------------------------------------------------------------------------------


def export_folder(checkpoint: Path, to: Path, card: str) -> None:
    """Write a checkpoint of such a family; its files are checked on the way."""
    described = Description.of(read_config(checkpoint), checkpoint)
    recipe = described.recipe
    refuse_occupied(to)
    for block, digest in enumerate(described.block_sha256):
        check_sha256(checkpoint / block_file(block), digest)
    with replaced_folder(to) as folder:
        write_file(folder / "README.md", card.encode())
        if recipe.model.blocks == 1 or recipe.objective.kind == "serial":
            _write_model(folder, described, _joined(checkpoint, recipe.model))
            return
        names = [f"block-{block:02d}" for block in range(recipe.model.blocks)]
        for block, name in enumerate(names):
            alone = replace(recipe, model=replace(recipe.model.of_block(block), blocks=1))
            one = replace(described, recipe=alone, pooling=Pooling((1.0,)))
            (folder / name).mkdir()
            _write_model(folder / name, one, _tensors_in(checkpoint / block_file(block)))
        pool: dict[str, Any] = {
            "blocks": names,
            "weights": list(described.pooling.weights),
            "pooling": "softmax of the weighted sum of the blocks' log-probs",
            "recipe": recipe.to_dict(),
            "corpus_sha256": described.corpus_sha256,
        }
        if described.pooling.follows_text:
            pool["follows_text"] = described.pooling.how_it_follows
        write_json(folder / POOL_FILE, pool)


def _tensors_in(path: Path) -> LazyTensors:
    def load(name: str) -> Tensor:
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return LazyTensors({name: shape for name, (_, shape) in kinds_in(path).items()}, load)


def _joined(checkpoint: Path, model: ModelConfig) -> LazyTensors:
    """The parts of a serial model, or the only block, under the names of the whole model."""
    parts = [_tensors_in(checkpoint / block_file(block)) for block in range(model.blocks)]
    place = {
        whole_name(name, model.layers_before(block)): (block, name)
        for block, part in enumerate(parts)
        for name in part
    }

    def load(name: str) -> Tensor:
        block, inner = place[name]
        return parts[block][inner]

    return LazyTensors({name: parts[block].shapes[inner] for name, (block, inner) in place.items()}, load)


def whole_name(name: str, first_layer: int) -> str:
    """A part's tensor under its name in the whole model, whose layers are counted through."""
    prefix = "model.layers."
    if not name.startswith(prefix):
        return name
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(layer) + first_layer}.{rest}"


def layer_of(name: str) -> int | None:
    """The layer in whose name a tensor stands, if in any."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if name.startswith("model.layers.") and re.fullmatch("[0-9]{1,6}", number) else None


def _write_model(folder: Path, described: Description, tensors: LazyTensors) -> None:
    shards: list[dict[str, list[int]]] = [{}]
    size = 0
    for name, shape in tensors.shapes.items():
        if size and size + tensors.num_bytes(name) > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += tensors.num_bytes(name)
    files = [WHOLE_FILE] if len(shards) == 1 else [shard_file(i, len(shards)) for i in range(len(shards))]
    for file, shapes in zip(files, shards, strict=True):
        # transformers refuses a file whose metadata does not name the framework.
        write_tensors(folder / file, LazyTensors(shapes, tensors.__getitem__), {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, shapes in zip(files, shards, strict=True) for name in shapes}
        total = sum(map(tensors.num_bytes, tensors))
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", hugging_face_config(described))
    write_tokenizer(folder, described.tokenizer, described.recipe.model.context)


def hugging_face_config(described: Description) -> dict[str, Any]:
    """config.json in the words of transformers; older programs read the rotary settings in other places."""
    model, tokenizer = described.recipe.model, described.tokenizer
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        scaling = RopeScaling.parse(model.rope_scaling)
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency,
            "high_freq_factor": scaling.high_frequency,
            "original_max_position_embeddings": int(scaling.original_context),
        }
    return {
        "model_type": model.family,
        "architectures": [ARCHITECTURES[model.family]],
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": model.padded_vocabulary or tokenizer.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.feedforward_width or model.feedforward * model.width,
        "num_hidden_layers": model.layers_before(model.blocks),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.channels_per_head,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else rope,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end if isinstance(tokenizer, FileTokenizer) else None,
        MODEL_TYPE: {"recipe": described.recipe.to_dict(), "corpus_sha256": described.corpus_sha256},
    }


# --- in -------------------------------------------------------------------------------------------------


def is_importable(folder: Path) -> bool:
    """Whether the folder says that it is of such a family, or a pool of such folders."""
    if (folder / POOL_FILE).is_file():
        return True
    return read_json(folder / "config.json", MAX_CONFIG_BYTES).get("model_type") in ARCHITECTURES


def import_folder(folder: Path, to: Path, parts: int = 1) -> Recipe:
    """Make a checkpoint of a folder: one block, `parts` serial parts, or the blocks of a pool."""
    refuse_occupied(to)
    if (folder / POOL_FILE).is_file():
        if parts != 1:
            raise UserError(
                f"{folder} is a pool of independent blocks; import one of its folders with --parts"
            )
        return _import_pool(folder, to)
    config = read_json(folder / "config.json", MAX_CONFIG_BYTES)
    tokenizer = _tokenizer_in(folder)
    recipe, corpus = recipe_of(config, folder, tokenizer, parts)
    pooling, tied = Pooling((0.0,) * (parts - 1) + (1.0,)), _is_tied(config, folder / "config.json")
    _write(to, recipe, corpus, [folder] * parts, tokenizer, pooling, tied)
    return recipe


def _import_pool(folder: Path, to: Path) -> Recipe:
    pool = read_json(folder / POOL_FILE, MAX_CONFIG_BYTES)
    try:
        recipe = resolve_recipe(pool["recipe"])
        pooling = Pooling.read(pool["weights"], pool.get("follows_text"))
        corpus = CorpusHash(str(pool["corpus_sha256"]))
    except (KeyError, TypeError, ValueError, RecipeError) as error:
        raise CheckpointError(f"{folder / POOL_FILE} is damaged: {error}") from None
    if len(pooling.weights) != recipe.model.blocks:
        raise CheckpointError(
            f"{folder / POOL_FILE}: expected {recipe.model.blocks} weights, found {len(pooling.weights)}"
        )
    # By number and not by the names in the file, which a stranger wrote.
    folders = [folder / f"block-{block:02d}" for block in range(min(recipe.model.blocks, 1 << 16))]
    tokenizer = _tokenizer_in(folders[0])
    for block, one in enumerate(folders):
        config = read_json(one / "config.json", MAX_CONFIG_BYTES)
        found, _ = recipe_of(config, one, tokenizer, 1)
        expected = replace(recipe.model.of_block(block), blocks=1)
        if _shape(found.model, tokenizer) != _shape(expected, tokenizer):
            raise CheckpointError(f"{one / 'config.json'} has another shape than {folder / POOL_FILE} says")
        if _tokenizer_in(one).name != tokenizer.name:
            raise CheckpointError(f"{one} has another tokenizer than {folders[0]}")
    _write(to, recipe, corpus, folders, tokenizer, pooling, recipe.model.tied)
    return recipe


def _shape(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """With what may be left out written down, so that two descriptions compare."""
    return replace(
        model,
        kv_heads=model.kv_heads or model.heads,
        head_width=model.channels_per_head,
        feedforward_width=model.feedforward_width or model.feedforward * model.width,
        feedforward=4,
        padded_vocabulary=model.padded_vocabulary or tokenizer.vocabulary,
        rope_scaling=model.rope_scaling and RopeScaling.parse(model.rope_scaling).text,
    )


def _write(
    to: Path,
    recipe: Recipe,
    corpus: CorpusHash,
    folders: list[Path],
    tokenizer: Tokenizer,
    pooling: Pooling,
    tied: bool,
) -> None:
    """`tied`: whether the folders' output maps are their embeddings; serial parts have a copy instead."""
    setup = Setup.of(recipe, tokenizer.vocabulary)
    serial = recipe.objective.kind == "serial"

    def blocks() -> Iterator[LazyTensors]:
        found = None
        for block, folder in enumerate(folders):
            model = recipe.model
            whole = model.layers_before(model.blocks) if serial else model.of_block(block).layers_per_block
            if found is None or found.folder != folder:
                found = FolderTensors(folder, whole, tied)
            first = model.layers_before(block) if serial else 0
            yield found.part(block_kinds(setup.objective, block), first)

    codebook = torch.zeros(0, recipe.model.width)
    assert codebook_kind(setup.objective) == f"float32 {list(codebook.shape)}"
    write_checkpoint(to, recipe, corpus, blocks(), codebook, pooling, tokenizer)


class FolderTensors:
    """The tensors of a folder's safetensors files, checked by their headers, read one at a time."""

    def __init__(self, folder: Path, num_layers: int, tied: bool) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        self.kinds: dict[str, tuple[str, list[int]]] = {}
        for path in self._paths():
            for name, kind in kinds_in(path).items():
                # Older folders keep a table that is computed.
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                if name in self.files:
                    raise CheckpointError(f"{path}: tensor {name[:80]} is in {self.files[name].name} too")
                self.files[name], self.kinds[name] = path, kind
        if tied and OUTPUT in self.kinds:
            self._check_same(EMBEDDING, OUTPUT)
            del self.kinds[OUTPUT]
        elif not tied and OUTPUT not in self.kinds:
            raise CheckpointError(
                f"{folder}: {OUTPUT} is missing, and config.json does not say that the embedding takes its "
                "place; where it does, set tie_word_embeddings to true there"
            )
        # First: building the shape of a block that a stranger's config describes could take long.
        check_layers(num_layers, dict.fromkeys(self.kinds, ""), str(folder))
        beyond = [name for name in self.kinds if (layer_of(name) or 0) >= num_layers]
        if beyond:
            raise CheckpointError(
                f"{folder}: tensor {beyond[0][:80]} lies beyond the {num_layers} layers of config.json"
            )

    def _paths(self) -> list[Path]:
        if (self.folder / INDEX_FILE).is_file():
            index = read_json(self.folder / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
            names = sorted(set(map(str, index.values()))) if isinstance(index, dict) else []
            if not names or not all(SHARD_NAME.fullmatch(name) for name in names):
                raise CheckpointError(f"{self.folder / INDEX_FILE} is damaged: expected files named model-…")
        else:
            names = [WHOLE_FILE]
        for name in names:
            if not (self.folder / name).is_file():
                pickled = any(self.folder.glob("pytorch_model*.bin"))
                told = "; its pickled .bin files are not read, convert them to safetensors" if pickled else ""
                raise CheckpointError(f"{self.folder / name} is missing{told}")
        return [self.folder / name for name in names]

    def _check_same(self, one: str, other: str) -> None:
        """Refuse two tensors that are said to be one and differ: programs disagree on which counts."""
        kind = self.kinds[other]
        same = self.kinds.get(one) == kind and len(kind[1]) == 2
        if same:
            with (
                safetensors.safe_open(str(self.files[one]), framework="pt") as first,
                safetensors.safe_open(str(self.files[other]), framework="pt") as second,
            ):
                parts = first.get_slice(one), second.get_slice(other)
                rows, width = kind[1]
                at_once = max(1, ROWS_VALUES // max(1, width))
                starts = range(0, rows, at_once)
                same = all(torch.equal(*(part[i : i + at_once] for part in parts)) for i in starts)
        if not same:
            raise CheckpointError(
                f"{self.folder}: config.json has tie_word_embeddings, but {other} differs from {one}; set it "
                f"to false, or remove {other}"
            )

    def part(self, expected: Mapping[str, str], first_layer: int) -> LazyTensors:
        """A block's tensors under its own names; `expected` are their kinds in fp32."""
        # A part cannot share the embedding with another, so the last one of a tied model gets a copy of it.
        place = {name: whole_name(name, first_layer) for name in expected}
        if OUTPUT in place and OUTPUT not in self.kinds:
            place[OUTPUT] = EMBEDDING
        found = {}
        for name, source in place.items():
            dtype, shape = self.kinds.get(source, ("none", []))
            found[name] = f"float32 {shape}" if dtype in FLOATS else dtype
        # Nothing of these layers may be left over, such as a bias that we would not apply.
        layers = {layer_of(source) for source in place.values()} - {None}
        ends = {EMBEDDING, NORM, OUTPUT}
        for source in self.kinds.keys() - set(place.values()) - ends:
            if layer_of(source) in layers or layer_of(source) is None:
                found[source] = self.kinds[source][0]
        check_kinds(expected, found, str(self.folder))

        def load(name: str) -> Tensor:
            with safetensors.safe_open(str(self.files[place[name]]), framework="pt") as file:
                tensor: Tensor = file.get_tensor(place[name])
                return tensor

        return LazyTensors({name: self.kinds[source][1] for name, source in place.items()}, load)


def _tokenizer_in(folder: Path) -> Tokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; a folder needs the tokenizer as a tokenizer.json (transformers writes one: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    tokenizer = FileTokenizer.open(path)
    return ByteTokenizer() if json.loads(tokenizer.content) == byte_tokenizer() else tokenizer


def recipe_of(
    config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer, parts: int
) -> tuple[Recipe, CorpusHash]:
    """The recipe that a config.json describes; what it was trained with comes back where we wrote it."""
    where = folder / "config.json"
    layers = _number(config, "num_hidden_layers", where)
    if not 1 <= parts <= layers:
        raise UserError(f"--parts {parts} must be between 1 and the {layers} layers of {folder}")
    model = _model_section(config, where, tokenizer)
    # A part cannot share a matrix with another: the last one gets its own copy of the embedding.
    tied = model["tied"] and parts == 1
    own = config.get(MODEL_TYPE)
    own = own if isinstance(own, dict) else {}
    values = dict(own["recipe"]) if isinstance(own.get("recipe"), dict) else {"name": folder.resolve().name}
    shares = [layers // parts + (part < layers % parts) for part in range(parts)]
    values["model"] = {
        **model,
        "tied": tied,
        "blocks": parts,
        "layers_per_block": layers // parts,
        "block_layers": shares if layers % parts else None,
    }
    values["objective"] = {"kind": "serial" if parts > 1 else "denoise"}
    try:
        recipe = resolve_recipe(values)
    except RecipeError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return recipe, CorpusHash(str(own.get("corpus_sha256", UNKNOWN_TEXT)))


def _number(config: Mapping[str, Any], key: str, where: Path, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise CheckpointError(f"{where}: {key} must be a number of at least 1, found {str(value)[:40]}")
    return value


def _model_section(config: Mapping[str, Any], where: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """[model] of a recipe, or CheckpointError where the folder asks for what these families have not."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: model_type must be one of {', '.join(ARCHITECTURES)}, found {str(family)[:40]!r}"
        )
    # What would change the arithmetic must be said to be as ours is, or not be said at all.
    wanted: dict[str, tuple[Any, ...]] = {
        "architectures": ([ARCHITECTURES[family]], None),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "is_causal": (True, None),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
    }
    for key, allowed in wanted.items():
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"{where}: {key} must be {json.dumps(allowed[0])}, found {str(config.get(key))[:60]}"
            )
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{where}: layer_types must all be full_attention, found {str(kinds)[:60]}")
    rows, width = _number(config, "vocab_size", where), _number(config, "hidden_size", where)
    if tokenizer.vocabulary > rows:
        raise CheckpointError(
            f"{where}: vocab_size is {rows}, but the tokenizer has {tokenizer.vocabulary} tokens"
        )
    heads = _number(config, "num_attention_heads", where)
    theta, scaling = _rotary(config, where)
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float):
        raise CheckpointError(f"{where}: rms_norm_eps must be a small number, found {str(eps)[:40]}")
    return {
        "family": family,
        "width": width,
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", where, heads),
        # Qwen3's own default, which its folders may leave out, is 128.
        "head_width": _number(config, "head_dim", where, 128 if family == "qwen3" else width // heads),
        "feedforward_width": _number(config, "intermediate_size", where),
        "context": _number(config, "max_position_embeddings", where, 2048),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": eps,
        "tied": _is_tied(config, where),
        "padded_vocabulary": rows if rows > tokenizer.vocabulary else None,
    }


def _is_tied(config: Mapping[str, Any], where: Path) -> bool:
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{where}: tie_word_embeddings must be true or false, found {str(tied)[:40]}")
    return tied


def _rotary(config: Mapping[str, Any], where: Path) -> tuple[float, str | None]:
    """Theta and scaling, wherever this version of transformers wrote them."""
    outside = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    found = set()
    for given in [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)] or [{}]:
        if not isinstance(given, dict):
            raise CheckpointError(f"{where}: rope_parameters must be an object, found {str(given)[:40]}")
        # A program goes by the place that it knows, so all places must say the same.
        for settings in ({**outside, **given}, {**given, **outside}):
            found.add(_rotary_of({"rope_theta": 10000.0, **settings}, where))
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: rope_theta, rope_scaling and rope_parameters contradict each other; remove the wrong "
            "one"
        )
    return found.pop()


def _rotary_of(given: Mapping[str, Any], where: Path) -> tuple[float, str | None]:
    kind = given.get("rope_type", given.get("type", "default"))
    keys = ["rope_theta"]
    if kind == "llama3":
        keys += ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    numbers = [given.get(key) for key in keys]
    # An object among them would be settings for some layers only.
    by_layer = any(isinstance(one, dict) for one in given.values())
    if kind not in ("default", "llama3") or by_layer or not all(map(_is_finite, numbers)):
        raise CheckpointError(
            f"{where}: rotary positions must be of type default or llama3, with all its numbers, for all "
            f"layers; found {str(dict(given))[:120]}"
        )
    if given.get("partial_rotary_factor") not in (1, None):
        raise CheckpointError(f"{where}: partial_rotary_factor must be 1: all channels of a head are rotated")
    theta, *scaling = (float(one) for one in numbers if one is not None)
    return theta, RopeScaling(*scaling).text if scaling else None


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float holds; a whole number of JSON may have thousands of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30
