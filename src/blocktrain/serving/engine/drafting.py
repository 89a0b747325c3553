"""Guessing the next tokens in the gateway's own process, with its first blocks and the request's own noise.

The draft is sampled with the noise the real choice will use, so it is accepted wherever these blocks and the
consensus agree on the winner. A draft is one visit to the computing thread, however long it is. A wrong
draft costs time, never a different text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from blocktrain.model.generation import window_start
from blocktrain.model.objective import Objective
from blocktrain.model.sampling import EXACT_TOLERANCE, Row, Sampler, choose, normalised
from blocktrain.serving.batching import Batcher
from blocktrain.serving.engine.draft_length import DraftLength

STEPS_AT_MOST = 4
"""Tokens the cache is behind by that are taken one by one; more go through one pass of the block."""


def blocks_for_drafts(objective: Objective, most: int) -> list[int]:
    """The first of the smallest blocks that have no others upstream; block 0 never has."""
    model = objective.model
    alone = [block for block in range(model.blocks) if not objective.upstream(block)]
    # A draft pays by being cheaper than what it foretells, and blocks of one shape take each step together.
    shape = model.of_block(min(alone, key=model.step_cost))
    return [block for block in alone if model.of_block(block) == shape][: max(1, most)]


class Drafter:
    """Drafts for one request; its cache follows the text."""

    def __init__(
        self, batcher: Batcher, sampler: Sampler, length: DraftLength, blocks: Sequence[int] = (0,)
    ) -> None:
        self.batcher, self.sampler, self.length = batcher, sampler, length
        self.context = batcher.held.context
        self.steps = batcher.held.steps(tuple(blocks))
        self.blocks = list(blocks)
        self.weights = self._own(np.array(batcher.held.pooling.weights))
        self.cache = self.steps.new_cache()
        self.margins: list[float] = []
        """By how much each token of the last draft won."""
        self.seen: list[int] = []
        self.start = 0
        self.catch_up_seconds = 0.0
        """Time of the last draft spent on text that was not drafted; 60 ms of the first after 128 bytes."""

    async def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens, as many as seem worth it."""
        most, self.catch_up_seconds, self.margins = min(most, self.length.most), 0.0, []
        if not most:
            return []
        return await self.batcher.call(lambda: self._draft(list(tokens), most))

    def _own(self, weights: Row) -> Row:
        """The share of each block held here. One of weight 0 may be the only one here; it still guesses
        better than nothing."""
        own = np.maximum(weights[self.blocks], 1e-9)
        shares: Row = own / own.sum()
        return shares

    def observe(self, accepted: int, draft_seconds: float, traversal_seconds: float, weights: Row) -> None:
        """What came of the last draft, and all blocks' weights at its end: those of the next few tokens are
        about the same. Catching up is due however few tokens are drafted."""
        self.weights = self._own(weights)
        draft_seconds = max(0.0, draft_seconds - self.catch_up_seconds)
        self.length.observe(self.margins, accepted, draft_seconds, traversal_seconds)

    def _draft(self, text: list[int], most: int) -> list[int]:
        """Runs in the computing thread."""
        known = len(text)
        while len(self.margins) < most and self.length.go_on(self.margins):
            start = window_start(len(text), self.context)
            window = text[start:]
            # What the cache holds beyond the text they share was a wrong draft, or another window.
            keep = _common_prefix(self.seen, window) if start == self.start else 0
            keep = min(keep, len(window) - 1)
            self.seen, self.start = window, start
            self.cache.truncate(keep)
            self._catch_up(window[keep:-1])
            logits_NV = self.steps.step(window[-1], self.cache).numpy().astype(np.float64)
            row = normalised(self.weights @ normalised(logits_NV))
            # The tolerance does not matter here: a token that is not settled is drafted all the same.
            choice = choose(row, self.sampler, len(text), EXACT_TOLERANCE, text)
            self.margins.append(choice.margin)
            text.append(choice.token)
        return text[known:]

    def _catch_up(self, tokens: list[int]) -> None:
        began = time.monotonic()
        if len(tokens) > STEPS_AT_MOST:
            self.steps.extend(tokens, self.cache)
        else:
            for token in tokens:
                self.steps.step(token, self.cache)
        self.catch_up_seconds += time.monotonic() - began


def _common_prefix(first: list[int], second: list[int]) -> int:
    # The usual case is that nothing was wrong, and lists are compared faster than a loop could.
    if first == second[: len(first)]:
        return len(first)
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
