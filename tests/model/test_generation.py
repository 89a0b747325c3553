"""Sampling: the same seed gives the same text however it is produced."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.model.composition import block_log_probs
from blocktrain.model.generation import LocalModel, generate, visible_context
from blocktrain.model.pooling import Pooling, pool
from blocktrain.model.sampling import EXACT_TOLERANCE, Sampler, choose, gumbel_noise
from tests.tiny import VOCABULARY, shaken_blocks, some_noise, some_tokens, tiny_codebook, tiny_objective

CONTEXT = 32


def choose_token(
    log_probs: torch.Tensor, *, seed: int, position: int, temperature: float = 1.0, top_p: float = 1.0
) -> int:
    row = log_probs.double().numpy()
    return choose(
        row, Sampler(seed=seed, temperature=temperature, top_p=top_p), position, EXACT_TOLERANCE
    ).token


def local_model(*overrides: str) -> LocalModel:
    objective = tiny_objective(*overrides)
    blocks = shaken_blocks(objective)
    return LocalModel(objective, blocks, tiny_codebook(objective), Pooling((1 / len(blocks),) * len(blocks)))


def without_cache(model: LocalModel, tokens: list[int], *, seed: int, temperature: float) -> int:
    """The next token from a full forward pass over the visible text."""
    visible = torch.tensor([list(visible_context(tokens, model.context))])
    with torch.no_grad():
        log_probs = block_log_probs(model.objective, model.blocks, model.codebook, visible)
    pooled = pool(log_probs, model.pooling.over(visible, log_probs))[0, -1]
    return choose_token(pooled, seed=seed, position=len(tokens), temperature=temperature)


@pytest.mark.parametrize(
    "shape",
    [
        "model.convolution=0",
        "model.convolution=4",
        "model.mixer=none",
        "objective.kind=chain",
        "model.blocks=1",
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_same_with_and_without_caches(shape: str, temperature: float) -> None:
    """Over twice the context, so that the window slides."""
    model = local_model(shape)
    prompt = some_tokens(1, 5)[0].tolist()
    cached = list(generate(model, prompt, max_tokens=70, seed=3, temperature=temperature))
    tokens = list(prompt)
    for _ in range(70):
        tokens.append(without_cache(model, tokens, seed=3, temperature=temperature))
    assert cached == tokens[5:]


@pytest.mark.parametrize("context", [1, 2, 3])
def test_text_goes_on_beyond_the_smallest_contexts(context: int) -> None:
    model = local_model(f"model.context={context}")
    assert len(list(generate(model, [1], max_tokens=10, seed=0))) == 10


def test_a_prompt_longer_than_the_context_is_continued() -> None:
    model = local_model()
    prompt = some_tokens(1, 3 * CONTEXT)[0].tolist()
    assert len(list(generate(model, prompt, max_tokens=8, seed=0))) == 8


def test_another_text_does_not_hear_the_one_before() -> None:
    used, fresh = local_model(), local_model()
    list(generate(used, [1, 2, 3, 4, 5, 6], max_tokens=10, seed=0))
    first, second = (list(generate(model, [1, 2, 9], max_tokens=10, seed=0)) for model in (used, fresh))
    assert first == second


def test_another_seed_gives_another_text() -> None:
    first, again, other = (list(generate(local_model(), [1], max_tokens=20, seed=s)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_temperature_zero_chooses_the_most_likely_token() -> None:
    log_probs = torch.log_softmax(some_noise(VOCABULARY), dim=-1)
    for seed in range(20):
        assert choose_token(log_probs, seed=seed, position=0, temperature=0) == int(log_probs.argmax())


def test_of_equally_likely_tokens_temperature_zero_takes_the_lowest() -> None:
    assert choose_token(torch.zeros(VOCABULARY), seed=0, position=0, temperature=0) == 0


def draws(
    probabilities: list[float], count: int, *, temperature: float = 1.0, top_p: float = 1.0
) -> Counter[int]:
    log_probs = torch.tensor(probabilities).log()
    return Counter(
        choose_token(log_probs, seed=1, position=position, temperature=temperature, top_p=top_p)
        for position in range(count)
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    found = draws(probabilities, 3000, temperature=temperature)
    tempered = [p ** (1 / temperature) for p in probabilities]
    for token, p in enumerate(q / sum(tempered) for q in tempered):
        assert found[token] / 3000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 3000))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(draws([0.5, 0.3, 0.15, 0.05], 400, top_p=top_p)) == kept


def test_the_nucleus_is_drawn_from_in_its_own_proportions() -> None:
    found = draws([0.4, 0.2, 0.2, 0.2], 2000, top_p=0.6)
    assert found[0] / 2000 == pytest.approx(2 / 3, abs=0.05)


def test_keyed_noise_is_the_same_for_ever() -> None:
    assert gumbel_noise(0, 0, 3).tolist() == pytest.approx(
        [-0.1901881177476601, 0.9265339488454387, 2.491536278879587], abs=1e-12
    )
    assert gumbel_noise(7, 41, 3).tolist() == pytest.approx(
        [0.21513884929856075, 1.6727257651945042, 0.030332235506466874], abs=1e-12
    )


def test_keyed_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(0, position, 256) for position in range(100)])
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.05)


texts = st.lists(st.integers(0, 255), min_size=1, max_size=300)


@given(texts, st.integers(1, 70))
def test_the_visible_text_is_a_full_enough_tail(tokens: list[int], context: int) -> None:
    visible = list(visible_context(tokens, context))
    assert visible == tokens[len(tokens) - len(visible) :]
    assert 1 <= len(visible) <= context
    assert len(visible) == len(tokens) or len(visible) > context - max(1, context // 2)


@given(st.integers(2, 200), st.integers(4, 70))
def test_the_window_slides_seldom_and_by_the_length_alone(length: int, context: int) -> None:
    starts = [n - len(visible_context(range(n), context)) for n in range(1, length)]
    moves = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    assert set(moves) <= {0, context // 2}
    assert starts == [n - len(visible_context([7] * n, context)) for n in range(1, length)]
