"""Guessing the next tokens in the gateway's own process, with block 0 and the request's own noise.

The draft is sampled with the noise the real choice will use, so it is accepted wherever block 0 and the
consensus agree on the winner. A wrong draft costs time, never a different text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from blocktrain.model.block import Cache
from blocktrain.model.generation import window_start
from blocktrain.serving.held import HeldBlocks, Work
from blocktrain.serving.sampling import EXACT_TOLERANCE, Sampler, choose, normalised

DRAFT_BLOCK = 0


class Drafter:
    """Drafts for one request; its cache follows the text."""

    def __init__(self, held: HeldBlocks, sampler: Sampler, executor: Executor) -> None:
        self.held, self.sampler, self.executor = held, sampler, executor
        self.seen: list[int] = []
        self.start = 0
        self.caches: dict[int, Cache] = held.new_caches([DRAFT_BLOCK])

    async def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, self._draft, list(tokens), count)

    def _draft(self, tokens: list[int], count: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            drafted.append(self._next(tokens + drafted))
        return drafted

    def _next(self, tokens: list[int]) -> int:
        start = window_start(len(tokens), self.held.context)
        fresh = self._unseen(tokens, start)
        work = Work(fresh, 1, (DRAFT_BLOCK,), self.caches)
        row = normalised(self.held.rows([work])[0][0].astype(np.float64) / self.held.weights[DRAFT_BLOCK])
        return choose(row, self.sampler, len(tokens), EXACT_TOLERANCE).token

    def _unseen(self, tokens: list[int], start: int) -> list[int]:
        """The part of the window the cache lacks; the cache keeps the longest prefix that still holds."""
        window = tokens[start:]
        keep = _common_prefix(self.seen, window) if start == self.start else 0
        keep = min(keep, len(window) - 1)
        for cache in self.caches.values():
            cache.truncate(keep)
        self.seen, self.start = window, start
        return window[keep:]


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))
