"""The loss a block is trained on, against computations by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.block import Block, Hint
from blocktrain.model.noise import training_interval
from blocktrain.model.objective import Objective
from tests.tiny import (
    VOCABULARY,
    adaptive,
    shaken,
    shaken_blocks,
    some_noise,
    some_tokens,
    tiny_codebook,
    tiny_objective,
)

LENGTH = 24


def parts(*overrides: str) -> tuple[Objective, Block, Tensor]:
    objective = tiny_objective(*overrides)
    return objective, shaken(objective.build(0, seed=0)), tiny_codebook(objective)


def cross_entropy_by_hand(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    probabilities = logits_TV.double().exp() / logits_TV.double().exp().sum(dim=-1, keepdim=True)
    return -probabilities[torch.arange(len(targets_T)), targets_T].log().mean()


def test_loss_weights_are_per_sequence() -> None:
    """Three sequences at sigma 1, 10 and infinity weigh 5, 4.01 and 4; each is computed on its own."""
    objective, block, codebook = parts()
    tokens, targets = some_tokens(3, LENGTH, seed=1), some_tokens(3, LENGTH, seed=2)
    z, sigma = some_noise(2, LENGTH, 32), torch.tensor([1.0, 10.0])
    found = objective.loss(block, tokens, targets, codebook, Hint(z, sigma))
    entropies = [
        cross_entropy_by_hand(block(tokens[i : i + 1], codebook, hint).logits_BTV[0], targets[i])
        for i, hint in enumerate([Hint(z[:1], sigma[:1]), Hint(z[1:], sigma[1:]), None])
    ]
    by_hand = (5.0 * entropies[0] + 4.01 * entropies[1] + 4.0 * entropies[2]) / 3
    assert found.total.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert found.ce.item() == pytest.approx(entropies[2].item(), rel=1e-5)


def test_the_reported_cross_entropy_is_that_of_all_sequences_where_all_have_hints() -> None:
    objective, block, codebook = parts()
    tokens, targets = some_tokens(2, LENGTH, seed=1), some_tokens(2, LENGTH, seed=2)
    z, sigma = some_noise(2, LENGTH, 32), torch.tensor([1.0, 10.0])
    found = objective.loss(block, tokens, targets, codebook, Hint(z, sigma))
    logits = block(tokens, codebook, Hint(z, sigma)).logits_BTV
    by_hand = cross_entropy_by_hand(logits.flatten(0, 1), targets.flatten())
    assert found.ce.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_the_embedding_regression_loss_is_the_weighted_squared_distance() -> None:
    objective, block, codebook = parts("objective.loss=mse")
    tokens, targets = some_tokens(2, LENGTH, seed=1), some_tokens(2, LENGTH, seed=2)
    z, sigma = some_noise(1, LENGTH, 32), torch.tensor([2.0])
    found = objective.loss(block, tokens, targets, codebook, Hint(z, sigma))
    output = block(tokens, codebook, Hint(z, sigma))
    distance = (output.z_hat_BTD - codebook[targets]).square().sum(dim=-1).mean(dim=1)
    entropy = F.cross_entropy(output.logits_BTV.transpose(1, 2), targets, reduction="none").mean(dim=1)
    by_hand = (torch.tensor([4.25, 4.0]) * (distance + entropy)).mean()
    assert found.total.item() == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_every_weight_of_a_block_gets_a_finite_gradient(loss: str) -> None:
    objective, block, codebook = parts(f"objective.loss={loss}", "model.layers_per_block=2")
    tokens, targets = some_tokens(4, LENGTH, seed=1), some_tokens(4, LENGTH, seed=2)
    hint = objective.draw_hint(0, targets, codebook, torch.Generator().manual_seed(0))
    assert hint is not None
    assert 0 < len(hint.sigma_P) < 4
    result = objective.loss(block, tokens, targets, codebook, hint)
    result.total.backward()  # type: ignore[no-untyped-call]
    assert bool(result.total.isfinite())
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_the_scale_of_the_regression_ablation_learns_without_steering_the_block() -> None:
    objective, built, codebook = parts("objective.loss=mse")
    block = adaptive(built)
    tokens, targets = some_tokens(2, LENGTH, seed=1), some_tokens(2, LENGTH, seed=2)
    before = torch.autograd.grad(objective.loss(block, tokens, targets, codebook).total, block.out.weight)[0]
    with torch.no_grad():
        block.logit_scale.mul_(3)
    after = torch.autograd.grad(objective.loss(block, tokens, targets, codebook).total, block.out.weight)[0]
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize(
    ("probability", "batch", "expected"),
    [(0.15, 64, 10), (0.15, 16, 2), (0.5, 16, 8), (1.0, 16, 16), (0.15, 4, 1), (0.15, 2, 1), (0.9, 4, 3)],
)
def test_the_share_of_hinted_sequences_is_the_recipes(probability: float, batch: int, expected: int) -> None:
    """Rounded, but never to none or all where the recipe asks for some."""
    objective, _, codebook = parts(f"objective.hint_probability={probability}")
    hint = objective.draw_hint(0, some_tokens(batch, LENGTH), codebook, torch.Generator().manual_seed(0))
    assert hint is not None
    assert hint.sigma_P.shape == (expected,)
    assert hint.z_PTD.shape == (expected, LENGTH, 32)


def test_probability_zero_draws_no_hint_and_builds_no_way_in_for_one() -> None:
    objective, block, codebook = parts("objective.hint_probability=0")
    generator = torch.Generator().manual_seed(0)
    assert objective.draw_hint(0, some_tokens(16, LENGTH), codebook, generator) is None
    assert block.hint is None


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_hint_is_the_target_embedding_plus_noise_of_its_level(block: int) -> None:
    objective, _, codebook = parts("objective.hint_probability=1", "model.blocks=3")
    targets = some_tokens(64, LENGTH)
    hint = objective.draw_hint(block, targets, codebook, torch.Generator().manual_seed(0))
    assert hint is not None
    low, high = training_interval(objective.config, 3, block)
    assert bool(((hint.sigma_P >= low - 1e-5) & (hint.sigma_P <= high + 1e-5)).all())
    eps = (hint.z_PTD - codebook[targets]) / hint.sigma_P[:, None, None]
    assert eps.mean().item() == pytest.approx(0, abs=0.02)
    per_sequence = eps.flatten(1).std(dim=1)
    torch.testing.assert_close(per_sequence, torch.ones(64), atol=0.15, rtol=0)


def test_every_sequence_has_a_noise_level_of_its_own() -> None:
    objective, _, codebook = parts("objective.hint_probability=1")
    hint = objective.draw_hint(0, some_tokens(32, LENGTH), codebook, torch.Generator().manual_seed(0))
    assert hint is not None
    assert len(set(hint.sigma_P.tolist())) == 32


def test_the_same_generator_draws_the_same_hint() -> None:
    objective, _, codebook = parts()
    first, second = (
        objective.draw_hint(0, some_tokens(8, LENGTH), codebook, torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert torch.equal(first.z_PTD, second.z_PTD)
    assert torch.equal(first.sigma_P, second.sigma_P)


def test_published_blocks_need_no_other_and_chained_blocks_the_earlier_ones() -> None:
    assert [tiny_objective().upstream(b) for b in range(3)] == [(), (), ()]
    assert [tiny_objective("objective.kind=chain").upstream(b) for b in range(3)] == [(), (0,), (0, 1)]


def test_upstream_features_reach_the_loss_of_a_chained_block() -> None:
    objective = tiny_objective("objective.kind=chain")
    first, second = shaken_blocks(objective)
    tokens, targets, codebook = (
        some_tokens(2, LENGTH),
        some_tokens(2, LENGTH, seed=2),
        tiny_codebook(objective),
    )
    features = first(tokens, codebook).features_BTD.detach()
    found = objective.loss(second, tokens, targets, codebook, upstream_BTD=features)
    logits = second(tokens, codebook, upstream_BTD=features).logits_BTV
    by_hand = cross_entropy_by_hand(logits.flatten(0, 1), targets.flatten())
    assert found.ce.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert found.ce != objective.loss(second, tokens, targets, codebook).ce


def test_the_loss_falls_when_the_target_is_the_models_own_choice() -> None:
    objective, block, codebook = parts()
    tokens = some_tokens(2, LENGTH)
    chosen = block(tokens, codebook).logits_BTV.argmax(dim=-1)
    other = (chosen + 1) % VOCABULARY
    assert (
        objective.loss(block, tokens, chosen, codebook).ce < objective.loss(block, tokens, other, codebook).ce
    )
