"""Which token follows, decided so that it does not matter how its log-probs were computed.

The same row of log-probs comes out a few units in the last place apart when it is computed alone or
among drafts, batched with other requests, or on a spare with another processor. A choice is *settled*
when no change of the log-probs within their tolerance could change it; a near tie is settled by an exact
pass in float64, whose own noise is about 1e-13. So `verify`, `ar`, retries and failover give the same
text by construction, and an 8-bit codec (a larger tolerance, more exact passes) gives it too.

Pure functions over numpy; no torch, no clock, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.generation import gumbel_noise

Row = NDArray[np.float64]
"""Log-probs over the vocabulary."""
Tokens = NDArray[np.bool_]
"""A set of tokens, one flag each."""

FLOAT32_TOLERANCE = 1e-4
"""How far fp32 log-probs of one row may lie from their exact value; 1e-6 to 1e-5 is what we measure."""
EXACT_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Sampler:
    """How a request samples; the noise of a position depends on (seed, position) alone."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Choice:
    token: int
    settled: bool
    """False where log-probs within the tolerance of these could have chosen another token."""
    margin: float
    """By how much the token won, in nats of its score."""


def choose(row: Row, sampler: Sampler, position: int, tolerance: float | Row) -> Choice:
    """`model.generation.choose_token`, together with whether the choice is settled."""
    if sampler.temperature == 0:
        return _winner(row, np.ones(len(row), bool), np.zeros(len(row), bool), tolerance)
    scores = normalised(row / sampler.temperature)
    error = np.broadcast_to(np.asarray(tolerance) / sampler.temperature, scores.shape)
    inside, doubtful = _nucleus(scores, error, sampler.top_p)
    noise = np.asarray(gumbel_noise(sampler.seed, position, len(row)))
    return _winner(scores + noise, inside, doubtful, error)


def _winner(scores: Row, inside: Tokens, doubtful: Tokens, error: float | Row) -> Choice:
    eligible = np.where(inside, scores, -np.inf)
    token = int(eligible.argmax())
    error = np.broadcast_to(np.asarray(error), scores.shape)
    gap = scores[token] - error[token] - (scores + error)
    gap[token] = np.inf
    gap[~(inside | doubtful)] = np.inf
    margin = float(gap.min())
    return Choice(token, bool(margin > 0 and not doubtful[token]), margin)


def _nucleus(scores: Row, error: Row, top_p: float) -> tuple[Tokens, Tokens]:
    """Tokens in the smallest set of mass top_p, and tokens whose membership is in doubt."""
    if top_p >= 1:
        return np.ones(len(scores), bool), np.zeros(len(scores), bool)
    order = np.argsort(-scores, kind="stable")
    mass = np.exp(scores[order])
    ahead = np.cumsum(mass) - mass
    inside = np.empty(len(scores), bool)
    inside[order] = ahead < top_p
    slack = 2 * float(error.max())
    ordered = scores[order]
    # Mass surely and possibly ahead of each token, when near-equal tokens may swap places.
    surely = np.concatenate([[0.0], np.cumsum(mass)])[np.searchsorted(-ordered, -ordered - 2 * slack, "left")]
    possibly = np.concatenate([[0.0], np.cumsum(mass)])[
        np.searchsorted(-ordered, -ordered + 2 * slack, "right")
    ]
    possibly = np.maximum(possibly - mass, ahead)
    doubtful = np.empty(len(scores), bool)
    doubtful[order] = (surely * np.exp(-2 * slack) < top_p) & (possibly * np.exp(2 * slack) >= top_p)
    return inside, doubtful


def normalised(scores: Row) -> Row:
    """log-softmax in float64."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Row = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
