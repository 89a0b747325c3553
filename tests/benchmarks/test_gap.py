"""The gap to end to end: at equal operations, and with its error."""

from __future__ import annotations

import math

import gap
import pytest

from blocktrain.config import resolve_recipe
from blocktrain.training.cost import forward_flops_per_token
from blocktrain.training.setup import Setup


def test_end_to_end_gets_the_operations_of_all_blocks_together() -> None:
    recipe = resolve_recipe(
        {
            "model": {"width": 32, "heads": 2, "blocks": 3, "layers_per_block": 1, "context": 16},
            "training": {"steps": 1000},
        }
    )
    steps, setup = gap.reference_steps(recipe, 256), Setup.of(recipe)
    block = forward_flops_per_token(recipe.model, setup.initial(0), 256)
    whole = forward_flops_per_token(recipe.model, setup.initial_reference(), 256)
    assert steps * whole == pytest.approx(1000 * 3 * block, rel=1e-3)


def test_the_mean_gap_comes_with_its_standard_error() -> None:
    gaps = [gap.Gap(0, 1.02, 1.0), gap.Gap(1, 1.04, 1.0), gap.Gap(2, 1.03, 1.0)]
    mean, error = gap.mean_and_error(gaps)
    assert mean == pytest.approx(0.03)
    assert error == pytest.approx(0.01 / math.sqrt(3))
    assert gap.lines_of(gaps)[-1] == "gap +0.0300, standard error 0.0058, 3 seeds"


def test_one_seed_has_no_error() -> None:
    assert math.isnan(gap.mean_and_error([gap.Gap(0, 1.0, 1.0)])[1])
