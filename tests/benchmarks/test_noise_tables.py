"""The litepaper's first three tables: how noise is shared out by progress, and claims that can fail."""

from __future__ import annotations

import dataclasses

import noise_tables
import pytest

from blocktrain.config import ObjectiveConfig
from blocktrain.model.noise import levels


def trained(row: noise_tables.Row, ce: float, peak: int = 1) -> noise_tables.Trained:
    return noise_tables.Trained(row, ce, ce, None, 1, peak, 0.0, (), ())


def test_equal_progress_cuts_the_rise_of_the_loss_into_equal_parts() -> None:
    curve = [(1.0, 2.0), (2.0, 2.6), (4.0, 3.2), (8.0, 5.0)]
    assert noise_tables.equal_progress(curve, 3) == pytest.approx(
        [1.0, 2.0 * 2 ** (0.4 / 0.6), 4 * 2 ** (0.8 / 1.8), 8.0]
    )


def test_a_dip_in_the_curve_makes_no_edge() -> None:
    curve = [(1.0, 2.0), (2.0, 1.9), (4.0, 3.0), (8.0, 5.0)]
    found = noise_tables.equal_progress(curve, 3)
    assert found == sorted(found)
    assert found[1] > 2.0


@pytest.mark.parametrize("inner", [(1.3436, 2.0711), (2.1544, 4.6416), (1.8, 3.1)])
def test_a_recipe_can_be_given_the_edges_by_its_noise(inner: tuple[float, float]) -> None:
    found = noise_tables.noise_with_edges(1.0, inner, 10.0)
    assert found is not None
    mean, deviation = found
    config = dataclasses.replace(ObjectiveConfig(), p_mean=mean, p_std=deviation)
    assert levels(config, 4)[::-1] == pytest.approx([1.0, *inner, 10.0], rel=noise_tables.EDGE)


def test_edges_that_no_noise_gives_are_said_to_be_so() -> None:
    assert noise_tables.noise_with_edges(1.0, (1.0001, 9.9999), 10.0) is None


def test_the_published_numbers_have_the_claimed_order_and_worse_ones_do_not() -> None:
    for rows, claims in (
        (noise_tables.T1, noise_tables.noise_range_claims),
        (noise_tables.T2, noise_tables.progression_claims),
        (noise_tables.T3, noise_tables.cut_claims),
    ):
        found = [trained(row, row.theirs, peak) for peak, row in enumerate(rows) if row.theirs is not None]
        assert claims(found)
        assert all(claims(found).values())
        assert not all(claims([*found[:-1], dataclasses.replace(found[-1], euler=99.0)]).values())


def test_memory_that_does_not_grow_with_a_block_fails_the_claim() -> None:
    found = [trained(row, row.theirs or 0.0, peak=7) for row in noise_tables.T3]
    assert not all(noise_tables.cut_claims(found).values())
