"""Writing many tokens at once: training without context, and the chain of blocks that refines them."""

from __future__ import annotations

import pytest
import torch

from blocktrain.errors import RecipeError
from blocktrain.model.adaptive import expected_target
from blocktrain.model.block import Hint
from blocktrain.model.composition import euler_log_probs
from blocktrain.model.noise import levels, noise_share, owner
from blocktrain.model.objective import Objective
from blocktrain.model.sweep import begin_sweep, refine, sweep_noise
from tests.tiny import (
    VOCABULARY,
    adaptive,
    shaken_blocks,
    some_noise,
    some_tokens,
    tiny_codebook,
    tiny_objective,
)

SWEEP = ("objective.hint_probability=0.5", "objective.sweep_probability=0.25", "objective.sigma_min=0.15")


def known_and_noise(objective: Objective, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    known = some_tokens(1, 6)
    z0 = sweep_noise(1, 6, 6 + num_new - 1, objective.model.width)[None]
    return known, z0


def test_only_the_swept_sequences_lose_their_context_beyond_a_prefix() -> None:
    objective = tiny_objective(*SWEEP)
    tokens = some_tokens(8, 24)
    hidden = objective.hide_context(tokens, torch.Generator().manual_seed(0))
    assert torch.equal(hidden[2:], tokens[2:])
    for before, after in zip(tokens[:2], hidden[:2], strict=True):
        known = int((after != objective.unknown_token).sum())
        assert 1 <= known < 24
        assert torch.equal(after[:known], before[:known])
        assert bool((after[known:] == objective.unknown_token).all())


def test_without_the_option_nothing_is_hidden_and_nothing_random_is_drawn() -> None:
    objective, generator = tiny_objective(), torch.Generator().manual_seed(0)
    before, tokens = generator.get_state(), some_tokens(8, 24)
    assert objective.hide_context(tokens, generator) is tokens
    assert torch.equal(generator.get_state(), before)
    assert adaptive(objective.build(0, seed=0)).embedding.num_embeddings == VOCABULARY


@pytest.mark.parametrize(
    "overrides",
    [
        ("objective.sweep_probability=0.3", "objective.hint_probability=0.2"),
        ("objective.sweep_probability=0.1", "objective.kind=chain"),
        ("objective.sweep_probability=-0.1",),
    ],
)
def test_a_sweep_share_that_makes_no_sense_is_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError, match="sweep_probability"):
        tiny_objective(*overrides)


def test_the_mixture_carried_between_blocks_is_the_state_of_the_euler_chain() -> None:
    """z = a z0 + p_bar E gives what the published step z += (s' - s) (z - D) / s gives."""
    objective = tiny_objective(*SWEEP)
    blocks, codebook = shaken_blocks(objective), tiny_codebook(objective)
    known, z0 = known_and_noise(objective, 5)
    sweep = begin_sweep(objective, known, 5, z0)
    sigmas = levels(objective.config, 4)
    z = noise_share(sigmas[0], sigmas[0]) * z0 + sweep.p_bar_BTV @ codebook
    for i, sigma in enumerate(sigmas[:-1]):
        index = owner(objective.config, 2, sigma)
        sigma_B = torch.tensor([sigma])
        p = blocks[index](sweep.tokens_BT, codebook, Hint(z, sigma_B), both_ways=1).logits_BTV.softmax(dim=-1)
        # Known rows stay certain: their denoised target is the token itself.
        denoised = torch.cat([sweep.p_bar_BTV[:, :5], p[:, 5:]], dim=1) @ codebook
        z = z + (sigmas[i + 1] - sigma) * (z - denoised) / sigma
    found = begin_sweep(objective, known, 5, z0)
    for index, block in enumerate(blocks):
        found, _ = refine(objective, {index: block}, codebook, found, passes=2)
    state = noise_share(sigmas[0], sigmas[-1]) * z0 + found.p_bar_BTV @ codebook
    assert torch.allclose(state[:, 5:], z[:, 5:], atol=1e-5)


def test_one_new_token_without_known_hints_is_the_published_composition() -> None:
    """A single known token and one new one: no context is hidden, so `sweep` is `euler`."""
    objective = tiny_objective(*SWEEP)
    blocks, codebook = shaken_blocks(objective), tiny_codebook(objective)
    generator = torch.Generator().manual_seed(3)
    known = some_tokens(1, 1)
    z0 = torch.randn((1, 1, objective.model.width), generator=torch.Generator().manual_seed(3))
    expected = euler_log_probs(objective, blocks, codebook, known, generator)
    _, found = refine(objective, dict(enumerate(blocks)), codebook, begin_sweep(objective, known, 1, z0), 1)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("passes", [1, 2, 8])
def test_every_block_makes_its_passes_and_no_other(passes: int) -> None:
    objective = tiny_objective(*SWEEP, "model.blocks=4")
    sigmas = levels(objective.config, 4 * passes)
    owners = [owner(objective.config, 4, sigma) for sigma in sigmas]
    assert owners == [block for block in range(4) for _ in range(passes)]


def test_new_tokens_are_refined_in_the_light_of_later_ones() -> None:
    objective = tiny_objective(*SWEEP)
    blocks, codebook = shaken_blocks(objective), tiny_codebook(objective)
    known, z0 = known_and_noise(objective, 8)
    changed = z0.clone()
    changed[:, -1] += 1.0
    before, after = (
        refine(objective, dict(enumerate(blocks)), codebook, begin_sweep(objective, known, 8, noise), 2)[1]
        for noise in (z0, changed)
    )
    assert not torch.allclose(before[:, 0], after[:, 0], atol=1e-4)


def test_only_the_swept_sequences_of_a_batch_see_what_comes_later() -> None:
    objective = tiny_objective(*SWEEP)
    block, codebook = shaken_blocks(objective)[0], tiny_codebook(objective)
    tokens = some_tokens(3, 12)
    altered = tokens.clone()
    altered[:, -1] = (altered[:, -1] + 1) % VOCABULARY
    before = block(tokens, codebook, both_ways=1).logits_BTV
    after = block(altered, codebook, both_ways=1).logits_BTV
    assert not torch.allclose(before[0, 0], after[0, 0], atol=1e-4)
    assert torch.allclose(before[1:, :-1], after[1:, :-1], atol=1e-6)
    assert torch.allclose(before[1:], block(tokens, codebook).logits_BTV[1:], atol=1e-5)


def test_targets_that_stand_in_the_known_context_do_not_count() -> None:
    objective = tiny_objective(*SWEEP, "objective.hint_probability=1")
    block, codebook = shaken_blocks(objective)[0], tiny_codebook(objective)
    tokens, targets = some_tokens(1, 12), some_tokens(1, 12, seed=1)
    tokens[:, 5:] = objective.unknown_token
    z, sigma = some_noise(1, 12, objective.model.width), torch.tensor([2.0])
    found = objective.loss(block, tokens, targets, codebook, Hint(z, sigma)).total
    changed = targets.clone()
    changed[:, :4] = (changed[:, :4] + 1) % VOCABULARY
    assert torch.equal(found, objective.loss(block, tokens, changed, codebook, Hint(z, sigma)).total)
    changed[:, 4] = (changed[:, 4] + 1) % VOCABULARY
    assert not torch.equal(found, objective.loss(block, tokens, changed, codebook, Hint(z, sigma)).total)


def test_sweep_noise_is_fixed_for_ever_and_differs_by_seed_and_position() -> None:
    noise = sweep_noise(1, 6, 4, 8)
    assert torch.equal(noise, sweep_noise(1, 6, 4, 8))
    assert torch.equal(noise, sweep_noise(1, 6, 9, 8)[:4])
    assert not torch.equal(noise, sweep_noise(2, 6, 4, 8))
    assert not torch.equal(noise, sweep_noise(1, 7, 4, 8))
    assert noise[0, :3].tolist() == pytest.approx([-0.107323, 0.387113, -0.185734], abs=1e-6)


def test_a_fresh_block_that_reads_hints_by_bayes_gives_the_likelihood_of_the_noised_target() -> None:
    """Nothing learned, every token as likely as another: p(y | z) is softmax(z E / sigma^2)."""
    objective = tiny_objective(*SWEEP, "objective.hint=bayes")
    block, codebook = objective.build(0, seed=0), tiny_codebook(objective)
    tokens = some_tokens(2, 12)
    z, sigma = some_noise(2, 12, objective.model.width), torch.tensor([0.3, 2.0])
    with torch.no_grad():
        found = block(tokens, codebook, Hint(z, sigma)).logits_BTV
    expected = z @ codebook.T / sigma.square()[:, None, None]
    assert torch.allclose(found.log_softmax(dim=-1), expected.log_softmax(dim=-1), atol=1e-4)


def test_the_expected_target_is_the_target_where_there_is_no_noise() -> None:
    objective = tiny_objective(*SWEEP)
    codebook, targets = tiny_codebook(objective), some_tokens(1, 12)
    near = expected_target(Hint(codebook[targets], torch.tensor([0.05])), codebook)
    assert torch.allclose(near, objective.model.width**0.5 * codebook[targets], atol=1e-4)
    far = expected_target(Hint(codebook[targets], torch.tensor([1e4])), codebook)
    assert torch.allclose(far, objective.model.width**0.5 * codebook.mean(dim=0).expand_as(far), atol=1e-3)
