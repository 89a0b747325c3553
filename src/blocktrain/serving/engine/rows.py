"""Rows of log-probs as they come from blocks anywhere, and how they become one model's.

A holder of several blocks answers with one row per position: its blocks already weighed among themselves.
Where the pooling follows the text, it also says each block's log-weight there, so that holders can be weighed
among one another. Knows nothing of where the blocks are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.pooling import Pooling
from blocktrain.model.sampling import FLOAT32_TOLERANCE, SampledToken, Sampler, choose, normalised
from blocktrain.serving.blocks import WeighedRows
from blocktrain.serving.engine.requests import StagesUnavailableError
from blocktrain.wire.frames import Codec, code_range

LOG_WEIGHT_TOLERANCE = 1e-4
"""How far a block's log-weight may lie from its exact value where its log-probs are fp32; we measure 3e-7.
With it 2 of 900 tokens were near ties that an exact pass settled, without it none."""


@dataclass(eq=False)
class Traversal:
    """What one trip through the blocks is asked for: what follows each of the last `num_rows` prefixes of a
    text."""

    tokens: Sequence[int]
    num_rows: int
    whole: bool = False
    """Ask for rows over the whole vocabulary, where the best tokens would do otherwise."""
    leads: bool = False
    """Set while no other traversal of the text is under way before it."""
    void: bool = False
    """Set when nobody waits for the rows any more, or when a stage failed while others were under way before
    it: those are asked again, and this one behind them."""


@dataclass(frozen=True)
class Part:
    """What some blocks said, and how far each value of their rows may be from the exact one."""

    blocks: tuple[int, ...]
    said: WeighedRows
    tolerance: NDArray[np.float64]
    ids: NDArray[np.int64] | None = None
    """Where only the best tokens [R, K] of each row were sent: which. The rows are then their scores, and all
    other tokens have at most the lowest of them (`model.sampling.best_scores`)."""


@dataclass(frozen=True)
class Rows:
    """Normalised consensus log-probs [R, V], how far each may be from its exact value [R, V], and the blocks'
    weights in them [R, B], 0 for those that did not answer."""

    log_probs: NDArray[np.float64]
    tolerance: NDArray[np.float64]
    weights: NDArray[np.float64]

    def choose(self, i: int, sampler: Sampler, text: Sequence[int]) -> SampledToken:
        """What follows `text`, which row `i` is for."""
        return choose(self.log_probs[i], sampler, len(text), self.tolerance[i], text)


@dataclass(frozen=True)
class BestRows:
    """The same of the best tokens alone. A choice that these cannot settle is made from whole rows."""

    parts: Sequence[Part]
    shares: Sequence[NDArray[np.float64]]
    """Of each part [R], of sum one."""
    weights: NDArray[np.float64]
    vocabulary: int
    shares_tolerance: float
    """By what part of itself a share may be off."""

    def choose(self, i: int, sampler: Sampler, text: Sequence[int]) -> SampledToken:
        """What follows `text`, which row `i` is for.

        A token that a part did not send scores there at most as much as the lowest that it sent. So a token
        sent by all has a score, one sent by some an upper bound, and one sent by none the sum of the bounds;
        the choice is settled where one token's score is above every other's bound.
        """
        # Without a share a part has no say, and infinity times nothing is no number.
        said = [
            (part.ids[i], part.said.rows[i], part.tolerance[i], share[i])
            for part, share in zip(self.parts, self.shares, strict=True)
            if part.ids is not None and share[i] > 0
        ]
        ids = np.unique(np.concatenate([one[0] for one in said]))
        # One column more, for all tokens that nobody sent.
        upper = np.zeros((len(said), len(ids) + 1))
        lower = np.full_like(upper, -np.inf)
        span, _ = code_range(Codec.Q16)
        for p, (sent, scores, tolerance, _) in enumerate(said):
            at = np.searchsorted(ids, sent)
            upper[p] = (scores + tolerance).min()
            upper[p, at] = scores + tolerance
            # What reads as the end of the codec's span may lie anywhere below it.
            lower[p, at] = np.where(scores > scores.max() - 0.999 * span, scores - tolerance, -np.inf)
        shares = np.array([one[3] for one in said])
        high, low = shares @ upper, shares @ lower
        # Shares off by a factor, and still of sum one, move a score by that factor times how far the parts
        # lie apart. And fp32 log-probs are off by so much, divided by the temperature as they were.
        slack = FLOAT32_TOLERANCE / (sampler.temperature or 1.0)
        off = slack + self.shares_tolerance * (shares @ np.abs(upper - high))
        high, low = high + off, low - off
        best = int(low.argmax())
        high[best] = -np.inf
        if len(ids) == self.vocabulary:
            high[-1] = -np.inf
        margin = float(low[best] - high.max())
        # Where no token was sent by all, `best` may be the last column; then nothing is settled.
        return SampledToken(int(ids[best % len(ids)]), margin > 0, margin)


def shares_of(
    blocks: Sequence[tuple[int, ...]], log_weights: Sequence[NDArray[np.float64]], pooling: Pooling
) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """What each answer counts for in every row, and each block [R, B]; blocks that were left out leave their
    weight to the others."""
    if not pooling.follows_text:
        _, weights_B, fixed = _fixed_shares(tuple(blocks), pooling)
        num_rows = len(log_weights[0])
        return [np.full(num_rows, share) for share in fixed], np.broadcast_to(
            weights_B, (num_rows, len(weights_B))
        )
    present = [block for part in blocks for block in part]
    weights = np.zeros((len(log_weights[0]), len(pooling.weights)))
    weights[:, present] = np.exp(normalised(np.concatenate(log_weights, axis=1)))
    return [weights[:, list(part)].sum(axis=1) for part in blocks], weights


@functools.lru_cache(maxsize=256)
def _fixed_shares(
    blocks: tuple[tuple[int, ...], ...], pooling: Pooling
) -> tuple[float, NDArray[np.float64], list[float]]:
    """Where weights are fixed: what the sum of the answers is multiplied by, each block's weight [B], and
    what each answer counts for. Few sets of blocks ever answer, and every token asks."""
    present = [block for part in blocks for block in part]
    prior = np.array(pooling.weights)
    served = float(prior[present].sum())
    if served <= 0:
        missing = sorted(set(range(len(prior))) - set(present))
        raise StagesUnavailableError(
            f"blocks {missing} are out of reach, and the others have no weight of their own; "
            "start a stage that serves them"
        )
    weights = np.zeros(len(prior))
    weights[present] = prior[present] / served
    shares = [float(weights[list(part)].sum()) for part in blocks]
    return float(prior.sum()) / served, weights, shares


def pooled(parts: Sequence[Part], pooling: Pooling) -> Rows:
    """The answers as one model's."""
    blocks = [part.blocks for part in parts]
    shares, weights = shares_of(blocks, [part.said.log_weights for part in parts], pooling)
    if not pooling.follows_text:
        # Rows of fixed weights come with these weights in them.
        shares = [np.full(1, _fixed_shares(tuple(blocks), pooling)[0])] * len(parts)
    total, tolerance = np.zeros_like(parts[0].tolerance), np.zeros_like(parts[0].tolerance)
    for part, share in zip(parts, shares, strict=True):
        total = total + share[:, None] * part.said.rows
        # Errors of a sum add up in the worst case, and every choice must hold in the worst case.
        tolerance = tolerance + share[:, None] * part.tolerance
    if pooling.follows_text:
        # All log-probs are negative, so weights off by this factor move their sum by at most as much.
        tolerance = tolerance + 2 * LOG_WEIGHT_TOLERANCE * np.abs(total)
    return Rows(normalised(total), tolerance + FLOAT32_TOLERANCE, weights)


def best_pooled(parts: Sequence[Part], pooling: Pooling, vocabulary: int) -> BestRows:
    """The same of answers that hold the best tokens alone."""
    shares, weights = shares_of([p.blocks for p in parts], [p.said.log_weights for p in parts], pooling)
    off = 2 * LOG_WEIGHT_TOLERANCE if pooling.follows_text else 0.0
    return BestRows(parts, shares, weights, vocabulary, off)
