"""Held-out cross entropy against loops one can read, and proof that no target is seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from blocktrain.data.tokenizer import Tokens
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.composition import euler_log_probs
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling
from blocktrain.training.evaluation import Evaluator, Score, bigram_cross_entropy, mean_score
from tests.tiny import (
    VOCABULARY,
    shaken,
    shaken_blocks,
    some_tokens,
    tiny_codebook,
    tiny_objective,
    tiny_recipe,
)

CONTEXT = 32


def parts(*overrides: str) -> tuple[Objective, list[Block], Evaluator]:
    objective = tiny_objective(*overrides)
    config = tiny_recipe(*overrides).evaluation
    return objective, shaken_blocks(objective), Evaluator(objective, tiny_codebook(objective), config, seed=3)


def a_text(length: int) -> Tokens:
    found: Tokens = some_tokens(1, length, seed=8)[0].numpy()
    return found


@torch.no_grad()
def naive_cross_entropy(block: Block, objective: Objective, tokens: Tokens) -> float:
    """One forward pass per scored token, over what its window has shown so far."""
    total = 0.0
    for t in range(1, len(tokens)):
        start = (t - 1) // CONTEXT * CONTEXT
        seen = torch.from_numpy(tokens[start:t])[None]
        logits = block(seen, tiny_codebook(objective)).logits_BTV[0, -1]
        total -= float(F.log_softmax(logits, dim=-1)[tokens[t]])
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("length", [2, CONTEXT, CONTEXT + 1, CONTEXT + 2, 100])
def test_a_blocks_score_is_the_naive_loop(length: int) -> None:
    objective, blocks, evaluator = parts()
    tokens = a_text(length)
    scores = evaluator.score(blocks, Pooling((0.5, 0.5)), tokens, euler=False)
    for block, score in zip(blocks, scores.blocks, strict=True):
        assert score.ce == pytest.approx(naive_cross_entropy(block, objective, tokens), rel=1e-4)
    reference = shaken(objective.build_reference(seed=4))
    expected = naive_cross_entropy(reference, objective, tokens)
    assert evaluator.score_one(reference, tokens).ce == pytest.approx(expected, rel=1e-4)


def test_the_batch_size_of_evaluation_changes_no_score() -> None:
    tokens = a_text(300)
    found = []
    for batch in (1, 3, 64):
        _, blocks, evaluator = parts(f"evaluation.batch={batch}")
        found.append(evaluator.score(blocks, Pooling((0.6, 0.4)), tokens, euler=False))
    for other in found[1:]:
        assert other.consensus.ce == pytest.approx(found[0].consensus.ce, rel=1e-5)
        assert [s.ce for s in other.blocks] == pytest.approx([s.ce for s in found[0].blocks], rel=1e-5)


def test_consensus_of_one_block_scores_as_that_block() -> None:
    _, blocks, evaluator = parts("model.blocks=1")
    tokens = a_text(100)
    pooling = evaluator.fit_pooling(blocks, a_text(60))
    scores = evaluator.score(blocks, pooling, tokens)
    assert pooling == Pooling((1.0,))
    assert scores.consensus.ce == pytest.approx(scores.blocks[0].ce, rel=1e-6)


@torch.no_grad()
def test_euler_is_the_mean_over_independent_noise_draws() -> None:
    objective, blocks, evaluator = parts("evaluation.noise_draws=4")
    tokens = a_text(CONTEXT + 1)
    draws = []
    for draw in range(4):
        generator = torch.Generator().manual_seed(derive_seed("euler", 3, draw, 0))
        x = torch.from_numpy(tokens[:-1])[None]
        log_probs = euler_log_probs(objective, blocks, tiny_codebook(objective), x, generator)[0]
        draws.append(F.nll_loss(log_probs, torch.from_numpy(tokens[1:])).item())
    score = evaluator.score(blocks, Pooling((0.5, 0.5)), tokens).euler
    assert score is not None
    assert score.ce == pytest.approx(np.mean(draws), rel=1e-5)
    assert score.se == pytest.approx(np.std(draws, ddof=1) / 2, rel=1e-3)
    assert len({round(draw, 6) for draw in draws}) == 4


def test_no_evaluation_can_see_the_target() -> None:
    """The probabilities given to every possible last token sum to one. A score that had seen its
    target in any way, noised or not, would give each of them more than its share."""
    _, blocks, evaluator = parts("evaluation.noise_draws=1")
    opening = a_text(CONTEXT)
    sums = dict.fromkeys(["euler", "consensus", "block 0", "block 1"], 0.0)

    def nats(last: int | None) -> dict[str, float]:
        tokens = opening if last is None else np.append(opening, last)
        scores = evaluator.score(blocks, Pooling((0.7, 0.2)), tokens)
        assert scores.euler is not None
        each = {"euler": scores.euler, "consensus": scores.consensus}
        each |= {f"block {i}": score for i, score in enumerate(scores.blocks)}
        return {name: score.ce * (len(tokens) - 1) for name, score in each.items()}

    before = nats(None)
    for last in range(VOCABULARY):
        for name, total in nats(last).items():
            sums[name] += math.exp(before[name] - total)
    assert sums == pytest.approx(dict.fromkeys(sums, 1.0), abs=1e-3)


def test_scoring_twice_gives_the_same_numbers() -> None:
    _, blocks, evaluator = parts()
    first, second = (evaluator.score(blocks, Pooling((0.5, 0.5)), a_text(120)) for _ in range(2))
    assert first == second


def test_pooling_weights_are_fitted_on_the_text_given_for_it() -> None:
    """A block that knows the pool text gets the weight."""
    objective, blocks, evaluator = parts()
    pooling = evaluator.fit_pooling(blocks, a_text(200))
    tuned = evaluator.score(blocks, pooling, a_text(200), euler=False).consensus.ce
    equal = evaluator.score(blocks, Pooling((0.5, 0.5)), a_text(200), euler=False).consensus.ce
    assert tuned <= equal + 1e-6


def test_a_score_is_told_per_token_and_per_byte() -> None:
    told = Score(2 * math.log(2), 0.1).to_dict(bytes_per_token=2.0)
    assert told == {
        "ce": 2 * math.log(2),
        "se": 0.1,
        "ppl": pytest.approx(4.0),
        "bits_per_byte": pytest.approx(1.0),
    }


def test_the_standard_error_is_that_of_the_mean() -> None:
    score = mean_score([1.0, 2.0, 3.0, 4.0])
    assert score.ce == 2.5
    assert score.se == pytest.approx(math.sqrt(5 / 3 / 4))
    assert mean_score([1.5]) == Score(1.5, None)


def test_bigram_cross_entropy_is_the_count_by_hand() -> None:
    """Training text 0 1 0 1 2 over three symbols: after 0 comes 1 twice, after 1 comes 0 and 2 once.
    With one added to every count, P(1|0) = 3/5, P(2|1) = 2/5, P(0|2) = 1/3."""
    train, valid = np.array([0, 1, 0, 1, 2]), np.array([0, 1, 2, 0])
    by_hand = -(math.log(3 / 5) + math.log(2 / 5) + math.log(1 / 3)) / 3
    assert bigram_cross_entropy(train, valid, 3) == pytest.approx(by_hand)


def test_bigrams_never_seen_still_have_a_finite_score() -> None:
    assert bigram_cross_entropy(np.array([0, 0]), np.array([5, 9, 5]), 16) == pytest.approx(math.log(16))
