"""Guessing the next tokens in the gateway's own process, with block 0 and the request's own noise.

The draft is sampled with the noise the real choice will use, so it is accepted wherever block 0 and the
consensus agree on the winner. Where the text repeats itself, what followed last time is checked by
block 0 in one pass instead of one pass per token. A wrong draft costs time, never a different text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blocktrain.model.block import Cache
from blocktrain.model.generation import window_start
from blocktrain.serving.batching import Batcher
from blocktrain.serving.draft_length import DraftLength
from blocktrain.serving.held import Work
from blocktrain.serving.sampling import EXACT_TOLERANCE, Choice, Row, Sampler, choose, normalised

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


class Drafter:
    """Drafts for one request; its cache follows the text."""

    def __init__(self, batcher: Batcher, sampler: Sampler, length: DraftLength) -> None:
        self.batcher, self.sampler, self.length = batcher, sampler, length
        self.held = batcher.held
        self.lookup = Lookup()
        self.drafted: list[Choice] = []
        self.caches: dict[int, Cache] = self.held.new_caches([DRAFT_BLOCK])
        self.seen: list[int] = []
        self.start = 0

    async def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens, as many as seem worth it."""
        text, most = list(tokens), min(most, self.length.most)
        self.lookup.extend(text)
        self.drafted = []
        while len(self.drafted) < most and self.length.go_on(_margins(self.drafted)):
            self.drafted += await self._extend(text, self.drafted, most)
        return [choice.token for choice in self.drafted]

    def observe(self, accepted: int, draft_seconds: float, traversal_seconds: float) -> None:
        """What came of the last draft."""
        self.length.observe(_margins(self.drafted), accepted, draft_seconds, traversal_seconds)

    async def _extend(self, text: list[int], choices: list[Choice], most: int) -> list[Choice]:
        """One pass: the guessed tokens that block 0 agrees with, and the one it chooses after them."""
        tokens = [*text, *(choice.token for choice in choices)]
        guess = self.lookup.guess(tokens, min(GUESS, most - len(choices) - 1))
        agreed: list[Choice] = []
        for i, row in enumerate(await self._rows(tokens, guess)):
            agreed.append(choose(row, self.sampler, len(tokens) + i, EXACT_TOLERANCE))
            if i == len(guess) or agreed[-1].token != guess[i]:
                break
        return agreed

    async def _rows(self, tokens: list[int], guess: list[int]) -> Row:
        start = window_start(len(tokens), self.held.context)
        window = [*tokens[start:], *guess][: self.held.context]
        num_rows = len(window) - (len(tokens) - start) + 1
        keep = _common_prefix(self.seen, window) if start == self.start else 0
        keep = min(keep, len(window) - num_rows)
        self.seen, self.start = window, start
        outcome = await self.batcher.rows(Work(window[keep:], num_rows, (DRAFT_BLOCK,), self.caches, keep))
        return normalised(outcome.rows.astype(np.float64) / (self.held.weights[DRAFT_BLOCK] or 1.0))


def _margins(choices: Sequence[Choice]) -> list[float]:
    return [choice.margin for choice in choices]


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))
