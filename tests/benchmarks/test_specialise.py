"""What specialise.py trains at its sizes, and what it says of several seeds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import specialise
from specialise import BLOCKS, DECAYS, SIZES, Place, Unit


def test_a_small_unit_has_the_shape_of_its_size_and_a_full_one_that_of_the_published_reports() -> None:
    small = specialise.recipe_of(Unit(0, 100, 0, 6e-3, 4e-3, **SIZES["small"]), quick=False)
    assert (small.model.width, small.model.heads, small.model.context, small.training.batch) == (
        32,
        2,
        128,
        4,
    )
    assert small.objective.codebook == "own"
    full = specialise.recipe_of(Unit(0, 100, 0, 6e-3, 4e-3, **SIZES["full"]), quick=False)
    assert (full.model.width, full.model.heads, full.model.context, full.training.batch) == (384, 6, 512, 64)
    assert full.objective.codebook == "fixed"


def test_small_blocks_cost_more_a_step_together_than_end_to_end() -> None:
    """Each has an output map of its own: without --equal-operations they would get more."""
    whole = Unit(0, 1, None, 6e-3, 4e-3, **SIZES["small"])
    place = Place("", "cpu", False)
    ratio = BLOCKS * specialise.operations(replace(whole, index=0), place)
    assert 1.1 < ratio / specialise.operations(whole, place) < 1.4


def test_the_mean_gap_of_a_block_alone_is_not_that_of_equal_blocks() -> None:
    rows = [
        {"share": 0.0, "decays": (), "gap": 0.25},  # of a report without a number of blocks
        {"blocks": BLOCKS, "share": 0.0, "decays": (), "gap": 0.75},
        {"blocks": 1, "share": 0.0, "decays": (), "gap": -1.0},
        {"blocks": 1, "share": 0.0, "decays": (), "gap": -1.0},
        {"blocks": BLOCKS, "share": 0.75, "decays": DECAYS, "gap": 9.0},
    ]
    found = {(row["blocks"], row["share"]): row for row in specialise.mean_gaps(rows)}
    assert found.keys() == {(BLOCKS, 0.0), (1, 0.0)}  # of one seed there is no standard error
    assert found[BLOCKS, 0.0]["gap"] == 0.5
    assert found[BLOCKS, 0.0]["error"] == pytest.approx(math.sqrt(0.125) / math.sqrt(2))
    assert (found[1, 0.0]["gap"], found[1, 0.0]["error"]) == (-1.0, 0.0)
