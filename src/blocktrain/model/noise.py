"""Noise levels of the denoising objective: which block owns which sigma, and EDM preconditioning.

Symbols follow the DiffusionBlocks and EDM papers; numbers in brackets are the equations of docs/objective.md.
The null hint is the limit sigma -> infinity with the noise itself left out, so every formula here is written
to be finite at sigma = inf.
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
    # (4). At inf, c_out as published is inf / inf; divided through by sigma it has its limit.
    norm = torch.sqrt(sigma * sigma + sigma_data**2)
    return Preconditioning(
        c_skip=(sigma_data / norm) ** 2,
        c_out=sigma_data / torch.sqrt(1 + (sigma_data / sigma) ** 2),
        c_in=1 / norm,
        c_noise=torch.log(sigma) / 4,
    )


def loss_weight(sigma: Tensor, sigma_data: float) -> Tensor:
    """w(sigma) = (sigma^2 + sd^2) / (sigma sd)^2, one value per sequence; 1 / sd^2 at sigma = inf."""
    # (6), multiplied out. From 5 at sigma 1 to 4 at inf: sequences with and without a hint weigh alike.
    return 1 / sigma_data**2 + 1 / (sigma * sigma)


def _quantile(config: ObjectiveConfig, sigma: float) -> float:
    return NORMAL.cdf((math.log(sigma) - config.p_mean) / config.p_std)


def _sigma(config: ObjectiveConfig, quantile: float) -> float:
    return math.exp(config.p_mean + config.p_std * NORMAL.inv_cdf(quantile))


def levels(config: ObjectiveConfig, count: int) -> list[float]:
    """`count` noise levels equally spaced in probability mass, from sigma_max down to sigma_min."""
    # A single block starts where the noise is greatest: the one level from which a chain can begin.
    if count == 1:
        return [config.sigma_max]
    # (3): for [1, 10] and 4 blocks the edges are 1, 1.24, 1.62, 2.43, 10. Equal mass, not equal width: each
    # block sees as many of the noise levels that training draws. The ends are exact, not a round trip by Phi.
    low, high = _quantile(config, config.sigma_min), _quantile(config, config.sigma_max)
    inner = [_sigma(config, high + (low - high) * i / (count - 1)) for i in range(1, count - 1)]
    return [config.sigma_max, *inner, config.sigma_min]


def interval(config: ObjectiveConfig, num_blocks: int, block: int) -> tuple[float, float]:
    """The noise range block `block` owns; block 0 owns the highest."""
    # Block 0 comes first in the Euler chain, which goes from much noise to little.
    edges = levels(config, num_blocks + 1)
    return edges[block + 1], edges[block]


def training_interval(config: ObjectiveConfig, num_blocks: int, block: int) -> tuple[float, float]:
    """The owned range widened by `overlap` of its log-width on both sides, clamped to the whole range."""
    # (3): near an edge two blocks are trained, so that neither meets noise there that it has never seen.
    low, high = interval(config, num_blocks, block)
    widening = (high / low) ** config.overlap
    return max(low / widening, config.sigma_min), min(high * widening, config.sigma_max)


def owner(config: ObjectiveConfig, num_blocks: int, sigma: float) -> int:
    """The block that denoises at `sigma`; an inner edge belongs to the block above it in noise."""
    # 1e-9: `levels` returns an edge by way of exp and log, which may land a last bit below it.
    for block in range(num_blocks):
        if sigma >= interval(config, num_blocks, block)[0] * (1 - 1e-9):
            return block
    return num_blocks - 1


def sample_sigma(
    config: ObjectiveConfig, num_blocks: int, block: int, count: int, generator: torch.Generator
) -> Tensor:
    """`count` draws of ln sigma ~ N(P_mean, P_std^2) truncated to the block's training interval."""
    # (2), by the inverse of Phi: no rejected draws, so the same number of random numbers on every machine. In
    # float64, as sigma_max lies at a quantile of 0.998, where fp32 leaves few digits.
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
