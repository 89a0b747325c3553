"""A checkpoint goes to a Hugging Face folder and comes back bit for bit; a damaged folder does not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch

from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import CheckpointError, UserError
from blocktrain.ids import CorpusHash
from blocktrain.model.block import make_codebook
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import file_entry, load_checkpoint, save_checkpoint
from blocktrain.training.exchange import export_checkpoint, import_checkpoint
from tests.adversaries.mutations import hostile_inputs
from tests.tiny import adaptive, shaken, tiny_recipe

CPU = torch.device("cpu")


def make_checkpoint(path: Path, *overrides: str) -> Path:
    recipe = tiny_recipe(*overrides)
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    blocks = [shaken(objective.build(b, seed=b), seed=b) for b in range(recipe.model.blocks)]
    codebook = make_codebook(256, recipe.model.width, seed=1)
    pooling = Pooling(tuple((b + 1) / sum(range(len(blocks) + 1)) for b in range(len(blocks))))
    save_checkpoint(path, recipe, CorpusHash("ab" * 32), blocks, codebook, pooling)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("exchange") / "checkpoint")


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> Path:
    folder = checkpoint.parent / "exported"
    export_checkpoint(checkpoint, folder, "# a card\n")
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "exported"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("objective.kind=chain", "model.blocks=3"),
        ("objective.hint_probability=0",),
        ("model.mixer=none", "model.blocks=1"),
        ("name=naïve ✓ `x`",),
    ],
    ids=str,
)
def test_what_is_exported_comes_back_bit_for_bit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    before = make_checkpoint(tmp_path / "before", *overrides)
    export_checkpoint(before, tmp_path / "exported", "")
    import_checkpoint(tmp_path / "exported", tmp_path / "after")
    files = sorted(file.name for file in before.iterdir())
    assert files == sorted(file.name for file in (tmp_path / "after").iterdir())
    for name in files:
        assert (before / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name
    assert load_checkpoint(tmp_path / "after", CPU).recipe == tiny_recipe(*overrides)


def test_the_folder_is_what_hugging_face_programs_expect(exported: Path, checkpoint: Path) -> None:
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        weights |= safetensors.torch.load_file(exported / name)
    assert weights.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in weights.values())
    loaded = load_checkpoint(checkpoint, CPU)
    assert torch.equal(weights["blocks.1.out.weight"], adaptive(loaded.blocks[1]).out.weight)
    assert torch.equal(weights["codebook.table"], loaded.codebook_VD)
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "blocktrain"
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (32, 2, 256)


def test_the_tokenizer_gives_every_byte_its_own_number(exported: Path) -> None:
    theirs, ours = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json")), ByteTokenizer()
    for text in ("The  function()\n\tof naïve ✓ 😀", "".join(map(chr, range(300)))):
        tokens = theirs.encode(text, add_special_tokens=False).ids
        assert tokens == ours.encode(text.encode()).tolist()
        assert theirs.decode(tokens, skip_special_tokens=False) == text


def test_a_checkpoint_that_was_changed_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(checkpoint, tmp_path / "spoiled"))
    content = bytearray((spoiled / "block-01.safetensors").read_bytes())
    content[-3] ^= 1
    (spoiled / "block-01.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="expected sha256"):
        export_checkpoint(spoiled, tmp_path / "exported", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["spoiled"]


def test_a_folder_with_something_in_it_is_left_alone(
    checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not an empty folder"):
        export_checkpoint(checkpoint, tmp_path, "")
    with pytest.raises(UserError, match="not an empty folder"):
        import_checkpoint(exported, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


CODEBOOK = "model-00003-of-00003.safetensors"
HOSTILE_INPUTS = 120


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", CODEBOOK])
def test_a_hostile_file_is_read_or_refused_and_never_crashes(copy: Path, tmp_path: Path, name: str) -> None:
    """A forger writes hashes that fit, so the last of them reaches the reader of safetensors."""
    sound, config = (copy / name).read_bytes(), json.loads((copy / "config.json").read_text())
    refused = 0
    for number, content in enumerate(islice(hostile_inputs([sound], seed=5), HOSTILE_INPUTS)):
        (copy / name).write_bytes(content)
        if name == CODEBOOK:
            entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            config["blocktrain"]["files"][name] = entry
            (copy / "config.json").write_text(json.dumps(config))
        try:
            import_checkpoint(copy, tmp_path / f"imported-{number}")
        except CheckpointError:
            refused += 1
            assert not (tmp_path / f"imported-{number}").exists()
    assert refused > HOSTILE_INPUTS / 2


FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def reconfig(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["blocktrain"])
    (folder / "config.json").write_text(json.dumps(config))


def pickled(folder: Path, content: bytes) -> None:
    """Another file, with size and hash to match."""
    (folder / FIRST).write_bytes(content)
    reconfig(folder, lambda own: own["files"].update({FIRST: file_entry(folder / FIRST)}))


def swap(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Other tensors, with size and hash to match: a forger can write config.json too."""
    tensors = safetensors.torch.load_file(folder / FIRST)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / FIRST)
    entry = file_entry(folder / FIRST)
    reconfig(folder, lambda own: own["files"].update({FIRST: {k: entry[k] for k in ("sha256", "bytes")}}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def model_of(own: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = own["checkpoint"]["recipe"]["model"]
    return model


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda f: flip(f / FIRST), "expected sha256"),
    "a cut file": (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-9]), "is truncated"),
    "a missing file": (lambda f: (f / FIRST).unlink(), f"{FIRST} is missing"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "another kind of model": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), "'gpt2'"),
    "a config that is no object": (lambda f: (f / "config.json").write_text("[]"), "expected an object"),
    "a config nested without end": (
        lambda f: (f / "config.json").write_text("[" * 200_000), "cannot be read"),
    "a config longer than any": (
        lambda f: (f / "config.json").write_bytes(b" " * (5 << 20)), "is longer than"),
    "an export of the future": (lambda f: reconfig(f, lambda own: own.update(version=2)), "version 2"),
    "no checkpoint in it": (lambda f: reconfig(f, lambda own: own.update(checkpoint=[])), "is damaged"),
    "no files": (lambda f: reconfig(f, lambda own: own.update(files={})), "expected 3 safetensors files"),
    "a file outside": (
        lambda f: reconfig(f, lambda own: own["files"].update({"../../secret": {"bytes": 1}})),
        "names a file '../../secret'"),
    "a pickle among the files": (
        lambda f: reconfig(f, lambda own: own["files"].update({"pytorch_model.bin": {}})), "names a file"),
    "more blocks than files": (
        lambda f: reconfig(f, lambda own: (model_of(own).update(blocks=1 << 16),)), "pooling weights"),
    "blocks without files": (
        lambda f: reconfig(
            f, lambda own: (model_of(own).update(blocks=3), own["checkpoint"].update(pooling=[0.3] * 3))),
        "expected 4 safetensors files"),
    "a width that no machine holds": (
        lambda f: reconfig(f, lambda own: model_of(own).update(width=2**24)), "16777216"),
    "layers without end": (
        lambda f: reconfig(f, lambda own: model_of(own).update(layers_per_block=4096)), "too few"),
    "no index": (lambda f: (f / INDEX).unlink(), f"{INDEX} is missing"),
    "an index that lies": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"blocks.0.out.weight": "x"}}'), "weight_map"),
    "a tensor of another shape": (
        lambda f: swap(f, lambda t: t.update({"blocks.0.out.weight": torch.zeros(4, 4)})),
        r"expected float32 \[32, 32\], found float32 \[4, 4\]"),
    "a tensor of another type": (
        lambda f: swap(f, lambda t: t.update({"blocks.0.out.weight": torch.zeros(32, 32).half()})),
        r"found float16 \[32, 32\]"),
    "a tensor too many": (lambda f: swap(f, lambda t: t.update(evil=torch.zeros(2))), "tensor evil"),
    "a file that is no safetensors": (
        lambda f: pickled(f, b"PK\3\4 a pickle of a stranger" * 9),
        "is not safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_and_nothing_is_written(copy: Path, tmp_path: Path, damage: str) -> None:
    spoil, complaint = DAMAGE[damage]
    spoil(copy)
    with pytest.raises(CheckpointError, match=complaint):
        import_checkpoint(copy, tmp_path / "imported")
    assert [entry.name for entry in tmp_path.iterdir()] == ["exported"]
