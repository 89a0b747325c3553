"""Guessing the next tokens in the gateway's own process, with block 0 and the request's own noise.

The draft is sampled with the noise the real choice will use, so it is accepted wherever block 0 and the
consensus agree on the winner. Where the text repeats itself, what followed last time is checked by
block 0 in one pass instead of one pass per token; the draft is the same, it only comes sooner. A wrong
draft costs time, never a different text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from blocktrain.model.block import Cache
from blocktrain.model.generation import window_start
from blocktrain.serving.batching import Batcher
from blocktrain.serving.engine_api import MAX_DRAFT_TOKENS
from blocktrain.serving.held import Work
from blocktrain.serving.sampling import EXACT_TOLERANCE, Row, Sampler, choose, normalised

DRAFT_BLOCK = 0
NGRAM = 5
"""Tokens that must repeat before the look-up guesses: a byte-level word start; shorter ones rarely hold."""
GUESS = 6
"""Tokens guessed at a time: each is a row more in a pass, about a tenth of its cost."""


class Lookup:
    """Where each n-gram of a growing text was last seen."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the text, which only ever grows. Its final n-gram would only find itself: not yet."""
        first = max(len(self._tokens), NGRAM)
        for end in range(first, len(tokens)):
            self._ends[tuple(tokens[end - NGRAM : end])] = end
        self._tokens = list(tokens)

    def guess(self, text: Sequence[int], count: int) -> list[int]:
        """What followed the last occurrence of this text's final n-gram."""
        end = self._ends.get(tuple(text[-NGRAM:]))
        return [] if end is None else self._tokens[end : end + max(0, count)]


class DraftLength(Protocol):
    """When to stop drafting, learning from what came of earlier drafts."""

    @property
    def most(self) -> int:
        """No draft is longer."""

    def go_on(self, margins: Sequence[float]) -> bool:
        """Whether to draft one more token behind tokens that won by these margins."""

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None: ...


class FixedLength:
    def __init__(self, length: int) -> None:
        self.most = length

    def go_on(self, margins: Sequence[float]) -> bool:
        return True

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        pass


class AdaptiveLength:
    """Draft on while the next token is worth its time; shared by all requests of an engine.

    A token that block 0 chose by a wide margin is seldom wrong, so the chance of acceptance is counted by
    margin. The next token brings (chance that all before it hold) * (its own chance) tokens and costs the
    time of a draft, in which the engine makes `rate` tokens by going on as usual.
    """

    most = MAX_DRAFT_TOKENS

    def __init__(self) -> None:
        self.tries = np.full(len(MARGINS) + 1, 2.0)
        self.hits = self.tries * np.linspace(0.5, 0.98, len(MARGINS) + 1)
        self.draft_seconds = 0.002
        """Per drafted token."""
        self.tokens, self.seconds = 1.0, 0.05
        """Of recent traversals, older ones counting less."""

    def chance(self, margin: float) -> float:
        bucket = int(np.searchsorted(MARGINS, margin))
        return float(self.hits[bucket] / self.tries[bucket])

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def go_on(self, margins: Sequence[float]) -> bool:
        usual = float(self.hits.sum() / self.tries.sum())
        gain = usual * math.prod(self.chance(margin) for margin in margins)
        return gain > self.draft_seconds * self.rate

    def observe(
        self, margins: Sequence[float], accepted: int, draft_seconds: float, traversal_seconds: float
    ) -> None:
        for i, margin in enumerate(margins[: accepted + 1]):
            bucket = int(np.searchsorted(MARGINS, margin))
            self.tries[bucket] = _KEEP * self.tries[bucket] + 1
            self.hits[bucket] = _KEEP * self.hits[bucket] + (i < accepted)
        if margins:
            self.draft_seconds += 0.1 * (draft_seconds / len(margins) - self.draft_seconds)
        self.tokens = 0.9 * self.tokens + accepted + 1
        self.seconds = 0.9 * self.seconds + draft_seconds + traversal_seconds


MARGINS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Borders, in nats, between the classes of margins that chances are counted for."""
_KEEP = 0.99


class Drafter:
    """Drafts for one request; its cache follows the text."""

    def __init__(self, batcher: Batcher, sampler: Sampler, length: DraftLength) -> None:
        self.batcher, self.sampler, self.length = batcher, sampler, length
        self.held = batcher.held
        self.lookup = Lookup()
        self.margins: list[float] = []
        self.seen: list[int] = []
        self.start = 0
        self.caches: dict[int, Cache] = self.held.new_caches([DRAFT_BLOCK])

    async def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens, as many as seem worth it."""
        drafted: list[int] = []
        most = min(most, self.length.most)
        self.margins = []
        self.lookup.extend(tokens)
        while len(drafted) < most and self.length.go_on(self.margins):
            text = [*tokens, *drafted]
            guess = self.lookup.guess(text, min(GUESS, most - len(drafted) - 1))
            drafted += await self._extend(text, guess)
        return drafted

    def observe(self, accepted: int, draft_seconds: float, traversal_seconds: float) -> None:
        """What came of the last draft."""
        self.length.observe(self.margins, accepted, draft_seconds, traversal_seconds)

    async def _extend(self, tokens: list[int], guess: list[int]) -> list[int]:
        """One pass: the guessed tokens that block 0 agrees with, and the one it chooses after them."""
        rows = await self._rows(tokens, guess)
        agreed: list[int] = []
        for i, row in enumerate(rows):
            choice = choose(row, self.sampler, len(tokens) + i, EXACT_TOLERANCE)
            agreed.append(choice.token)
            self.margins.append(choice.margin)
            if i == len(guess) or choice.token != guess[i]:
                break
        return agreed

    async def _rows(self, tokens: list[int], guess: list[int]) -> Row:
        start = window_start(len(tokens), self.held.context)
        window = [*tokens[start:], *guess][: self.held.context]
        num_rows = len(window) - (len(tokens) - start) + 1
        keep = _common_prefix(self.seen, window) if start == self.start else 0
        keep = min(keep, len(window) - num_rows)
        self.seen, self.start = window, start
        work = Work(window[keep:], num_rows, (DRAFT_BLOCK,), self.caches, keep)
        outcome = await self.batcher.rows(work)
        return normalised(outcome.rows.astype(np.float64) / self.held.weights[DRAFT_BLOCK])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))
