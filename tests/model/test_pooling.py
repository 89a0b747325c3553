"""Weights that follow the text: the formula by hand, whole texts, step by step, and fitting it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.generation import LocalModel, generate
from blocktrain.model.pooling import DECAYS, Pooling, TrackRecord, fit_pooling, past_log_likelihood, pool
from tests.tiny import VOCABULARY, shaken_blocks, some_tokens, tiny_codebook, tiny_objective

POOLING = Pooling((0.5, 0.3, 0.2), DECAYS, (0.4, 0.1, 0.02))
LENGTH = 40


def some_rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.log_softmax(2 * torch.randn(*shape, VOCABULARY, generator=generator), dim=-1)


def by_hand(tokens: list[int], rows: list[Tensor], t: int) -> list[float]:
    """Formula (10) of docs/objective.md at position t of one text."""
    logs = []
    for prior, row in zip(POOLING.weights, rows, strict=True):
        log = math.log(prior)
        for tau, decay in zip(POOLING.taus, POOLING.decays, strict=True):
            log += tau * sum(decay ** (t - s - 1) * float(row[s, tokens[s + 1]]) for s in range(t))
        logs.append(log)
    top = max(logs)
    return [math.exp(log - top) / sum(math.exp(one - top) for one in logs) for log in logs]


def test_weights_are_the_formula_by_hand() -> None:
    tokens, log_probs = some_tokens(2, LENGTH), [some_rows(2, LENGTH, seed=b) for b in range(3)]
    weights = POOLING.over(tokens, log_probs)
    assert isinstance(weights, Tensor)
    torch.testing.assert_close(weights.sum(0), torch.ones(2, LENGTH))
    for text in range(2):
        for t in (0, 1, 17, LENGTH - 1):
            expected = by_hand(tokens[text].tolist(), [part[text] for part in log_probs], t)
            assert weights[:, text, t].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_weight_does_not_see_the_token_it_helps_to_choose() -> None:
    tokens, log_probs = some_tokens(1, LENGTH), [some_rows(1, LENGTH, seed=b) for b in range(3)]
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % VOCABULARY
    before, after = (torch.as_tensor(POOLING.over(one, log_probs)) for one in (tokens, changed))
    assert torch.equal(before[..., :20], after[..., :20])
    assert not torch.equal(before[..., 20:], after[..., 20:])


def test_fixed_weights_are_the_same_everywhere() -> None:
    fixed = Pooling((0.7, 0.3))
    log_probs = [some_rows(1, LENGTH, seed=b) for b in range(2)]
    assert not fixed.follows_text
    assert fixed.over(some_tokens(1, LENGTH), log_probs) == (0.7, 0.3)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_record_kept_step_by_step_is_that_of_the_whole_text(drafts: int) -> None:
    """As a stage keeps it: some tokens at a time, wrong drafts behind them, cut back and gone on."""
    tokens, rows = some_tokens(1, LENGTH)[0], some_rows(LENGTH)
    whole = past_log_likelihood(tokens[None], [rows[None]], DECAYS)[:, 0, 0].T.numpy()
    record, base = TrackRecord(DECAYS), 0
    for end in (5, 6, 12, 13, 30):
        ids = [*tokens[base:end].tolist(), *[0] * drafts]
        drafted = torch.cat([rows[base:end], some_rows(drafts, seed=9)])
        found = record.extend(base, ids, drafted, keep=drafts + 1)
        np.testing.assert_allclose(found[: end - base], whole[base:end], atol=1e-4)
        base = end
    # Only behind the last positions can it go on; anything else must be read again from the start.
    assert record.continues(30)
    assert record.continues(0)
    assert not record.continues(29)
    assert not record.continues(30 + drafts + 1)
    np.testing.assert_allclose(record.extend(0, tokens.tolist(), rows, keep=1), whole, atol=1e-4)


def test_fitting_finds_how_far_the_weights_follow_the_text() -> None:
    """Texts of two kinds, and a block that knows each: following must beat the best fixed weights by far."""
    generator = torch.Generator().manual_seed(3)
    kinds = [some_rows(1, 1, seed=s)[0, 0].exp() for s in (1, 2)]
    texts = torch.stack([torch.multinomial(kinds[n % 2], 65, True, generator=generator) for n in range(60)])
    x, y = texts[:, :-1], texts[:, 1:]
    log_probs = [kind.log().expand(60, 64, VOCABULARY) for kind in kinds]
    rows, targets = [part.reshape(-1, VOCABULARY) for part in log_probs], y.flatten()
    past = past_log_likelihood(x, log_probs, DECAYS).flatten(2)
    fixed = fit_pooling(rows, targets)
    fitted = fit_pooling(rows, targets, past, DECAYS)
    assert fitted.follows_text
    assert sum(fitted.weights) == pytest.approx(1)
    assert min(fitted.taus) > 0
    losses = [
        float(F.nll_loss(pool(log_probs, one.over(x, log_probs)).flatten(0, 1), targets))
        for one in (fixed, fitted)
    ]
    known = [float(F.nll_loss(log_probs[n][n::2].flatten(0, 1), y[n::2].flatten())) for n in (0, 1)]
    assert losses[1] < losses[0] - 0.3
    assert losses[1] < sum(known) / 2 + 0.1


@pytest.mark.parametrize("prompt", [1, 30, 70])
def test_local_text_follows_the_text_and_caches_change_nothing(prompt: int) -> None:
    """Also where the window slides, and for a prompt longer than the context."""
    objective = tiny_objective("model.blocks=3")
    blocks, codebook = shaken_blocks(objective), tiny_codebook(objective)
    text = some_tokens(1, prompt)[0].tolist()
    model = LocalModel(objective, blocks, codebook, POOLING)
    written = list(generate(model, text, max_tokens=30, seed=1))
    for count in range(0, 30, 7):
        fresh = LocalModel(objective, blocks, codebook, POOLING)
        row = fresh.next_log_probs([*text, *written[:count]])
        again = list(generate(fresh, [*text, *written[:count]], max_tokens=1, seed=1))
        assert again == [written[count]]
        fixed = LocalModel(objective, blocks, codebook, Pooling(POOLING.weights))
        assert (len(text) + count == 1) == torch.equal(row, fixed.next_log_probs([*text, *written[:count]]))


BAD: dict[str, tuple[list[Any], Any]] = {
    "nan": ([math.nan], None),
    "words": (["x"], None),
    "infinite taus": ([1.0], {"decays": [0.9], "taus": [math.inf]}),
    "no tau": ([1.0], {"decays": [0.9], "taus": []}),
    "a decay of one": ([1.0], {"decays": [1.0], "taus": [0.1]}),
    "too many": ([1.0], {"decays": [0.9] * 99, "taus": [0.1] * 99}),
}


@pytest.mark.parametrize("case", BAD)
def test_weights_that_are_none_are_refused(case: str) -> None:
    weights, follow = BAD[case]
    with pytest.raises(ValueError, match=r"expected|could not convert"):
        Pooling.read(weights, follow)


def test_weights_read_back_as_they_were_written() -> None:
    assert Pooling.read(list(POOLING.weights), POOLING.how_it_follows) == POOLING
    assert Pooling.read([0.5, 0.5]) == Pooling((0.5, 0.5))
