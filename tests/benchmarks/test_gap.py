"""The gap to end to end: at equal operations, and with its error."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import gap
import pytest
import tune

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


def test_pools_that_average_equal_predictors_are_fitted_by_limit_and_spread() -> None:
    seeds = [[0.98 + 0.06 / count + shift for count in (1, 2, 3, 4)] for shift in (-0.001, 0.001)]
    fit = gap.ensemble_fit(seeds)
    assert fit.limit == pytest.approx(0.98)
    assert fit.spread == pytest.approx(0.06)
    assert fit.largest_residual < 1e-9
    assert gap.ensemble_fit([[1.04, 1.0, 1.0, 1.0]]).largest_residual > 0.001


def test_what_is_trained_is_kept_under_its_own_name(tmp_path: Path) -> None:
    units = [
        gap.Work(0, None, ("a",)),
        gap.Work(0, 0, ("a",)),
        gap.Work(0, 0, ("b",)),
        gap.Work(1, 0, ("a",)),
    ]
    assert len({unit.kept_in(tmp_path) for unit in units}) == len(units)
    assert gap.Work(0, 0, ("a",)).kept_in(tmp_path) == units[1].kept_in(tmp_path)


def test_one_seed_has_no_error() -> None:
    assert math.isnan(gap.mean_and_error([gap.Gap(0, 1.0, 1.0)])[1])


def test_a_search_that_was_cut_off_is_taken_up_only_with_the_same_recipe(tmp_path: Path) -> None:
    recipe, path = resolve_recipe({"name": "one"}), tmp_path / "tune.json"
    assert tune.tried_before(path, recipe) == []
    of_before = {"side": "block", "matrix_lr": 3e-3, "other_lr": 1e-3, "ce": 1.5}
    made_by = {"provenance": {"commit": "a" * 40}}
    path.write_text(json.dumps({**made_by, "recipe": recipe.to_dict(), "trials": [of_before]}))
    found = tune.tried_before(path, recipe)
    assert found == [tune.Trial("block", 3e-3, 1e-3, 1.5, "a" * 40)]
    of_two_commits = [dataclasses.asdict(found[0]), of_before | {"commit": "b" * 40}]
    path.write_text(json.dumps({**made_by, "recipe": recipe.to_dict(), "trials": of_two_commits}))
    assert [one.commit for one in tune.tried_before(path, recipe)] == ["a" * 40, "b" * 40]
    # A trial trains alone: rules of the swarm change nothing in it.
    assert tune.tried_before(path, resolve_recipe({"name": "two", "swarm": {"rounds": 7}}))
    with pytest.raises(SystemExit, match="another recipe"):
        tune.tried_before(path, resolve_recipe({"name": "one", "training": {"steps": 7}}))


def climbed(losses: Callable[[gap.Pair], float], size: gap.Pair) -> dict[gap.Pair, float]:
    tried: dict[gap.Pair, float] = {}
    while wanted := gap.still_to_try(tried, size):
        tried |= {pair: losses(pair) for pair in wanted}
    return tried


def test_a_climb_ends_where_all_neighbours_of_the_best_pair_are_worse() -> None:
    tried = climbed(lambda pair: (pair[0] - 3) ** 2 + (pair[1] - 5) ** 2, (5, 7))
    assert min(tried, key=lambda pair: tried[pair]) == (3, 5)
    assert {(2, 5), (4, 5), (3, 4), (3, 6)} <= set(tried)
    assert len(tried) < 5 * 7 / 2


def test_a_climb_goes_to_the_edge_of_the_grid_and_not_beyond() -> None:
    tried = climbed(lambda pair: -pair[0], (5, 7))
    assert min(tried, key=lambda pair: tried[pair])[0] == 4
    assert all(0 <= m < 5 and 0 <= o < 7 for m, o in tried)
