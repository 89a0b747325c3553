"""The decoding loop shared by every engine: draft, score in one traversal, accept while the sampler agrees.

Knows a scorer (rows of consensus log-probs for a text) and a drafter (guesses); nothing of where the
blocks are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.generation import window_start
from blocktrain.serving.engine.api import (
    Chunk,
    DeadlineError,
    GenerationRequest,
    GenerationStats,
    TokenLogprob,
)
from blocktrain.serving.engine.sampling import EXACT_TOLERANCE, Row, Sampler, choose


@dataclass(frozen=True)
class Rows:
    """Normalised consensus log-probs [R, V], and how far each may be from its exact value [R, V]."""

    log_probs: NDArray[np.float64]
    tolerance: NDArray[np.float64]


class Scorer(Protocol):
    """What one generation asks of the blocks."""

    async def rows(self, tokens: Sequence[int], num_rows: int) -> Rows:
        """Log-probs of what follows each of the last `num_rows` prefixes of `tokens`, in one traversal."""

    async def exact(self, tokens: Sequence[int]) -> Row:
        """Log-probs of what follows `tokens`, computed in float64."""

    async def close(self) -> None:
        """Free what the scorer holds for this generation."""


class Draft(Protocol):
    """What guesses the next tokens; `drafting.Drafter`."""

    async def draft(self, tokens: Sequence[int], most: int) -> list[int]: ...

    def observe(self, accepted: int, draft_seconds: float, traversal_seconds: float) -> None: ...


class Writer(Protocol):
    """What a generation is made by: `Decoder`, or `sweeping.SweepWriter`."""

    request: GenerationRequest
    stats: GenerationStats

    def chunks(self) -> AsyncGenerator[Chunk]: ...


class Decoder:
    """One generation: its text so far and the pieces it is made with."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        context: int,
        scorer: Scorer,
        drafter: Draft | None,
        stats: GenerationStats,
    ) -> None:
        self.request, self.context, self.stats = request, context, stats
        self.scorer, self.drafter = scorer, drafter
        self.sampler = Sampler(request.seed, request.temperature, request.top_p)
        self.tokens = list(request.prompt)

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Frees the scorer's caches at the end, also when the consumer closes or forgets the generator."""
        end = len(self.request.prompt) + self.request.max_tokens
        try:
            while len(self.tokens) < end:
                chunk = await self._traverse(end - len(self.tokens))
                self.stats.tokens += len(chunk.tokens)
                yield chunk
        finally:
            await self.scorer.close()

    async def _traverse(self, remaining: int) -> Chunk:
        began = time.monotonic()
        draft = await self._draft(remaining - 1)
        drafted = time.monotonic()
        rows = await self.scorer.rows(self.tokens + draft, len(draft) + 1)
        scored = time.monotonic()
        self.stats.traversals += 1
        chunk = await self._accept(draft, rows)
        accepted = len(chunk.tokens) - 1
        self.stats.drafted += len(draft)
        self.stats.accepted += accepted
        if self.drafter is not None:
            self.drafter.observe(accepted, drafted - began, scored - drafted)
        return chunk

    async def _draft(self, most: int) -> list[int]:
        """Never past the point where the visible context slides: a traversal has one window."""
        length = len(self.tokens)
        room = window_start(length, self.context) + self.context - length
        if self.drafter is None:
            return []
        return await self.drafter.draft(self.tokens, max(0, min(room, most)))

    async def _accept(self, draft: list[int], rows: Rows) -> Chunk:
        accepted: list[int] = []
        logprobs: list[TokenLogprob] = []
        for i, row in enumerate(rows.log_probs):
            token = await self._choose(row, rows.tolerance[i])
            self.tokens.append(token)
            accepted.append(token)
            if self.request.logprobs is not None:
                logprobs.append(token_logprob(row, token, self.request.logprobs))
            if i < len(draft) and token != draft[i]:
                break
        return Chunk(accepted, logprobs if self.request.logprobs is not None else None)

    async def _choose(self, row: Row, tolerance: Row) -> int:
        position = len(self.tokens)
        choice = choose(row, self.sampler, position, tolerance)
        if choice.settled:
            return choice.token
        exact = await self.scorer.exact(self.tokens)
        self.stats.traversals += 1
        self.stats.exact_passes += 1
        return choose(exact, self.sampler, position, EXACT_TOLERANCE).token


def token_logprob(row: Row, token: int, top: int) -> TokenLogprob:
    best = np.argsort(-row, kind="stable")[:top]
    return TokenLogprob(token, float(row[token]), [(int(t), float(row[t])) for t in best])


class DecodedGeneration:
    """The handle a caller iterates over: chunks under one deadline, caches freed at the end."""

    def __init__(self, decoder: Writer) -> None:
        self._decoder = decoder
        self._iterator = decoder.chunks()
        self._started: float | None = None
        self._closed = False

    @property
    def stats(self) -> GenerationStats:
        return self._decoder.stats

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        now = time.monotonic()
        self._started = self._started or now
        seconds = self._decoder.request.deadline_seconds
        try:
            async with asyncio.timeout(self._started + seconds - now):
                return await anext(self._iterator)
        except TimeoutError:
            await self.aclose()
            raise DeadlineError(
                f"the deadline of {seconds:g} s passed after {self.stats.tokens} of "
                f"{self._decoder.request.max_tokens} tokens; ask for fewer tokens or allow more time"
            ) from None
        except BaseException:
            await self.aclose()
            raise
        finally:
            self.stats.seconds = time.monotonic() - self._started

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._iterator.aclose()
