"""Noise levels of the denoising objective: which block owns which sigma, and EDM preconditioning.

Symbols follow the DiffusionBlocks and EDM papers. The null hint is the limit sigma -> infinity with
the noise itself left out, so every formula here is written to be finite at sigma = inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from blocktrain.config import ObjectiveConfig

NORMAL = NormalDist()


@dataclass(frozen=True)
class Preconditioning:
    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def precondition(sigma: Tensor, sigma_data: float) -> Preconditioning:
    """EDM table 1, rearranged so that sigma = inf gives c_skip = 0, c_out = sigma_data, c_in = 0."""
    norm = torch.sqrt(sigma * sigma + sigma_data**2)
    return Preconditioning(
        c_skip=(sigma_data / norm) ** 2,
        c_out=sigma_data / torch.sqrt(1 + (sigma_data / sigma) ** 2),
        c_in=1 / norm,
        c_noise=torch.log(sigma) / 4,
    )


def loss_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """w(sigma) = (sigma^2 + sd^2) / (sigma sd)^2, one value per sequence; 1 / sd^2 at sigma = inf."""
    return 1 / sigma_data**2 + 1 / (sigma * sigma)


def _quantile(config: ObjectiveConfig, sigma: float) -> float:
    return NORMAL.cdf((math.log(sigma) - config.p_mean) / config.p_std)


def _sigma(config: ObjectiveConfig, quantile: float) -> float:
    return math.exp(config.p_mean + config.p_std * NORMAL.inv_cdf(quantile))


def levels(config: ObjectiveConfig, count: int) -> list[float]:
    """`count` noise levels equally spaced in probability mass, from sigma_max down to sigma_min."""
    if count == 1:
        return [config.sigma_max]
    low, high = _quantile(config, config.sigma_min), _quantile(config, config.sigma_max)
    inner = [_sigma(config, high + (low - high) * i / (count - 1)) for i in range(1, count - 1)]
    return [config.sigma_max, *inner, config.sigma_min]


def edges(config: ObjectiveConfig, num_blocks: int) -> list[float]:
    """Ascending block edges of equal probability mass: sigma_b = exp(P_mean + P_std Phi^-1(q_b))."""
    return levels(config, num_blocks + 1)[::-1]


def interval(config: ObjectiveConfig, num_blocks: int, block: int) -> tuple[float, float]:
    """The noise range block `block` owns; block 0 owns the highest."""
    ascending = edges(config, num_blocks)
    return ascending[num_blocks - 1 - block], ascending[num_blocks - block]


def training_interval(config: ObjectiveConfig, num_blocks: int, block: int) -> tuple[float, float]:
    """The owned range widened by `overlap` of its log-width on both sides, clamped to the whole range."""
    low, high = interval(config, num_blocks, block)
    widening = (high / low) ** config.overlap
    return max(low / widening, config.sigma_min), min(high * widening, config.sigma_max)


def owner(config: ObjectiveConfig, num_blocks: int, sigma: float) -> int:
    """The block that denoises at `sigma`; an inner edge belongs to the block above it in noise."""
    for block in range(num_blocks):
        if sigma >= interval(config, num_blocks, block)[0] * (1 - 1e-9):
            return block
    return num_blocks - 1


def sample_sigma(
    config: ObjectiveConfig, num_blocks: int, block: int, count: int, generator: torch.Generator
) -> Tensor:
    """`count` draws of ln sigma ~ N(P_mean, P_std^2) truncated to the block's training interval."""
    low, high = training_interval(config, num_blocks, block)
    q_low, q_high = _quantile(config, low), _quantile(config, high)
    uniform = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
    q = q_low + (q_high - q_low) * uniform
    return torch.exp(config.p_mean + config.p_std * torch.special.ndtri(q)).clamp(low, high).float()


def noise_share(sigma_start: float, sigma: float) -> float:
    """a in z = a z0 + p_bar E, the state of an Euler chain that began at `sigma_start` with noise z0.

    A step from s to s' gives z' = (s'/s) z + (1 - s'/s) p E, so a shrinks with sigma and p_bar stays a
    mixture over the vocabulary: a hop needs the seed of z0 and one row of V numbers, not of d.
    """
    return math.sqrt(1 + sigma_start**2) * sigma / sigma_start
