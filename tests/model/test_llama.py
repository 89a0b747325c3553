"""A block of the families `llama` and `qwen3` is the model of that name: its logits equal transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.errors import RecipeError
from blocktrain.model.block import Block
from blocktrain.model.caches import PackedCache, Shelves
from blocktrain.model.objective import Objective
from blocktrain.model.quick import PlainBlocks, is_quickenable
from blocktrain.training.inner import build_codebook
from tests.tiny import VOCABULARY, shaken, some_tokens

LENGTH = 40
MODEL = {"family": "llama", "width": 32, "heads": 4, "blocks": 1, "layers_per_block": 2, "context": 64}
NO_CODEBOOK = torch.empty(0, 32)
SCALING = "llama3:4,1,4,16"
HUGGING_FACE_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def recipe(**model: Any) -> Recipe:
    return resolve_recipe({"model": MODEL | model})


def built(**model: Any) -> Block:
    chosen = recipe(**model)
    return shaken(Objective(chosen.model, chosen.objective, vocabulary=VOCABULARY).build(0, seed=0))


def theirs(block: Block, **settings: Any) -> Any:
    """The same weights in the class of transformers."""
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        **settings,
    }
    qwen3 = "model.layers.0.self_attn.q_norm.weight" in dict(block.named_parameters())
    config: Any = (transformers.Qwen3Config if qwen3 else transformers.LlamaConfig)(**common)
    model: Any = (transformers.Qwen3ForCausalLM if qwen3 else transformers.LlamaForCausalLM)(config)
    model.eval()
    missing, unexpected = model.load_state_dict(block.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize(
    ("ours", "hugging_face"),
    [
        ({"feedforward_width": 88}, {"intermediate_size": 88}),
        ({"kv_heads": 2, "tied": True}, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ({"kv_heads": 1, "head_width": 16, "norm_eps": 1e-5}, {"num_key_value_heads": 1, "head_dim": 16}),
        ({"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        (
            {"rope_theta": 500.0, "rope_scaling": SCALING},
            {"rope_parameters": HUGGING_FACE_SCALING | {"rope_theta": 500.0}},
        ),
        ({"family": "qwen3", "kv_heads": 2}, {"num_key_value_heads": 2, "head_dim": 8}),
        (
            {"family": "qwen3", "kv_heads": 2, "head_width": 12, "tied": True},
            {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True},
        ),
    ],
    ids=["plain", "grouped tied", "wide heads", "theta", "llama3 scaling", "qwen3", "qwen3 tied"],
)
@torch.no_grad()
def test_logits_equal_those_of_transformers(ours: dict[str, Any], hugging_face: dict[str, Any]) -> None:
    block, tokens = built(**ours), some_tokens(3, LENGTH)
    settings = {"intermediate_size": 128, "rms_norm_eps": ours.get("norm_eps", 1e-6), **hugging_face}
    if "num_key_value_heads" not in settings:
        settings["num_key_value_heads"] = 4
    expected: Tensor = theirs(block, **settings)(tokens).logits
    assert float(expected.std()) > 0.1
    found = block(tokens, NO_CODEBOOK).logits_BTV
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_text_in_pieces_gives_the_rows_of_the_whole(family: str) -> None:
    block, tokens = built(family=family, kv_heads=2), some_tokens(1, LENGTH)
    whole = block(tokens, NO_CODEBOOK).logits_BTV
    cache = block.new_cache()
    pieces = [block(tokens[:, :20], NO_CODEBOOK, cache=cache).logits_BTV]
    # A draft that was wrong is forgotten.
    block(some_tokens(1, 7, seed=5), NO_CODEBOOK, cache=cache)
    cache.truncate(20)
    pieces += [block(tokens[:, [i]], NO_CODEBOOK, cache=cache).logits_BTV for i in range(20, LENGTH)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_two_texts_share_a_pass() -> None:
    block, tokens = built(kv_heads=2), some_tokens(2, LENGTH)
    whole = block(tokens, NO_CODEBOOK).logits_BTV
    caches = [block.new_cache(), block.new_cache()]
    block(tokens[:1, :9], NO_CODEBOOK, cache=caches[0])
    packed = torch.cat([tokens[0, 9:12], tokens[1, :5]])[None]
    rows = block(packed, NO_CODEBOOK, cache=PackedCache(caches, [3, 5], Shelves())).logits_BTV[0]
    torch.testing.assert_close(rows[:3], whole[0, 9:12], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows[3:], whole[1, :5], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_it_drafts_without_the_quick_path() -> None:
    block, tokens = built(), some_tokens(1, LENGTH)
    assert not is_quickenable(block)
    steps = PlainBlocks([block], NO_CODEBOOK)
    cache = steps.new_cache()
    steps.extend(tokens[0, :-1].tolist(), cache)
    row = steps.step([int(tokens[0, -1])], [cache])[0, 0]
    torch.testing.assert_close(row, block(tokens, NO_CODEBOOK).logits_BTV[0, -1], rtol=1e-4, atol=1e-5)


def test_the_loss_is_plain_cross_entropy() -> None:
    chosen = recipe()
    objective = Objective(chosen.model, chosen.objective, vocabulary=VOCABULARY)
    block, tokens, targets = built(), some_tokens(2, LENGTH), some_tokens(2, LENGTH, seed=1)
    loss = objective.loss(block, tokens, targets, NO_CODEBOOK)
    expected = F.cross_entropy(block(tokens, NO_CODEBOOK).logits_BTV.flatten(0, 1), targets.flatten())
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.ce.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_fresh_block_predicts_every_symbol_alike_and_needs_no_codebook() -> None:
    chosen = recipe()
    objective = Objective(chosen.model, chosen.objective, vocabulary=VOCABULARY)
    codebook = build_codebook(chosen, VOCABULARY)
    assert codebook().shape == (0, 32)
    logits = objective.build(0, seed=0)(some_tokens(1, 8), codebook()).logits_BTV
    assert torch.equal(logits, torch.zeros(1, 8, VOCABULARY))


def test_rows_beyond_the_tokenizer_are_there_and_never_predicted() -> None:
    block = built(padded_vocabulary=24)
    assert dict(block.named_parameters())["model.embed_tokens.weight"].shape == (24, 32)
    assert block(some_tokens(1, 8), NO_CODEBOOK).logits_BTV.shape == (1, 8, VOCABULARY)


def test_its_matrices_are_those_of_the_layers() -> None:
    names = built(family="qwen3").matrices()
    assert len(names) == 2 * 7
    assert all(name.startswith("model.layers.") for name in names)
    assert not any("norm" in name for name in names)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.convolution=2"], "model.convolution"),
        (["model.mixer=none"], "model.mixer"),
        (["objective.hint_probability=0.15"], "hint_probability = 0"),
        (["objective.kind=chain"], "plain cross entropy"),
        (["objective.loss=mse"], "objective.loss"),
        (["objective.sigma_min=0.5"], "objective.sigma_min"),
        (["model.kv_heads=3"], "multiple of model.kv_heads"),
        (["model.rope_scaling=yarn:2"], "llama3:FACTOR,LOW,HIGH,CONTEXT"),
        (["model.rope_scaling=llama3:8,4,1,8192"], "LOW below HIGH"),
        (["model.family=blocktrain", "model.tied=true"], "model.tied"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        resolve_recipe({"model": MODEL}, overrides)


def test_the_family_brings_its_own_defaults_and_they_can_be_set() -> None:
    chosen = resolve_recipe({}, ["model.family=llama", "training.clip_norm=2"])
    assert (chosen.objective.hint_probability, chosen.training.clip_norm) == (0.0, 2.0)
    assert resolve_recipe(chosen.to_dict()) == chosen
    assert resolve_recipe({}).objective.hint_probability == 0.15
