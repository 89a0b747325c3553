"""Which token follows, decided so that it does not matter how its log-probs were computed.

The same row of log-probs comes out a few units in the last place apart when it is computed alone or among
drafts, batched with other requests, or on a spare with another processor. Such rows choose another token
once in some 100,000 choices, and then all text after it differs (docs/decisions/0004). So a choice counts
as *settled* only when no change of the log-probs within their tolerance could change it; a near tie is
settled by an exact pass in float64, whose own noise is about 1e-13. Then `verify`, `ar`, retries and
failover give the same text by construction, and an 8-bit codec (a larger tolerance, more exact passes)
gives it too.

Sampling is Gumbel-max with noise keyed by (seed, position): nothing random is carried from token to token.
Pure functions over numpy; no torch, no clock, no sockets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]
"""Log-probs over the vocabulary."""
TokenSet = NDArray[np.bool_]
"""A set of tokens, one flag each."""

FLOAT32_TOLERANCE = 1e-4
"""How far fp32 log-probs of one row may lie from their exact value; we measure 1e-6 to 1e-5."""
EXACT_TOLERANCE = 1e-10
"""The same of float64 rows; their noise is about 1e-13."""


@dataclass(frozen=True)
class Sampler:
    """How a request samples; the noise of a position depends on (seed, position) alone."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class SampledToken:
    token: int
    settled: bool
    """False where log-probs within the tolerance of these could have chosen another token."""
    margin: float
    """By how much the token won, in nats of its score."""


def choose(row: Row, sampler: Sampler, position: int, tolerance: float | Row) -> SampledToken:
    """The token that follows at `position`; temperature 0 takes the most likely one (the lowest id of
    equals)."""
    everything = np.ones(len(row), bool)
    inside, doubtful = everything, ~everything
    if sampler.temperature == 0:
        scores, error = row, np.broadcast_to(np.asarray(tolerance), row.shape)
    else:
        scores = normalised(row / sampler.temperature)
        # Dividing by the temperature scales the error too: a cold sampler has fewer near ties, a hot one
        # more.
        error = np.broadcast_to(np.asarray(tolerance) / sampler.temperature, scores.shape)
        if sampler.top_p < 1:
            inside, doubtful = _nucleus(scores, float(error.max()), sampler.top_p)
        # Gumbel-max: the argmax of score + noise is a sample, and the noise is exact on every machine.
        scores = scores + gumbel_noise(sampler.seed, position, len(row))
    token = int(np.where(inside, scores, -np.inf).argmax())
    # The worst case: the winner is too high by its error and every rival too low by its own.
    gap = scores[token] - error[token] - (scores + error)
    gap[token] = np.inf
    gap[~(inside | doubtful)] = np.inf
    margin = float(gap.min())
    return SampledToken(token, bool(margin > 0 and not doubtful[token]), margin)


def _nucleus(scores: Row, error: float, top_p: float) -> tuple[TokenSet, TokenSet]:
    """Tokens in the smallest set of mass top_p, and tokens whose membership is in doubt."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    mass = np.exp(ordered)
    ahead = np.cumsum(mass) - mass
    inside = np.empty(len(scores), bool)
    inside[order] = ahead < top_p
    # Normalising spreads one token's error over all, so a score moves by up to twice the error (`slack`), and
    # two tokens may swap places when they lie within twice that.
    slack = 2 * error
    sums = np.concatenate([[0.0], np.cumsum(mass)])
    surely = sums[np.searchsorted(-ordered, -ordered - 2 * slack, "left")]
    possibly = np.maximum(sums[np.searchsorted(-ordered, -ordered + 2 * slack, "right")] - mass, ahead)
    # The mass ahead of a token changes by exp(+-2 slack) at most; in doubt where top_p lies between the
    # bounds.
    doubtful = np.empty(len(scores), bool)
    doubtful[order] = (surely * np.exp(-2 * slack) < top_p) & (possibly * np.exp(2 * slack) >= top_p)
    return inside, doubtful


def gumbel_noise(seed: int, position: int, vocabulary: int) -> Row:
    """Standard Gumbel noise of one absolute position, the same on every machine."""
    # A hash and not a generator: no state travels from token to token, so a retry or another machine draws
    # the same.
    key = f"blocktrain-gumbel/{seed}/{position}".encode()
    raw = np.frombuffer(hashlib.shake_128(key).digest(8 * vocabulary), dtype="<u8")
    # Half a step off the grid: neither 0 nor 1 occurs, whose logarithms are infinite.
    uniform = (raw.astype(np.float64) + 0.5) / 2.0**64
    noise: Row = -np.log(-np.log(uniform))
    return noise


def normalised(scores: Row) -> Row:
    """log-softmax in float64."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Row = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
