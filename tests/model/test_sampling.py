"""A settled choice is the same for every row within the tolerance; the rest is plain Gumbel-max sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.model.sampling import Sampler, choose, gumbel_noise, normalised

samplers = st.builds(
    Sampler,
    seed=st.integers(0, 2**62),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 5, 200]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (9, -100.0))]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.8]),
    prompt_tokens=st.just(3),
    end=st.sampled_from([None, 5]),
    min_tokens=st.sampled_from([0, 100]),
)
TEXT = [1, 2, 3, 8, 8, 40, 3]


def random_row(seed: int) -> np.ndarray:
    return normalised(np.random.default_rng(seed).normal(0, 2.0, 64))


def plainly_sampled(row: np.ndarray, sampler: Sampler, position: int) -> int:
    """The textbook sampler, in torch: it knows nothing of tolerances."""
    scores = torch.from_numpy(row.copy())
    for token in set(TEXT):
        scores[token] *= sampler.repetition_penalty
    written = TEXT[sampler.prompt_tokens :]
    for token in set(written):
        scores[token] -= sampler.presence_penalty + sampler.frequency_penalty * written.count(token)
    for token, nats in sampler.logit_bias:
        scores[token] += nats
    if sampler.end is not None and position < sampler.prompt_tokens + sampler.min_tokens:
        scores[sampler.end] = -math.inf
    if sampler.temperature == 0:
        return int(scores.argmax())
    scores = F.log_softmax(scores / sampler.temperature, dim=-1)
    ordered, order = scores.sort(descending=True, stable=True)
    beyond = ordered.exp().cumsum(-1) - ordered.exp() >= sampler.top_p
    beyond[sampler.top_k :] |= sampler.top_k is not None
    beyond |= ordered.exp() < sampler.min_p * ordered[0].exp()
    scores[order[beyond]] = -math.inf
    return int((scores + torch.from_numpy(gumbel_noise(sampler.seed, position, len(row)))).argmax())


@given(samplers, st.integers(0, 1000), st.integers(0, 500))
def test_the_choice_is_that_of_the_textbook_sampler(sampler: Sampler, seed: int, position: int) -> None:
    row = random_row(seed)
    assert choose(row, sampler, position, 1e-12, TEXT).token == plainly_sampled(row, sampler, position)


@settings(max_examples=300)
@given(samplers, st.integers(0, 10_000), st.sampled_from([1e-4, 1e-2, 0.1]))
def test_a_settled_choice_survives_any_change_within_the_tolerance(
    sampler: Sampler, seed: int, tolerance: float
) -> None:
    random = np.random.default_rng(seed)
    row = random_row(seed)
    choice = choose(row, sampler, 7, tolerance, TEXT)
    if not choice.settled:
        return
    for _ in range(10):
        signs = random.choice([-1.0, 1.0], len(row)) if seed % 2 else random.uniform(-1, 1, len(row))
        changed = row + tolerance * signs
        assert choose(changed, sampler, 7, 1e-12, TEXT).token == choice.token


def test_a_temperature_too_small_to_divide_by_takes_the_most_likely_token() -> None:
    row = random_row(0)
    for temperature in (5e-324, 2e-309, 1e-7):
        chosen = choose(row, Sampler(temperature=temperature), 0, 0.0)
        assert (chosen.token, chosen.settled) == (int(row.argmax()), True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_near_tie_is_not_settled(temperature: float) -> None:
    row = normalised(np.array([1.0, 1.0 + 1e-6, -30.0]))
    sampler = Sampler(seed=0, temperature=temperature, top_p=1.0)
    if temperature == 0:
        assert not choose(row, sampler, 0, 1e-4).settled
    assert choose(normalised(np.array([9.0, 0.0, 0.0])), Sampler(temperature=0.0), 0, 1e-4).settled


def test_most_choices_are_settled_at_the_tolerance_of_fp32() -> None:
    rows = [random_row(i) for i in range(2000)]
    unsettled = sum(not choose(row, Sampler(seed=1), i, 1e-4).settled for i, row in enumerate(rows))
    assert unsettled <= 4
