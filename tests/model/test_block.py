"""A block: causal in tokens and hints, alone, and equal to itself when fed piece by piece."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.model.adaptive import AdaptiveBlock
from blocktrain.model.block import Block, Hint, make_codebook
from blocktrain.model.noise import precondition
from blocktrain.model.objective import Objective
from tests.tiny import VOCABULARY, adaptive, shaken, some_noise, some_tokens, tiny_codebook, tiny_objective

LENGTH = 24
SHAPES = ["model.convolution=0", "model.convolution=1", "model.convolution=4", "model.layers_per_block=2"]


def block_and_codebook(*overrides: str) -> tuple[AdaptiveBlock, Tensor]:
    objective = tiny_objective(*overrides)
    return adaptive(shaken(objective.build(0, seed=0))), tiny_codebook(objective)


def some_hint() -> Hint:
    return Hint(some_noise(2, LENGTH, 32), torch.linspace(1, 10, 2))


def changed_positions(before_BTV: Tensor, after_BTV: Tensor) -> list[int]:
    moved = (before_BTV - after_BTV).abs().amax(dim=(0, 2))
    return [t for t, by in enumerate(moved.tolist()) if by > 1e-6]


@pytest.mark.parametrize("hinted", [False, True], ids=["null hint", "hint"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_token_changes_no_logit_before_it(shape: str, hinted: bool) -> None:
    block, codebook = block_and_codebook(shape)
    tokens = some_tokens(2, LENGTH)
    hint = some_hint() if hinted else None
    before = block(tokens, codebook, hint).logits_BTV
    for t in (0, 7, LENGTH - 1):
        altered = tokens.clone()
        altered[:, t] = (altered[:, t] + 1) % VOCABULARY
        changed = changed_positions(before, block(altered, codebook, hint).logits_BTV)
        assert changed[0] == t
        assert min(changed) >= t


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_hint_changes_only_positions_from_its_own_on(shape: str) -> None:
    block, codebook = block_and_codebook(shape)
    tokens, hint = some_tokens(2, LENGTH), some_hint()
    before = block(tokens, codebook, hint).logits_BTV
    for t in (0, 7, LENGTH - 1):
        z = hint.z_PTD.clone()
        z[:, t] += 1
        changed = changed_positions(before, block(tokens, codebook, Hint(z, hint.sigma_P)).logits_BTV)
        assert changed[0] == t
        assert len(changed) > 1 or t == LENGTH - 1


@torch.no_grad()
def test_an_mlp_block_sees_only_its_own_token() -> None:
    block, codebook = block_and_codebook("model.mixer=none")
    tokens = some_tokens(2, LENGTH)
    altered = tokens.clone()
    altered[:, 9] = (altered[:, 9] + 1) % VOCABULARY
    before, after = block(tokens, codebook).logits_BTV, block(altered, codebook).logits_BTV
    assert changed_positions(before, after) == [9]


@torch.no_grad()
def test_a_block_reads_its_hint_and_its_noise_level() -> None:
    block, codebook = block_and_codebook()
    tokens, hint = some_tokens(2, LENGTH), some_hint()
    plain = block(tokens, codebook).logits_BTV
    hinted = block(tokens, codebook, hint).logits_BTV
    louder = block(tokens, codebook, Hint(hint.z_PTD, 2 * hint.sigma_P)).logits_BTV
    assert changed_positions(plain, hinted) == list(range(LENGTH))
    assert changed_positions(hinted, louder) == list(range(LENGTH))


@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_one_another_hinted_or_not() -> None:
    block, codebook = block_and_codebook()
    tokens, hint = some_tokens(3, LENGTH), some_hint()
    together = block(tokens, codebook, hint).logits_BTV
    for i in range(2):
        alone = block(tokens[i : i + 1], codebook, Hint(hint.z_PTD[i : i + 1], hint.sigma_P[i : i + 1]))
        torch.testing.assert_close(together[i : i + 1], alone.logits_BTV)
    torch.testing.assert_close(together[2:], block(tokens[2:], codebook).logits_BTV)


@torch.no_grad()
def test_the_null_hint_is_the_limit_of_infinite_noise() -> None:
    block, codebook = block_and_codebook()
    tokens, sigma = some_tokens(2, LENGTH), torch.full((2,), 1e9)
    # The noise level itself comes through the condition; the null hint has a learned one of its own.
    level = precondition(sigma, block.sigma_data).c_noise
    block.condition.null.copy_(block.condition(level)[0])
    far = block(tokens, codebook, Hint(some_noise(2, LENGTH, 32), sigma))
    null = block(tokens, codebook)
    torch.testing.assert_close(far.z_hat_BTD, null.z_hat_BTD, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(far.logits_BTV, null.logits_BTV, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_denoised_target_is_the_preconditioned_sum() -> None:
    """z_hat = c_out F + c_skip z, with F read off by feeding the same network a different skip."""
    block, codebook = block_and_codebook()
    tokens, hint = some_tokens(2, LENGTH), some_hint()
    c = precondition(hint.sigma_P, 0.5)
    output = block(tokens, codebook, hint)
    c_BC = block.condition(c.c_noise)
    f_BTD = block.out(block.out_norm(output.features_BTD, c_BC))
    expected = c.c_out[:, None, None] * f_BTD + c.c_skip[:, None, None] * hint.z_PTD
    torch.testing.assert_close(output.z_hat_BTD, expected)


@torch.no_grad()
def test_logits_are_the_scaled_products_with_the_codebook() -> None:
    block, codebook = block_and_codebook()
    output = block(some_tokens(2, LENGTH), codebook, some_hint())
    expected = block.logit_scale * output.z_hat_BTD @ codebook.T
    torch.testing.assert_close(output.logits_BTV, expected)


def test_a_fresh_block_predicts_every_symbol_alike() -> None:
    objective = tiny_objective()
    logits = objective.build(0, seed=0)(some_tokens(1, 8), tiny_codebook(objective)).logits_BTV
    assert torch.equal(logits, torch.zeros_like(logits))


def test_context_embeddings_are_as_long_as_the_scaled_hint() -> None:
    """Both are about sqrt(d) long; a block ignores a context that is much shorter."""
    objective = tiny_objective("model.width=128")
    length = adaptive(objective.build(0, seed=0)).embedding.weight.detach().norm(dim=1).mean()
    assert float(length) == pytest.approx(math.sqrt(128), rel=0.1)


@pytest.mark.usefixtures("unchanged_random_state")
def test_initial_weights_are_a_function_of_the_seed_alone() -> None:
    objective = tiny_objective()
    first, second, other = (objective.build(0, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_blocks_share_no_trainable_tensor() -> None:
    objective = tiny_objective()
    first, second = (objective.build(b, seed=b) for b in range(2))
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}


def test_the_reference_has_the_layers_of_all_blocks() -> None:
    objective = tiny_objective("model.blocks=3", "model.layers_per_block=2")
    assert objective.build_reference(seed=0).num_layers == 6
    assert objective.build(0, seed=0).num_layers == 2


@pytest.mark.parametrize(("vocabulary", "width"), [(16, 32), (32, 32), (256, 32), (256, 384)])
def test_codebook_rows_have_unit_norm(vocabulary: int, width: int) -> None:
    table = make_codebook(vocabulary, width, seed=1)
    assert table.shape == (vocabulary, width)
    torch.testing.assert_close(table.norm(dim=1), torch.ones(vocabulary))


@pytest.mark.parametrize(("vocabulary", "width"), [(16, 32), (32, 32), (256, 384)])
def test_codebook_rows_are_orthonormal_where_they_fit(vocabulary: int, width: int) -> None:
    table = make_codebook(vocabulary, width, seed=1)
    torch.testing.assert_close(table @ table.T, torch.eye(vocabulary), atol=1e-6, rtol=0)


def test_codebook_is_a_function_of_its_seed() -> None:
    first, second, other = (make_codebook(16, 32, seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def in_pieces(block: Block, codebook: Tensor, tokens: Tensor, sizes: list[int]) -> Tensor:
    cache, outputs, start = block.new_cache(), [], 0
    for size in sizes:
        outputs.append(block(tokens[:, start : start + size], codebook, cache=cache).logits_BTV)
        start += size
        assert cache.length == start
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("shape", [*SHAPES, "model.mixer=none"])
@torch.no_grad()
def test_token_by_token_equals_the_full_forward_pass(shape: str) -> None:
    block, codebook = block_and_codebook(shape)
    tokens = some_tokens(2, LENGTH)
    full = block(tokens, codebook).logits_BTV
    torch.testing.assert_close(in_pieces(block, codebook, tokens, [1] * LENGTH), full, atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) <= 32))
@settings(max_examples=25)
@torch.no_grad()
def test_any_chunks_equal_the_full_forward_pass(sizes: list[int]) -> None:
    block, codebook = block_and_codebook()
    tokens = some_tokens(1, sum(sizes))
    full = block(tokens, codebook).logits_BTV
    torch.testing.assert_close(in_pieces(block, codebook, tokens, sizes), full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kept", [0, 1, 5, 12, 20])
@pytest.mark.parametrize("shape", [*SHAPES, "model.mixer=none"])
@torch.no_grad()
def test_a_truncated_cache_has_forgotten_the_rest(shape: str, kept: int) -> None:
    block, codebook = block_and_codebook(shape)
    tokens = some_tokens(1, LENGTH)
    cache = block.new_cache()
    rejected = torch.cat([tokens[:, :kept], (tokens[:, kept:20] + 1) % VOCABULARY], dim=1)
    block(rejected, codebook, cache=cache)
    cache.truncate(kept)
    again = block(tokens[:, kept:], codebook, cache=cache).logits_BTV
    torch.testing.assert_close(again, block(tokens, codebook).logits_BTV[:, kept:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_truncating_beyond_the_end_changes_nothing() -> None:
    block, codebook = block_and_codebook()
    tokens = some_tokens(1, LENGTH)
    cache = block.new_cache()
    block(tokens[:, :10], codebook, cache=cache)
    cache.truncate(30)
    assert cache.length == 10
    again = block(tokens[:, 10:], codebook, cache=cache).logits_BTV
    torch.testing.assert_close(again, block(tokens, codebook).logits_BTV[:, 10:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_block_downstream_takes_upstream_features() -> None:
    objective = tiny_objective("objective.kind=chain", "objective.hint_probability=0")
    block, codebook = shaken(objective.build(1, seed=0)), tiny_codebook(objective)
    tokens, features = some_tokens(1, LENGTH), some_noise(1, LENGTH, 32)
    alone = block(tokens, codebook).logits_BTV
    fed = block(tokens, codebook, upstream_BTD=features).logits_BTV
    assert changed_positions(alone, fed) == list(range(LENGTH))


@pytest.mark.parametrize("overrides", [("model.width=2", "model.heads=1"), ("model.condition_width=3",)])
def test_the_smallest_shapes_train(overrides: tuple[str, ...]) -> None:
    objective = tiny_objective(*overrides)
    block, codebook = adaptive(objective.build(0, seed=0)), tiny_codebook(objective)
    tokens = some_tokens(2, 8)
    objective.loss(block, tokens, tokens, codebook).total.backward()  # type: ignore[no-untyped-call]
    assert block.out.weight.grad is not None
    assert bool(block.out.weight.grad.abs().sum() > 0)


def test_objective_and_model_configs_describe_a_block_completely() -> None:
    objective = tiny_objective()
    rebuilt = Objective(
        dataclasses.replace(objective.model), dataclasses.replace(objective.config), vocabulary=VOCABULARY
    )
    expected, found = objective.build(1, seed=9).state_dict(), rebuilt.build(1, seed=9).state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("family", ["blocktrain", "llama"])
def test_a_block_without_values_has_the_shapes_of_one_and_draws_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (
        ()
        if family == "blocktrain"
        else ("model.family=llama", "model.kv_heads=1", "model.condition_width=64")
    )
    objective = tiny_objective(*other, "objective.hint_probability=0")
    real = objective.build(0, seed=0)

    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("torch would load its compiler for this")

    monkeypatch.setattr(torch.nn.init, "normal_", drawn)
    monkeypatch.setattr(torch, "arange", drawn)
    with torch.device("meta"):
        shapes = objective.build(0, seed=0)
    for part in (Block.state_dict, lambda block: dict(block.named_buffers())):
        kinds = [{name: (t.shape, t.dtype) for name, t in part(one).items()} for one in (real, shapes)]
        assert kinds[0] == kinds[1]
        assert all(tensor.is_meta for tensor in part(shapes).values())
