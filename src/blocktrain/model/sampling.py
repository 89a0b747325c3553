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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
FORBIDDEN = -1e9
"""The score of a token that may not come: finite, because two infinities have no difference."""
COLDEST = 1e-6
"""A temperature below this is 0."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request wants its tokens to be chosen."""

    seed: int = 0
    """The noise of a position depends on (seed, position) alone."""
    temperature: float = 1.0
    top_p: float = 1.0
    """Sample among the fewest tokens that have this share of the probability together."""
    top_k: int | None = None
    """Sample among this many of the most likely tokens."""
    min_p: float = 0.0
    """Sample among the tokens that are at least this share as likely as the most likely one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Nats to add to the log-prob of a token."""
    presence_penalty: float = 0.0
    """Nats to take from each token that the new text has."""
    frequency_penalty: float = 0.0
    """Nats to take from a token for each time that the new text has it."""
    repetition_penalty: float = 1.0
    """Factor on the log-prob of each token that the prompt or the new text has."""
    min_tokens: int = 0
    """New tokens before the text may end by the model's own choice."""

    def __post_init__(self) -> None:
        # Log-probs by a smaller one than 1e-307 overflow, and every token scores minus infinity. Below 1e-6
        # noise decides only between tokens within 4e-5 nats.
        if 0 < self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def reads_text(self) -> bool:
        """True if a choice depends on the tokens before it by more than their log-probs."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def filters(self) -> bool:
        """True if some tokens may be left out for being unlikely."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class Sampler(Sampling):
    """The same for one text of one model."""

    prompt_tokens: int = 0
    """Where the new text begins."""
    end: int | None = None
    """The token by which the model ends a text."""

    @property
    def plain(self) -> bool:
        """True if a choice depends on temperature and noise alone."""
        may_end = self.end is None or not self.min_tokens
        return may_end and not (self.reads_text or self.filters or self.logit_bias)


@dataclass(frozen=True)
class SampledToken:
    token: int
    settled: bool
    """False where log-probs within the tolerance of these could have chosen another token."""
    margin: float
    """By how much the token won, in nats of its score."""


def choose(
    row: Row, sampler: Sampler, position: int, tolerance: float | Row, text: Sequence[int] = ()
) -> SampledToken:
    """The token that follows `text` at `position`; temperature 0 takes the most likely one (the lowest id of
    equals)."""
    row, allowed = _wished(row, np.broadcast_to(np.asarray(tolerance), row.shape), sampler, position, text)
    if sampler.temperature == 0:
        return _winner(row, allowed)
    # Dividing by the temperature scales the error too: a cold sampler has fewer near ties, a hot one more.
    scores, error = row / sampler.temperature, allowed / sampler.temperature
    # Gumbel-max: the argmax of score + noise is a sample, and the noise is exact on every machine. A common
    # shift changes no winner, so only a nucleus needs scores that are normalised.
    noise = gumbel_noise(sampler.seed, position, len(row))
    if not sampler.filters:
        return _winner(scores + noise, error)
    scores = normalised(scores)
    inside, doubtful = _candidates(scores, float(error.max()), sampler)
    return _winner(scores + noise, error, inside, doubtful)


def _winner(
    scores: Row, error: Row, inside: TokenSet | None = None, doubtful: TokenSet | None = None
) -> SampledToken:
    """The best of those inside, and whether it is so in the worst case: it is too high by its error, and
    every rival, a doubtful one too, is too low by its own."""
    token = int(scores.argmax() if inside is None else np.where(inside, scores, -np.inf).argmax())
    gap = scores[token] - error[token] - (scores + error)
    gap[token] = np.inf
    if inside is not None and doubtful is not None:
        gap[~(inside | doubtful)] = np.inf
    margin = float(gap.min())
    return SampledToken(token, margin > 0 and not (doubtful is not None and doubtful[token]), margin)


def best_scores(
    rows_RV: NDArray[Any], places: Sequence[tuple[Sampler, int]], weight: float, most: int
) -> tuple[NDArray[np.int64], Row]:
    """Ids and scores [R, K] of the tokens that some blocks would choose first, `most` of each row: log-probs
    by temperature, plus noise. The rows are those blocks' log-probs times `weight`; each has a sampler and
    the position of the token it is for. Scores of several holders add up, each times its share, to the score
    that `choose` compares where `sampler.plain`."""
    temperature_R = np.array([sampler.temperature for sampler, _ in places])
    scores_RV = rows_RV.astype(np.float64) / (weight * np.where(temperature_R, temperature_R, 1.0))[:, None]
    # The noise is known here too. Ranked without it, what only noise lifts would be missed.
    keys = [(sampler.seed, position) for sampler, position in places if sampler.temperature]
    if keys:
        scores_RV[temperature_R > 0] += gumbel_noises(keys, scores_RV.shape[1])
    count = min(most, scores_RV.shape[1])
    ids_RK = np.argpartition(-scores_RV, count - 1, axis=1)[:, :count]
    return ids_RK, scores_RV[np.arange(len(ids_RK))[:, None], ids_RK]


def _wished(
    row: Row, tolerance: Row, sampler: Sampler, position: int, text: Sequence[int]
) -> tuple[Row, Row]:
    """Log-probs and their tolerance with the request's biases and penalties. These depend on the text alone,
    which drafts and retries know too; so the text stays the same for every way of computing it."""
    row = row.copy()
    if sampler.reads_text:
        tokens = np.asarray(text, dtype=np.int64)
        # Log-probs are below zero, so that a penalty above 1 makes a token less likely whatever its score.
        seen = np.unique(tokens)
        row[seen] *= sampler.repetition_penalty
        tolerance = tolerance.copy()
        tolerance[seen] *= sampler.repetition_penalty
        # Of what was written only, as OpenAI counts them; repetition counts the prompt too.
        counts = np.bincount(tokens[sampler.prompt_tokens :], minlength=len(row))
        row -= sampler.presence_penalty * (counts > 0) + sampler.frequency_penalty * counts
    # A shift by a constant that everybody knows adds no error.
    for token, nats in sampler.logit_bias:
        row[token] += nats
    if sampler.end is not None and position < sampler.prompt_tokens + sampler.min_tokens:
        row[sampler.end] = FORBIDDEN
    return row, tolerance


def _candidates(scores: Row, error: float, sampler: Sampler) -> tuple[TokenSet, TokenSet]:
    """Tokens that top_p, top_k and min_p all let through, and those of which that is in doubt. Each of the
    three sees the whole distribution, so that their order does not matter."""
    surely, inside = np.ones(len(scores), bool), np.ones(len(scores), bool)
    possibly = inside.copy()
    filters = []
    if sampler.top_p < 1:
        filters.append(_nucleus(scores, error, sampler.top_p))
    if sampler.min_p > 0:
        border = scores.max() + np.log(sampler.min_p)
        # A token and the most likely one may each be off by the error; what normalising adds is common.
        filters.append((scores >= border, np.abs(scores - border) <= 2 * error))
    if sampler.top_k is not None and sampler.top_k < len(scores):
        order = np.argsort(-scores, kind="stable")
        best = np.zeros(len(scores), bool)
        best[order[: sampler.top_k]] = True
        last_in, first_out = scores[order[sampler.top_k - 1]], scores[order[sampler.top_k]]
        # Any order among those inside is the same set; only who lies close to the border may cross it.
        close = np.where(best, scores - first_out, last_in - scores) <= 2 * error
        filters.append((best, close))
    for chosen, in_doubt in filters:
        inside &= chosen
        surely &= chosen & ~in_doubt
        possibly &= chosen | in_doubt
    return inside, possibly & ~surely


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
    """Standard Gumbel noise [V] of an absolute position, the same on every machine."""
    noise: Row = gumbel_noises([(seed, position)], vocabulary)[0]
    return noise


def gumbel_noises(keys: Sequence[tuple[int, int]], vocabulary: int) -> Row:
    """The same [R, V] of several seeds and positions."""
    # A hash and not a generator: no state travels from token to token, so a retry or another machine draws
    # the same.
    names = (f"blocktrain-gumbel/{seed}/{position}".encode() for seed, position in keys)
    raw = b"".join(hashlib.shake_128(name).digest(8 * vocabulary) for name in names)
    # Half a step off the grid: neither 0 nor 1 occurs, whose logarithms are infinite.
    uniform = (np.frombuffer(raw, dtype="<u8").astype(np.float64) + 0.5) / 2.0**64
    noise: Row = -np.log(-np.log(uniform))
    return noise.reshape(len(keys), vocabulary)


def normalised(scores: Row) -> Row:
    """log-softmax in float64."""
    shifted = scores - scores.max(axis=-1, keepdims=True)
    result: Row = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
