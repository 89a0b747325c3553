"""Evidence tells honest work from harm, noise and nothing, at a tenth of the compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.model.noise import training_interval
from blocktrain.validation.evidence import (
    Evidence,
    Gain,
    evidence_budget,
    evidence_seed,
    looks,
    sequential_gain,
    stratified_sigma,
    training_tokens,
)
from blocktrain.validation.ruling import evidence_ruling
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.messages import VerdictReason
from tests.validation.kit import RECIPE, Weights, applied, coded, corpus, honest, scorer


def evidence(delta: Weights, seed: int = 1) -> Evidence:
    one = honest(0)
    return scorer().evidence(0, one.base, applied(one.base, delta), one.work, seed)


def test_honest_work_gains_and_its_reverse_harms() -> None:
    update = coded(honest(0))
    found = evidence_ruling(evidence(update))
    assert found.counts, found.sentence
    reverse = evidence_ruling(evidence({name: -value for name, value in update.items()}))
    assert reverse.reason is VerdictReason.HARMFUL, reverse.sentence


def test_an_empty_update_gains_nothing() -> None:
    found = evidence_ruling(evidence({name: 0 * value for name, value in honest(0).delta.items()}))
    assert found.reason is VerdictReason.NO_GAIN


def test_an_update_that_breaks_the_block_is_harmful() -> None:
    broken = {name: np.full_like(value, 1e30) for name, value in honest(0).delta.items()}
    assert evidence_ruling(evidence(broken)).reason is VerdictReason.HARMFUL


def test_the_same_seed_gives_the_same_evidence_and_another_seed_other_text() -> None:
    update = coded(honest(0))
    assert evidence(update, seed=5) == evidence(update, seed=5)
    assert evidence(update, seed=5).held_out != evidence(update, seed=6).held_out


def test_private_text_takes_the_place_of_held_out_text_for_judge_and_guard(tmp_path: Path) -> None:
    """The other half of what decides is training text, for both of them."""
    (tmp_path / "private.txt").write_text("whisper " * 1000)
    trust = dataclasses.replace(RECIPE.trust, private_text=str(tmp_path / "private.txt"))
    private = Scorer(dataclasses.replace(RECIPE, trust=trust), corpus())
    one, after = honest(0), applied(honest(0).base, coded(honest(0)))
    found, usual = (who.evidence(0, one.base, after, one.work, 1) for who in (private, scorer()))
    assert found.held_out != usual.held_out
    assert (found.assigned, found.other) == (usual.assigned, usual.other)
    [merged], [known] = (who.guard(0, one.base, [after], 16, 1) for who in (private, scorer()))
    assert [mine == theirs for mine, theirs in zip(merged, known, strict=True)] == [False] * 8 + [True] * 8


def test_the_seed_needs_the_commit_and_the_secret() -> None:
    seeds = {
        evidence_seed(secret, update, commit)
        for secret in (b"a" * 32, b"b" * 32)
        for update in ("u1", "u2")
        for commit in ("c1", "c2")
    }
    assert len(seeds) == 8


def test_judging_costs_at_most_a_tenth_of_the_work() -> None:
    budget = evidence_budget(RECIPE)
    windows = budget.held_out + budget.assigned + budget.other + budget.guard
    assert 2 * budget.length * windows <= 0.1 * training_tokens(RECIPE)
    assert evidence(coded(honest(0))).tokens <= 0.08 * training_tokens(RECIPE)


def test_noise_levels_are_spread_over_the_block_s_range() -> None:
    generator = torch.Generator().manual_seed(0)
    low, high = training_interval(RECIPE.objective, 4, 1)
    sigma = stratified_sigma(RECIPE.objective, 4, 1, 8, generator)
    assert low <= sigma.min() < sigma.max() <= high
    assert len(set(sigma.tolist())) == 8


@pytest.mark.parametrize("budget", [1, 8, 30, 1000])
def test_looks_end_with_the_whole_budget(budget: int) -> None:
    found = list(looks(budget))
    assert found[-1] == budget
    assert found == sorted(set(found))


@pytest.mark.parametrize(("mean", "windows"), [(-1.0, 16), (0.0, 1000), (1.0, 1000)])
def test_sure_harm_ends_the_test_early_and_a_gain_is_measured_to_the_end(mean: float, windows: int) -> None:
    generator = np.random.default_rng(0)
    found = sequential_gain(
        lambda first, end: list(mean + 0.5 * generator.standard_normal(end - first)), 1000
    )
    assert found.windows == windows


def test_a_gain_of_zero_scores_zero() -> None:
    assert Gain.of([0.0, 0.0]).score == 0.0
    assert Gain.of([1.0, 1.0]).score == 100.0
    assert Gain.of([float("nan")]).score == -100.0


@pytest.mark.parametrize(("assigned", "mark"), [(0.2, 1), (0.105, 0), (0.1, 0), (0.0, -1), (float("nan"), 0)])
def test_assigned_and_other_text_are_told_apart_beyond_their_error_only(assigned: float, mark: int) -> None:
    other = Gain(0.1, 0.01, 30)
    assert Evidence(other, Gain(assigned, 0.01, 30), other, 0).mark == mark
