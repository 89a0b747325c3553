"""Rows of log-probs as they come from blocks anywhere, and how they become one model's.

A holder of several blocks answers with one row per position: its blocks already weighed among themselves.
Where the pooling follows the text, it also says each block's log-weight there, so that holders can be weighed
among one another. Knows nothing of where the blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.pooling import Pooling
from blocktrain.model.sampling import FLOAT32_TOLERANCE, normalised
from blocktrain.serving.blocks import WeighedRows
from blocktrain.serving.engine.requests import StagesUnavailableError

LOG_WEIGHT_TOLERANCE = 1e-4
"""How far a block's log-weight may lie from its exact value where its log-probs are fp32; we measure 3e-7.
With it 2 of 900 tokens were near ties that an exact pass settled, without it none."""


@dataclass(frozen=True)
class Part:
    """What some blocks said, and how far each value of their rows may be from the exact one."""

    blocks: tuple[int, ...]
    said: WeighedRows
    tolerance: NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Normalised consensus log-probs [R, V], how far each may be from its exact value [R, V], and the blocks'
    weights in them [R, B], 0 for those that did not answer."""

    log_probs: NDArray[np.float64]
    tolerance: NDArray[np.float64]
    weights: NDArray[np.float64]


def pooled(parts: Sequence[Part], pooling: Pooling) -> Rows:
    """The answers as one model's; blocks that were left out leave their weight to the others."""
    present = [block for part in parts for block in part.blocks]
    prior = np.array(pooling.weights)
    total, tolerance = np.zeros_like(parts[0].tolerance), np.zeros_like(parts[0].tolerance)
    weights = np.zeros((len(total), len(prior)))
    if pooling.follows_text:
        weights[:, present] = np.exp(
            normalised(np.concatenate([part.said.log_weights for part in parts], axis=1))
        )
        shares = [weights[:, list(part.blocks)].sum(axis=1, keepdims=True) for part in parts]
    else:
        served = float(prior[present].sum())
        if served <= 0:
            missing = sorted(set(range(len(prior))) - set(present))
            raise StagesUnavailableError(
                f"blocks {missing} are out of reach, and the others have no weight of their own; "
                "start a stage that serves them"
            )
        # Rows of fixed weights come with these weights in them.
        weights[:, present] = prior[present] / served
        shares = [np.full((1, 1), float(prior.sum()) / served)] * len(parts)
    for part, share in zip(parts, shares, strict=True):
        total = total + share * part.said.rows
        # Errors of a sum add up in the worst case, and every choice must hold in the worst case.
        tolerance = tolerance + share * part.tolerance
    if pooling.follows_text:
        # All log-probs are negative, so weights off by this factor move their sum by at most as much.
        tolerance = tolerance + 2 * LOG_WEIGHT_TOLERANCE * np.abs(total)
    return Rows(normalised(total), tolerance + FLOAT32_TOLERANCE, weights)
