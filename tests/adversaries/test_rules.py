"""The rules that the judge is compared with do what their papers say, and the attacks on them are such."""

from __future__ import annotations

import numpy as np
import pytest

from blocktrain.training.update import Weights
from tests.adversaries.rules import RULES

HONEST = [{"w": np.array([1.0, 2.0, offset], np.float32)} for offset in (0.9, 1.0, 1.1, 1.05, 0.95)]
ZERO: Weights = {"w": np.zeros(3, np.float32)}
FAR: Weights = {"w": np.array([-90.0, 80.0, 70.0], np.float32)}


@pytest.mark.parametrize("rule", ["trimmed mean", "Krum", "centred clipping"])
def test_far_updates_move_a_rule_less_than_the_mean(rule: str) -> None:
    center = np.mean([one["w"] for one in HONEST], axis=0)

    def error(name: str) -> float:
        return float(np.linalg.norm(RULES[name]([*HONEST, FAR, FAR], 2, ZERO)["w"] - center))

    assert error("mean") > 20
    assert error(rule) < 0.1 * error("mean")


@pytest.mark.parametrize("rule", sorted(RULES))
def test_equal_updates_come_out_as_they_went_in(rule: str) -> None:
    merged = RULES[rule]([HONEST[0]] * 5, 2, ZERO)
    np.testing.assert_allclose(merged["w"], HONEST[0]["w"], rtol=1e-6)


def test_a_trimmed_mean_of_a_hostile_majority_is_the_median() -> None:
    merged = RULES["trimmed mean"]([*HONEST[:3], *[FAR] * 4], 4, ZERO)
    np.testing.assert_allclose(merged["w"], [-90.0, 80.0, 70.0])
