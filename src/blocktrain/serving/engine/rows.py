"""Rows of log-probs as they come from blocks anywhere, and how they become one model's.

A holder of several blocks answers with one row per position: its blocks already weighed among themselves.
Where the pooling follows the text, it also says each block's log-weight there, so that holders can be weighed
among one another. Knows nothing of where the blocks are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.pooling import Pooling
from blocktrain.model.sampling import FLOAT32_TOLERANCE, Row, SampledToken, Sampler, choose, normalised
from blocktrain.serving.blocks import WeighedRows
from blocktrain.serving.engine.requests import StagesUnavailableError
from blocktrain.wire.frames import Codec, code_range

LOG_WEIGHT_TOLERANCE = 1e-4
"""How far a block's log-weight may lie from its exact value where its log-probs are fp32; we measure 3e-7.
With it 2 of 900 tokens were near ties that an exact pass settled, without it none."""


SMALL_VOCABULARY = 1024
"""Up to so many tokens a table of where each was sent is smaller than a comparison of all pairs."""


@dataclass(eq=False)
class Traversal:
    """What one trip through the blocks is asked for: what follows each of the last `num_rows` prefixes of a
    text."""

    tokens: list[int]
    """Not changed any more."""
    num_rows: int
    whole: bool = False
    """Ask for rows over the whole vocabulary, where the best tokens would do otherwise."""
    leads: bool = False
    """Set while no other traversal of the text is under way before it."""
    written: int = 0
    """So many of the tokens were written when it was asked for; those behind are drafts."""
    void: bool = False
    """Set when nobody waits for the rows any more, or when a stage failed while others were under way before
    it: those are asked again, and this one behind them."""


class Part(NamedTuple):
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
    """What the best tokens alone settle. A choice that they leave open is made from whole rows."""

    choices: Sequence[SampledToken]
    weights: NDArray[np.float64]

    def choose(self, i: int, sampler: Sampler, text: Sequence[int]) -> SampledToken:
        """What follows `text`, which row `i` is for; the stages have drawn for this sampler already."""
        return self.choices[i]


def joined(parts: Sequence[Rows | BestRows]) -> Rows | BestRows:
    """Rows that follow one another."""
    weights = np.concatenate([part.weights for part in parts])
    whole = [part for part in parts if isinstance(part, Rows)]
    if len(whole) == len(parts):
        logs, tolerances = [part.log_probs for part in whole], [part.tolerance for part in whole]
        return Rows(np.concatenate(logs), np.concatenate(tolerances), weights)
    best = [part for part in parts if isinstance(part, BestRows)]
    assert len(best) == len(parts), "rows of one traversal are of one kind"
    return BestRows([choice for part in best for choice in part.choices], weights)


def shares_of(
    blocks: Sequence[tuple[int, ...]], log_weights: Sequence[NDArray[np.float64]], pooling: Pooling
) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """What each answer counts for in every row, and each block [R, B]; blocks that were left out leave their
    weight to the others."""
    if not pooling.follows_text:
        return _fixed_rows(tuple(blocks), pooling, len(log_weights[0]))
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


@functools.lru_cache(maxsize=256)
def _fixed_rows(
    blocks: tuple[tuple[int, ...], ...], pooling: Pooling, num_rows: int
) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """The same for so many rows."""
    _, weights_B, shares = _fixed_shares(blocks, pooling)
    weights = np.broadcast_to(weights_B, (num_rows, len(weights_B)))
    return [np.full(num_rows, share) for share in shares], weights


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


def best_pooled(parts: Sequence[Part], pooling: Pooling, vocabulary: int, temperature: float) -> BestRows:
    """The same of answers that hold the best tokens alone.

    A token that a part did not send scores there at most as much as the lowest that it sent. So a token
    sent by all has a score, one sent by some an upper bound, and one sent by none the sum of the bounds;
    a choice is settled where one token's score is above every other's bound.
    """
    shares, weights = shares_of([p.blocks for p in parts], [p.said.log_weights for p in parts], pooling)
    sent = [part.ids for part in parts if part.ids is not None]
    assert len(sent) == len(parts), "every part holds the best tokens alone"
    # All rows at once: one by one they took 87 us each, whole rows 53. C candidates, some of them twice; one
    # column more, for all tokens that nobody sent.
    ids_RC = np.concatenate([*sent, np.full((len(weights), 1), -1)], axis=1)
    # fp32 log-probs are off by so much, divided by the temperature as they were.
    off: float | Row = FLOAT32_TOLERANCE / (temperature or 1.0)
    bounds = [
        _bounds(part.said.rows, part.tolerance, ids_RK, ids_RC, vocabulary)
        for part, ids_RK in zip(parts, sent, strict=True)
    ]
    high, low = bounds[0]
    if len(parts) > 1:
        high, low = np.zeros(ids_RC.shape), np.zeros(ids_RC.shape)
        for (upper, lower), share in zip(bounds, shares, strict=True):
            # Without a share a part has no say, and infinity times nothing is no number.
            says = share[:, None] > 0
            high += share[:, None] * upper
            low += np.where(says, share[:, None] * np.where(says, lower, 0.0), 0.0)
        if pooling.follows_text:
            # Shares off by a factor, and still of sum one, move a score by that factor times how far the
            # parts lie apart.
            for (upper, _), share in zip(bounds, shares, strict=True):
                off = off + 2 * LOG_WEIGHT_TOLERANCE * share[:, None] * np.abs(upper - high)
    rivals, low = high + off, low - off
    row_R1, best_R1 = np.arange(len(weights))[:, None], low.argmax(axis=1)[:, None]
    # Not `take_along_axis`, with which a row of one part took 142 us instead of 96.
    tokens_R1 = ids_RC[row_R1, best_R1]
    rivals[ids_RC == tokens_R1] = -np.inf
    if ids_RC.shape[1] > vocabulary:
        everything = [len(np.unique(row)) == vocabulary + 1 for row in ids_RC]
        rivals[everything, -1] = -np.inf
    # Where no token was sent by all, no score is known, and the best is minus infinity.
    margins = low[row_R1, best_R1][:, 0] - rivals.max(axis=1)
    return BestRows(
        [
            SampledToken(max(0, int(token)), bool(margin > 0), float(margin))
            for token, margin in zip(tokens_R1[:, 0], margins, strict=True)
        ],
        weights,
    )


def _bounds(
    scores: Row,
    tolerance: Row,
    ids_RK: NDArray[np.int64],
    ids_RC: NDArray[np.int64],
    vocabulary: int,
) -> tuple[Row, Row]:
    """What the candidates score at most and at least, as far as a part says that sent some of them."""
    top = scores + tolerance
    # What reads as the end of the codec's span may lie anywhere below it.
    known = scores > scores.max(axis=1, keepdims=True) - 0.999 * code_range(Codec.Q16)[0]
    bottom = np.where(known, scores - tolerance, -np.inf)
    upper, lower = np.empty(ids_RC.shape), np.full(ids_RC.shape, -np.inf)
    upper[:] = top.min(axis=1, keepdims=True)
    if ids_RC.shape[1] == ids_RK.shape[1] + 1:
        # They are its own.
        upper[:, :-1], lower[:, :-1] = top, bottom
        return upper, lower
    row_R1 = np.arange(len(top))[:, None]
    if vocabulary <= SMALL_VOCABULARY:
        # Ten rows of 32 tokens: 20 instead of 60 us. The last place is that of the column for all others.
        place_RV = np.full((len(top), vocabulary + 1), -1)
        place_RV[row_R1, ids_RK] = np.arange(ids_RK.shape[1])
        at = place_RV[row_R1, ids_RC]
        was_sent = at >= 0
    else:
        is_RCK = ids_RC[:, :, None] == ids_RK[:, None]
        was_sent, at = is_RCK.any(axis=2), is_RCK.argmax(axis=2)
    return np.where(was_sent, top[row_R1, at], upper), np.where(was_sent, bottom[row_R1, at], lower)
