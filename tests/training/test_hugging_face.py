"""Llama and Qwen3 folders of transformers come in and go out with the same logits and tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import blocktrain
from blocktrain.config import resolve_recipe
from blocktrain.data.bpe import train_bpe
from blocktrain.errors import CheckpointError, UserError
from blocktrain.ids import CorpusHash
from blocktrain.model.composition import block_log_probs, run_blocks
from blocktrain.model.generation import LocalModel, generate
from blocktrain.model.pooling import Pooling, pool
from blocktrain.tracking.model_card import model_card
from blocktrain.training import hugging_face
from blocktrain.training.checkpoint import (
    UNKNOWN_TEXT,
    Checkpoint,
    Description,
    load_checkpoint,
    read_config,
    save_checkpoint,
    starting_blocks,
)
from blocktrain.training.hugging_face import export_folder, import_folder, is_importable
from blocktrain.training.setup import Setup
from tests.tiny import prose

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_bpe([prose(4000).decode()], 300))
    return path


def made(folder: Path, tokenizer_file: Path, family: str = "llama", **settings: Any) -> Any:
    """A random model as transformers writes it; the model."""
    import transformers

    sharded = settings.pop("sharded", False)
    common = {**SHAPE, "vocab_size": 300, **settings}
    config: Any = (transformers.LlamaConfig if family == "llama" else transformers.Qwen3Config)(**common)
    torch.manual_seed(1)
    model: Any = (transformers.LlamaForCausalLM if family == "llama" else transformers.Qwen3ForCausalLM)(
        config
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB")
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    return model


def some_tokens() -> Tensor:
    return torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))


def last_logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    *_, last = run_blocks(checkpoint.objective, checkpoint.blocks, checkpoint.codebook_VD, tokens)
    return last.logits_BTV


CASES: dict[str, dict[str, Any]] = {
    "llama": {"sharded": True},
    "tied and stretched": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "padded": {"vocab_size": 320},
    "qwen3": {
        "family": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 99.0},
    },
    "qwen3 tied": {"family": "qwen3", "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", [1, 2, 3])
@torch.no_grad()
def test_a_folder_comes_in_and_goes_out_with_the_same_logits(
    case: str, parts: int, tokenizer_file: Path, tmp_path: Path
) -> None:
    import transformers

    theirs = made(tmp_path / "in", tokenizer_file, **CASES[case])
    assert is_importable(tmp_path / "in")
    import_folder(tmp_path / "in", tmp_path / "checkpoint", parts)
    ours, tokens = load_checkpoint(tmp_path / "checkpoint", CPU), some_tokens()
    assert len(ours.blocks) == parts
    expected = theirs(tokens).logits[..., :300]
    torch.testing.assert_close(last_logits(ours, tokens), expected, rtol=1e-5, atol=1e-5)

    export_folder(tmp_path / "checkpoint", tmp_path / "out", "card")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(theirs)
    torch.testing.assert_close(loaded(tokens).logits[..., :300], expected, rtol=1e-5, atol=1e-5)
    text = "each token learns alone\n\n  and é"
    with_theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert with_theirs(text)["input_ids"] == ours.tokenizer.encode(text.encode()).tolist()
    assert with_theirs.decode(with_theirs(text)["input_ids"]) == text
    assert with_theirs.eos_token == "<|endoftext|>"
    assert loaded.config.eos_token_id == with_theirs.eos_token_id

    import_folder(tmp_path / "out", tmp_path / "again", parts)
    for file in (tmp_path / "checkpoint").glob("block-*"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_an_imported_model_begins_a_text_as_transformers_does_and_one_trained_here_does_not(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    import transformers

    described = json.loads(tokenizer_file.read_text())
    ((name, number),) = ((one["content"], one["id"]) for one in described["added_tokens"])
    text = {"Sequence": {"id": "A", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    made(tmp_path / "in", tmp_path / "tokenizer.json")
    import_folder(tmp_path / "in", tmp_path / "checkpoint")
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    ours = load_checkpoint(tmp_path / "checkpoint", CPU)
    expected = theirs("The class")["input_ids"]
    assert expected[0] == number
    assert ours.tokenizer.encode(b"The class").tolist() == expected
    assert ours.tokenizer.decode(expected) == b"The class"

    args = (ours.blocks, ours.codebook_VD, ours.pooling, ours.tokenizer)
    save_checkpoint(tmp_path / "trained", ours.recipe, CorpusHash("ab" * 32), *args)
    trained = load_checkpoint(tmp_path / "trained", CPU)
    assert trained.tokenizer.encode(b"The class").tolist() == expected[1:]

    # All tokens of the text are scored behind the one in front; without it, all but the first.
    for model, scored in ((ours, len(expected) - 1), (trained, len(expected) - 2)):
        found = blocktrain.evaluate(model, "The class")
        assert (found.scored_tokens, found.bytes_per_token) == (scored, 9 / (len(expected) - 1))
    for name, said in (("checkpoint", False), ("trained", True)):
        described = Description.of(read_config(tmp_path / name), tmp_path / name)
        assert ("`add_special_tokens=False`" in model_card(described, None)) is said


@torch.no_grad()
def test_greedy_text_equals_that_of_transformers(tokenizer_file: Path, tmp_path: Path) -> None:
    theirs = made(tmp_path / "in", tokenizer_file)
    import_folder(tmp_path / "in", tmp_path / "checkpoint", 2)
    ours, prompt = load_checkpoint(tmp_path / "checkpoint", CPU), some_tokens()[:1, :5]
    model = LocalModel(ours.objective, ours.blocks, ours.codebook_VD, ours.pooling)
    found = list(generate(model, prompt[0].tolist(), max_tokens=20, seed=0, temperature=0))
    # Untrained, it may well write the token at which transformers would stop.
    written = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert found == written[0, 5:].tolist()


@torch.no_grad()
def test_a_folder_in_two_bytes_comes_in(tokenizer_file: Path, tmp_path: Path) -> None:
    import transformers

    made(tmp_path / "in", tokenizer_file).bfloat16().save_pretrained(tmp_path / "in")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32)
    import_folder(tmp_path / "in", tmp_path / "checkpoint")
    ours, tokens = load_checkpoint(tmp_path / "checkpoint", CPU), some_tokens()
    expected = theirs(tokens).logits
    torch.testing.assert_close(last_logits(ours, tokens), expected, rtol=1e-5, atol=1e-5)


def pooled(folder: Path) -> Checkpoint:
    """A checkpoint of two independent byte-level blocks."""
    model = {"family": "qwen3", "width": 32, "heads": 4, "kv_heads": 2, "blocks": 2, "layers_per_block": 2}
    recipe = resolve_recipe({"name": "pair", "model": {**model, "context": 48}})
    setup = Setup.of(recipe)
    blocks = [setup.initial(index) for index in range(2)]
    with torch.no_grad():
        for number, block in enumerate(blocks):
            generator = torch.Generator().manual_seed(number)
            for parameter in block.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_checkpoint(folder, recipe, UNKNOWN_TEXT, blocks, setup.codebook()(), Pooling((0.25, 0.75)))
    return load_checkpoint(folder, CPU)


@torch.no_grad()
def test_independent_blocks_go_out_as_folders_of_their_own_and_come_back(tmp_path: Path) -> None:
    import transformers

    ours, tokens = pooled(tmp_path / "checkpoint"), some_tokens() % 256
    export_folder(tmp_path / "checkpoint", tmp_path / "out", "card")
    described = json.loads((tmp_path / "out" / "pool.json").read_text())
    assert (described["blocks"], described["weights"]) == (["block-00", "block-01"], [0.25, 0.75])
    rows = []
    for name in described["blocks"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name)
        assert model.config.model_type == "qwen3"
        rows.append(model(tokens).logits.log_softmax(dim=-1))
    found = pool(rows, described["weights"])
    expected = pool(
        block_log_probs(ours.objective, ours.blocks, ours.codebook_VD, tokens), ours.pooling.weights
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert import_folder(tmp_path / "out", tmp_path / "back") == ours.recipe
    for file in (tmp_path / "checkpoint").iterdir():
        if file.suffix == ".safetensors":
            again = safetensors.torch.load_file(tmp_path / "back" / file.name)
            for name, tensor in safetensors.torch.load_file(file).items():
                assert torch.equal(again[name], tensor)
    # One of them alone is a model too.
    import_folder(tmp_path / "out" / "block-01", tmp_path / "one")
    assert load_checkpoint(tmp_path / "one", CPU).recipe.model.blocks == 1


def test_large_models_go_out_in_several_files(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    made(tmp_path / "in", tokenizer_file)
    import_folder(tmp_path / "in", tmp_path / "checkpoint")
    monkeypatch.setattr(hugging_face, "MAX_SHARD_BYTES", 40_000)
    export_folder(tmp_path / "checkpoint", tmp_path / "out", "card")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kept = safetensors.torch.load_file(tmp_path / "checkpoint" / "block-00.safetensors")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, kept[name])


def changed(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def more_tensors(folder: Path, **extra: Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    path.unlink()
    safetensors.torch.save_file({**tensors, **extra}, path, {"format": "pt"})


def without_output_map(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    path.unlink()
    safetensors.torch.save_file(
        {name: one for name, one in tensors.items() if name != "lm_head.weight"}, path, {"format": "pt"}
    )


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "another family": (changed("model_type", "gpt2"), "model_type must be one of llama, qwen3"),
    "another activation": (changed("hidden_act", "gelu"), 'hidden_act must be "silu"'),
    "biases": (changed("attention_bias", True), "attention_bias must be false"),
    "a bias that config.json hides": (
        lambda folder: more_tensors(folder, **{"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}),
        "tensor model.layers.1.self_attn.q_proj.bias: expected none",
    ),
    "more layers than named": (changed("num_hidden_layers", 3), "beyond the 3 layers"),
    "fewer tensors than layers": (changed("num_hidden_layers", 4096), "too few for the recipe's"),
    "another width": (changed("hidden_size", 64), "expected float32"),
    "quantised": (changed("quantization_config", {"bits": 4}), "quantization_config must be null"),
    "yarn": (changed("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}), "default or llama3"),
    "two rotary settings": (changed("rope_scaling", LLAMA3), "contradict each other"),
    "two thetas": (changed("rope_theta", 77.0), "contradict each other"),
    "rotary settings of some layers": (
        changed("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        "for all layers",
    ),
    "half of the channels rotated": (
        changed("rope_parameters", {**LLAMA3, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor must be 1",
    ),
    "half of the channels, said outside": (
        changed("partial_rotary_factor", 0.5),
        "partial_rotary_factor must be 1",
    ),
    "a theta of 400 digits": (
        changed("rope_parameters", {"rope_type": "default", "rope_theta": 10**400}),
        "with all its numbers",
    ),
    "another class": (changed("architectures", ["LlamaForSequenceClassification"]), "architectures must be"),
    "windows by layer": (changed("layer_types", ["sliding_attention"] * 4), "layer_types must all be"),
    "both ways": (changed("is_causal", False), "is_causal must be true"),
    "tied, with another output map": (
        changed("tie_word_embeddings", True),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "not tied, without an output map": (without_output_map, "lm_head.weight is missing"),
    "tied by a word": (changed("tie_word_embeddings", "yes"), "must be true or false"),
    "a matrix beyond 64 bits": (changed("intermediate_size", (1 << 31) - 1), "must be at most 16777216"),
    "no number": (changed("num_attention_heads", "many"), "num_attention_heads must be a number"),
    "a huge context": (changed("max_position_embeddings", 1 << 30), "model.context must be at most"),
    "too few rows": (changed("vocab_size", 200), "the tokenizer has 300 tokens"),
    "whole numbers": (
        lambda folder: more_tensors(folder, **{"model.norm.weight": torch.ones(32, dtype=torch.int64)}),
        "tensor model.norm.weight",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "pickled weights": (pickled, "pickled .bin files are not read"),
    "a file outside": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "../../etc/passwd"}})
        ),
        "expected files named model-",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    made(folder, tokenizer_file)
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_folder_that_we_would_get_wrong_is_refused(case: str, good: Path, tmp_path: Path) -> None:
    break_, told = BAD[case]
    shutil.copytree(good, tmp_path / "bad")
    break_(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=told):
        import_folder(tmp_path / "bad", tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_tied_folder_that_has_the_output_map_too_comes_in(good: Path, parts: int, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "both")
    embedding = safetensors.torch.load_file(good / "model.safetensors")["model.embed_tokens.weight"]
    more_tensors(tmp_path / "both", **{"lm_head.weight": embedding.clone()})
    changed("tie_word_embeddings", True)(tmp_path / "both")
    import_folder(tmp_path / "both", tmp_path / "checkpoint", parts)
    last = load_checkpoint(tmp_path / "checkpoint", CPU).blocks[-1].state_dict()
    name = "model.embed_tokens.weight" if parts == 1 else "lm_head.weight"
    assert torch.equal(last[name], embedding)
    assert ("lm_head.weight" in last) == (parts > 1)


def test_every_digit_of_a_rotary_setting_comes_in(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "long")
    changed("rope_parameters", {**LLAMA3, "original_max_position_embeddings": 1048577, "factor": 1.2345678})(
        tmp_path / "long"
    )
    assert import_folder(tmp_path / "long", tmp_path / "checkpoint").model.rope_scaling == (
        "llama3:1.2345678,1,4,1048577"
    )


def test_a_pool_has_a_weight_for_each_block(tmp_path: Path) -> None:
    pooled(tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "out", "card")
    path = tmp_path / "out" / "pool.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights": [1.0]}))
    with pytest.raises(CheckpointError, match="expected 2 weights, found 1"):
        import_folder(tmp_path / "out", tmp_path / "back")


@pytest.mark.parametrize(
    "setting",
    ["model.rope_theta=500.0", "model.norm_eps=0.01", "model.heads=8", "model.rope_scaling=llama3:8,1,4,32"],
)
def test_weights_do_not_go_on_with_other_arithmetic(setting: str, good: Path, tmp_path: Path) -> None:
    """Shapes alone fit: 8 heads of 4 channels have the matrices of 4 heads of 8."""
    recipe = import_folder(good, tmp_path / "checkpoint")
    settings = [setting, "model.head_width=4", "model.kv_heads=4"] if "heads" in setting else [setting]
    other = resolve_recipe(recipe.to_dict(), settings)
    name = setting.partition("=")[0]
    with pytest.raises(CheckpointError, match=f"was trained with {name}"):
        starting_blocks(tmp_path / "checkpoint", Setup.of(other, 300))
    assert len(starting_blocks(tmp_path / "checkpoint", Setup.of(recipe, 300))[0]) == 1


def test_there_are_no_more_parts_than_layers(good: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--parts 5 must be between 1 and the 4 layers"):
        import_folder(good, tmp_path / "checkpoint", 5)
