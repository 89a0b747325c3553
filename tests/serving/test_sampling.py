"""A settled choice is the same for every row within the tolerance; the rest is choose_token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.model.generation import choose_token
from blocktrain.serving.engine.sampling import Sampler, choose, normalised

samplers = st.builds(
    Sampler,
    seed=st.integers(0, 2**62),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)


def random_row(seed: int, flatness: float = 2.0) -> np.ndarray:
    return normalised(np.random.default_rng(seed).normal(0, flatness, 64))


@given(samplers, st.integers(0, 1000), st.integers(0, 500))
def test_choice_is_that_of_choose_token(sampler: Sampler, seed: int, position: int) -> None:
    row = random_row(seed)
    expected = choose_token(
        torch.from_numpy(row.copy()),
        seed=sampler.seed,
        position=position,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
    )
    assert choose(row, sampler, position, 1e-12).token == expected


@settings(max_examples=300)
@given(samplers, st.integers(0, 10_000), st.sampled_from([1e-4, 1e-2, 0.1]))
def test_a_settled_choice_survives_any_change_within_the_tolerance(
    sampler: Sampler, seed: int, tolerance: float
) -> None:
    random = np.random.default_rng(seed)
    row = random_row(seed)
    choice = choose(row, sampler, 7, tolerance)
    if not choice.settled:
        return
    for _ in range(10):
        signs = random.choice([-1.0, 1.0], len(row)) if seed % 2 else random.uniform(-1, 1, len(row))
        changed = row + tolerance * signs
        assert choose(changed, sampler, 7, 1e-12).token == choice.token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_near_tie_is_not_settled(temperature: float) -> None:
    row = normalised(np.array([1.0, 1.0 + 1e-6, -30.0]))
    sampler = Sampler(seed=0, temperature=temperature, top_p=1.0)
    if temperature == 0:
        assert not choose(row, sampler, 0, 1e-4).settled
    assert choose(normalised(np.array([9.0, 0.0, 0.0])), Sampler(0, 0.0), 0, 1e-4).settled


def test_most_choices_are_settled_at_the_tolerance_of_fp32() -> None:
    rows = [random_row(i) for i in range(2000)]
    unsettled = sum(not choose(row, Sampler(1), i, 1e-4).settled for i, row in enumerate(rows))
    assert unsettled <= 4
