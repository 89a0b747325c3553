"""The noise levels of objective.md: its printed numbers, and the formulas behind them."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.config import ObjectiveConfig
from blocktrain.model.noise import (
    interval,
    levels,
    loss_weight,
    owner,
    precondition,
    sample_sigma,
    training_interval,
)

PUBLISHED = ObjectiveConfig(sigma_min=1.0, sigma_max=10.0)
FOUR_DIGITS = 5e-5

configs = st.builds(
    lambda low, ratio, overlap: ObjectiveConfig(sigma_min=low, sigma_max=low * ratio, overlap=overlap),
    st.floats(0.05, 5),
    st.floats(1.1, 100),
    st.floats(0, 0.5),
)
block_counts = st.integers(1, 12)


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [(3, [1, 1.3436, 2.0711, 10]), (4, [1, 1.2379, 1.6232, 2.4285, 10])],
)
def test_partition_edges_are_the_published_ones(num_blocks: int, expected: list[float]) -> None:
    assert levels(PUBLISHED, num_blocks + 1)[::-1] == pytest.approx(expected, abs=FOUR_DIGITS)


def test_euler_levels_of_three_blocks_are_the_published_ones() -> None:
    assert levels(PUBLISHED, 3) == pytest.approx([10, 1.6232, 1.0], abs=FOUR_DIGITS)


def test_one_level_is_the_highest_noise_and_two_are_the_ends() -> None:
    assert levels(PUBLISHED, 1) == [10.0]
    assert levels(PUBLISHED, 2) == [10.0, 1.0]


@given(configs, block_counts)
def test_every_block_owns_the_same_probability_mass(config: ObjectiveConfig, num_blocks: int) -> None:
    normal = NormalDist(config.p_mean, config.p_std)
    mass = [
        normal.cdf(math.log(high)) - normal.cdf(math.log(low))
        for low, high in (interval(config, num_blocks, block) for block in range(num_blocks))
    ]
    assert mass == pytest.approx([sum(mass) / num_blocks] * num_blocks, rel=1e-4, abs=1e-9)


@given(configs, block_counts)
def test_intervals_tile_the_range_from_the_highest_noise_down(
    config: ObjectiveConfig, num_blocks: int
) -> None:
    owned = [interval(config, num_blocks, block) for block in range(num_blocks)]
    assert owned[0][1] == config.sigma_max
    assert owned[-1][0] == config.sigma_min
    assert all(above[0] == below[1] for above, below in zip(owned, owned[1:], strict=False))


def test_overlap_widens_an_inner_interval_by_its_log_width_on_both_sides() -> None:
    config = ObjectiveConfig(sigma_min=1.0, sigma_max=10.0, overlap=0.1)
    low, high = interval(config, 3, 1)
    log_width = math.log(high) - math.log(low)
    widened_low, widened_high = training_interval(config, 3, 1)
    assert math.log(low) - math.log(widened_low) == pytest.approx(0.1 * log_width)
    assert math.log(widened_high) - math.log(high) == pytest.approx(0.1 * log_width)
    assert (widened_low, widened_high) == pytest.approx((1.3436 / 1.0442, 2.0711 * 1.0442), rel=1e-4)


def test_overlap_is_clamped_to_the_whole_range() -> None:
    assert training_interval(PUBLISHED, 3, 0)[1] == 10.0
    assert training_interval(PUBLISHED, 3, 2)[0] == 1.0


@given(configs, block_counts)
def test_without_overlap_a_block_trains_on_what_it_owns(config: ObjectiveConfig, num_blocks: int) -> None:
    config = ObjectiveConfig(sigma_min=config.sigma_min, sigma_max=config.sigma_max, overlap=0.0)
    for block in range(num_blocks):
        assert training_interval(config, num_blocks, block) == interval(config, num_blocks, block)


@given(configs, block_counts, st.integers(1, 20))
def test_the_owner_of_a_level_is_the_block_whose_interval_holds_it(
    config: ObjectiveConfig, num_blocks: int, count: int
) -> None:
    for sigma in levels(config, count):
        low, high = interval(config, num_blocks, owner(config, num_blocks, sigma))
        assert low * (1 - 1e-6) <= sigma <= high * (1 + 1e-6)


def test_each_of_three_default_euler_levels_belongs_to_another_block() -> None:
    assert [owner(PUBLISHED, 3, sigma) for sigma in levels(PUBLISHED, 3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("sigma", "c_skip", "c_out", "c_in", "c_noise"),
    [
        (0.5, 0.5, 0.353553, 1.414214, -0.173287),
        (1.0, 0.2, 0.447214, 0.894427, 0.0),
        (10.0, 0.00249377, 0.499376, 0.0998752, 0.575646),
    ],
)
def test_preconditioning_has_the_values_worked_out_by_hand(
    sigma: float, c_skip: float, c_out: float, c_in: float, c_noise: float
) -> None:
    c = precondition(torch.tensor([sigma]), 0.5)
    found = [float(value) for value in (c.c_skip, c.c_out, c.c_in, c.c_noise)]
    assert found == pytest.approx([c_skip, c_out, c_in, c_noise], rel=1e-5, abs=1e-7)


def test_infinite_noise_leaves_only_the_network_output() -> None:
    c = precondition(torch.tensor([torch.inf]), 0.5)
    assert [float(value) for value in (c.c_skip, c.c_out, c.c_in)] == [0.0, 0.5, 0.0]


@given(st.floats(0.01, 1000), st.floats(0.1, 2))
def test_preconditioning_is_the_published_formula(sigma: float, sigma_data: float) -> None:
    c = precondition(torch.tensor([sigma], dtype=torch.float64), sigma_data)
    total = sigma**2 + sigma_data**2
    assert float(c.c_skip) == pytest.approx(sigma_data**2 / total)
    assert float(c.c_out) == pytest.approx(sigma * sigma_data / math.sqrt(total))
    assert float(c.c_in) == pytest.approx(1 / math.sqrt(total))
    assert float(c.c_noise) == pytest.approx(math.log(sigma) / 4)


def test_loss_weight_falls_from_five_to_four_over_the_published_range() -> None:
    weights = loss_weight(torch.tensor([1.0, 2.0, 10.0, torch.inf]), 0.5)
    assert weights.tolist() == pytest.approx([5.0, 4.25, 4.01, 4.0])


@given(st.floats(0.05, 100), st.floats(0.1, 2))
def test_loss_weight_is_the_published_formula(sigma: float, sigma_data: float) -> None:
    weight = float(loss_weight(torch.tensor([sigma], dtype=torch.float64), sigma_data))
    assert weight == pytest.approx((sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_drawn_noise_levels_follow_the_truncated_distribution(block: int) -> None:
    drawn = sample_sigma(PUBLISHED, 3, block, 20_000, torch.Generator().manual_seed(block)).double()
    low, high = training_interval(PUBLISHED, 3, block)
    assert float(drawn.min()) >= low * (1 - 1e-6)
    assert float(drawn.max()) <= high * (1 + 1e-6)
    normal = NormalDist(PUBLISHED.p_mean, PUBLISHED.p_std)
    q_low, q_high = normal.cdf(math.log(low)), normal.cdf(math.log(high))
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        expected = math.exp(normal.inv_cdf(q_low + share * (q_high - q_low)))
        found_share = float((drawn <= expected).double().mean())
        assert found_share == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(drawn)))


@given(configs, block_counts, st.data())
def test_drawn_noise_levels_stay_inside_the_training_interval(
    config: ObjectiveConfig, num_blocks: int, data: st.DataObject
) -> None:
    block = data.draw(st.integers(0, num_blocks - 1))
    drawn = sample_sigma(config, num_blocks, block, 64, torch.Generator().manual_seed(0))
    low, high = training_interval(config, num_blocks, block)
    assert bool(((drawn >= low * (1 - 1e-6)) & (drawn <= high * (1 + 1e-6))).all())


def test_the_same_generator_draws_the_same_noise_levels() -> None:
    first, second = (sample_sigma(PUBLISHED, 3, 1, 8, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
