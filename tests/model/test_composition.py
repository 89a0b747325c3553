"""Blocks composed into one model: the published chain from noise, and parallel consensus."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.model.block import Block, Hint
from blocktrain.model.composition import block_log_probs, euler_log_probs
from blocktrain.model.noise import levels
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import fit_pooling, pool
from tests.tiny import VOCABULARY, shaken_blocks, some_noise, some_tokens, tiny_codebook, tiny_objective

LENGTH = 24


def parts(*overrides: str) -> tuple[Objective, list[Block], Tensor]:
    objective = tiny_objective(*overrides)
    return objective, shaken_blocks(objective), tiny_codebook(objective)


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_normalised(log_probs: Tensor) -> None:
    torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones(log_probs.shape[:-1]))


@torch.no_grad()
def test_euler_with_one_step_is_one_denoising_at_the_highest_noise() -> None:
    objective, blocks, codebook = parts("model.blocks=3")
    tokens = some_tokens(2, LENGTH)
    found = euler_log_probs(objective, blocks, codebook, tokens, generator(), num_steps=1)
    z = torch.randn((2, LENGTH, 32), generator=generator()) * (1 + 10.0**2) ** 0.5
    output = blocks[0](tokens, codebook, Hint(z, torch.full((2,), 10.0)))
    torch.testing.assert_close(found, F.log_softmax(output.logits_BTV, dim=-1))


@torch.no_grad()
def test_euler_takes_the_published_steps_through_every_block() -> None:
    """The chain of objective.md written out: D = p E, z += (s' - s) (z - D) / s."""
    objective, blocks, codebook = parts("model.blocks=3")
    tokens = some_tokens(2, LENGTH)
    z = torch.randn((2, LENGTH, 32), generator=generator()) * (1 + 10.0**2) ** 0.5
    sigmas = levels(objective.config, 3)
    for i, sigma in enumerate(sigmas):
        p = blocks[i](tokens, codebook, Hint(z, torch.full((2,), sigma))).logits_BTV.softmax(dim=-1)
        if i < 2:
            z = z + (sigmas[i + 1] - sigma) * (z - p @ codebook) / sigma
    found = euler_log_probs(objective, blocks, codebook, tokens, generator())
    torch.testing.assert_close(found.exp(), p, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@torch.no_grad()
def test_euler_gives_a_distribution_at_every_position(num_steps: int) -> None:
    objective, blocks, codebook = parts("model.blocks=3")
    assert_normalised(
        euler_log_probs(objective, blocks, codebook, some_tokens(2, LENGTH), generator(), num_steps)
    )


@torch.no_grad()
def test_euler_depends_on_its_noise_and_on_nothing_else_random() -> None:
    objective, blocks, codebook = parts()
    tokens = some_tokens(2, LENGTH)
    first, again, other = (
        euler_log_probs(objective, blocks, codebook, tokens, generator(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_compositions_are_never_given_a_target() -> None:
    for composition in (euler_log_probs, block_log_probs, pool):
        names = inspect.signature(composition).parameters
        assert not [name for name in names if name.startswith(("target", "y", "label"))]


@torch.no_grad()
def test_from_noise_no_position_sees_a_later_token() -> None:
    """Position t predicts token t + 1, so a change there, its own target, must not reach it."""
    objective, blocks, codebook = parts("model.blocks=3")
    tokens = some_tokens(2, LENGTH)
    before = euler_log_probs(objective, blocks, codebook, tokens, generator())
    for t in (1, 10, LENGTH - 1):
        altered = tokens.clone()
        altered[:, t] = (altered[:, t] + 1) % VOCABULARY
        after = euler_log_probs(objective, blocks, codebook, altered, generator())
        torch.testing.assert_close(before[:, :t], after[:, :t], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(before[:, t], after[:, t], atol=1e-4)


@torch.no_grad()
def test_consensus_of_one_block_is_that_block() -> None:
    objective, blocks, codebook = parts("model.blocks=1")
    tokens = some_tokens(2, LENGTH)
    log_probs = block_log_probs(objective, blocks, codebook, tokens)
    alone = F.log_softmax(blocks[0](tokens, codebook).logits_BTV, dim=-1)
    weights = fit_pooling([log_probs[0].flatten(0, 1)], some_tokens(1, 2 * LENGTH)[0]).weights
    assert weights == (1.0,)
    torch.testing.assert_close(pool(log_probs, weights), alone)


@torch.no_grad()
def test_consensus_blocks_need_nothing_from_one_another() -> None:
    objective, blocks, codebook = parts("model.blocks=3")
    tokens = some_tokens(2, LENGTH)
    together = block_log_probs(objective, blocks, codebook, tokens)
    for block, log_prob in zip(blocks, together, strict=True):
        assert torch.equal(block_log_probs(objective, [block], codebook, tokens)[0], log_prob)


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=4))
def test_a_pool_is_a_distribution_whatever_its_weights(weights: list[float]) -> None:
    log_probs = [F.log_softmax(some_noise(3, VOCABULARY, seed=i), dim=-1) for i in range(len(weights))]
    assert_normalised(pool(log_probs, weights))


def test_a_pool_is_the_weighted_product_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.1, 0.8, 0.1])
    product = p**0.7 * q**0.4
    torch.testing.assert_close(pool([p.log(), q.log()], [0.7, 0.4]).exp(), product / product.sum())


def test_fitted_weights_beat_equal_ones_on_the_text_they_were_fitted_on() -> None:
    targets = some_tokens(1, 2000)[0]
    sharp = F.log_softmax(2.0 * F.one_hot(targets, VOCABULARY) + some_noise(2000, VOCABULARY, seed=1), dim=-1)
    noise = F.log_softmax(some_noise(2000, VOCABULARY, seed=2), dim=-1)
    weights = fit_pooling([sharp, noise], targets).weights
    assert weights[0] > 5 * abs(weights[1])
    fitted = F.nll_loss(pool([sharp, noise], weights), targets)
    assert fitted < F.nll_loss(pool([sharp, noise], [0.5, 0.5]), targets)
    assert fitted <= F.nll_loss(sharp, targets)


def test_fitting_finds_the_weights_the_text_was_drawn_with() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (F.log_softmax(some_noise(20_000, VOCABULARY, seed=i), dim=-1) for i in (1, 2))
    truth = pool([first, second], [0.7, 0.3])
    targets = torch.multinomial(truth.exp(), 1, generator=generator)[:, 0]
    assert fit_pooling([first, second], targets).weights == pytest.approx([0.7, 0.3], abs=0.05)


def test_fitted_weights_are_shares_of_one() -> None:
    log_probs = [F.log_softmax(some_noise(500, VOCABULARY, seed=i), dim=-1) for i in range(3)]
    weights = fit_pooling(log_probs, some_tokens(1, 500)[0]).weights
    assert sum(weights) == pytest.approx(1.0)
    assert min(weights) >= 0


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_fitting_on_next_to_no_text_gives_usable_weights(rows: int) -> None:
    log_probs = [F.log_softmax(some_noise(rows, VOCABULARY, seed=i), dim=-1) for i in range(3)]
    weights = fit_pooling(log_probs, torch.stack([part.argmax(dim=-1) for part in log_probs])[0]).weights
    assert_normalised(pool(log_probs, weights))


def test_fitting_blocks_that_agree_in_everything_gives_usable_weights() -> None:
    log_probs = F.log_softmax(some_noise(200, VOCABULARY), dim=-1)
    weights = fit_pooling([log_probs] * 3, some_tokens(1, 200)[0]).weights
    assert_normalised(pool([log_probs] * 3, weights))


@torch.no_grad()
def test_chained_blocks_take_the_features_of_the_one_before() -> None:
    objective, blocks, codebook = parts("objective.kind=chain")
    tokens = some_tokens(2, LENGTH)
    features = blocks[0](tokens, codebook).features_BTD
    expected = blocks[1](tokens, codebook, upstream_BTD=features).logits_BTV
    found = block_log_probs(objective, blocks, codebook, tokens)[1]
    torch.testing.assert_close(found, F.log_softmax(expected, dim=-1))


def test_chained_blocks_have_no_euler_chain() -> None:
    objective, blocks, codebook = parts("objective.kind=chain")
    with pytest.raises(AssertionError, match="no Euler chain"):
        euler_log_probs(objective, blocks, codebook, some_tokens(2, LENGTH), generator())
