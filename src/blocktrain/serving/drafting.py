"""Guessing the next tokens in the gateway's own process, with block 0 and the request's own noise.

The draft is sampled with the noise the real choice will use, so it is accepted wherever block 0 and the
consensus agree on the winner. Where the text repeats itself, what followed last time is checked by
block 0 in one pass instead of one pass per token; the draft is the same, it only comes sooner. A wrong
draft costs time, never a different text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.model.block import Cache
from blocktrain.model.generation import window_start
from blocktrain.serving.batching import Batcher
from blocktrain.serving.held import Work
from blocktrain.serving.sampling import EXACT_TOLERANCE, Row, Sampler, choose, normalised

DRAFT_BLOCK = 0
NGRAM = 5
"""Tokens that must repeat before the look-up guesses: a byte-level word start; shorter ones rarely hold."""


class Lookup:
    """Where each n-gram of a growing text was last seen."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the last occurrence of the text's final n-gram; `tokens` only ever grows."""
        if len(tokens) < NGRAM:
            return []
        self._extend(tokens)
        end = self._ends.get(tuple(tokens[-NGRAM:]))
        return [] if end is None else list(tokens[end : end + count])

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index every n-gram but the final one, which would only find itself."""
        first = max(len(self._tokens), NGRAM)
        for end in range(first, len(tokens)):
            self._ends[tuple(tokens[end - NGRAM : end])] = end
        self._tokens = list(tokens)


class Drafter:
    """Drafts for one request; its cache follows the text."""

    def __init__(self, batcher: Batcher, sampler: Sampler) -> None:
        self.batcher, self.sampler = batcher, sampler
        self.held = batcher.held
        self.lookup = Lookup()
        self.seen: list[int] = []
        self.start = 0
        self.caches: dict[int, Cache] = self.held.new_caches([DRAFT_BLOCK])

    async def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        drafted: list[int] = []
        guess = self.lookup.guess(tokens, count - 1)
        while len(drafted) < count:
            drafted += await self._extend([*tokens, *drafted], guess)
            guess = []
        return drafted[:count]

    async def _extend(self, tokens: list[int], guess: list[int]) -> list[int]:
        """One pass: the guessed tokens that block 0 agrees with, and the one it chooses after them."""
        rows = await self._rows(tokens, guess)
        agreed: list[int] = []
        for i, row in enumerate(rows):
            token = choose(row, self.sampler, len(tokens) + i, EXACT_TOLERANCE).token
            agreed.append(token)
            if i == len(guess) or token != guess[i]:
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


MAX_LENGTH = 32
_DECAY = 0.97


@dataclass
class DraftTiming:
    """What drafting has paid so far, over all requests of an engine: the start of every new one."""

    tries: float = 10.0
    hits: float = 8.0
    draft_seconds: float = 0.002
    """Per drafted token."""
    traversal_seconds: float = 0.05

    def observe(self, drafted: int, accepted: int, draft_seconds: float, traversal_seconds: float) -> None:
        self.traversal_seconds += 0.2 * (traversal_seconds - self.traversal_seconds)
        if drafted:
            self.tries = _DECAY * self.tries + min(accepted + 1, drafted)
            self.hits = _DECAY * self.hits + accepted
            self.draft_seconds += 0.2 * (draft_seconds / drafted - self.draft_seconds)

    @property
    def acceptance(self) -> float:
        return min(0.99, self.hits / self.tries)


def best_length(timing: DraftTiming) -> int:
    """The draft length of most expected tokens per second: (1 - a^(K+1)) / (1 - a) over T + K d."""
    a = timing.acceptance
    lengths = np.arange(MAX_LENGTH + 1)
    tokens = (1 - a ** (lengths + 1)) / (1 - a)
    seconds = timing.traversal_seconds + lengths * timing.draft_seconds
    return int(np.argmax(tokens / seconds))


class AdaptiveLength:
    """Draft as many tokens as have been worth it lately."""

    def __init__(self, timing: DraftTiming) -> None:
        self.timing = timing

    def next(self) -> int:
        return best_length(self.timing)

    def observe(self, drafted: int, accepted: int, draft_seconds: float, traversal_seconds: float) -> None:
        self.timing.observe(drafted, accepted, draft_seconds, traversal_seconds)
