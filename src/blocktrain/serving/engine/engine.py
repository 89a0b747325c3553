"""An engine: what the gateway asks for text and scores. The one place where a mode becomes a way to write.

`LocalEngine` runs every block in this process, `RemoteEngine` asks stages over TCP; they differ in where rows
come from and in nothing else. The same request gives the same tokens from both. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

from blocktrain.model.sampling import Row
from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import Refinement
from blocktrain.serving.engine.decoding import RowSource, decode, token_logprob
from blocktrain.serving.engine.draft_length import DraftLength
from blocktrain.serving.engine.drafting import Drafter, Drafting
from blocktrain.serving.engine.lookup import LookupDrafter
from blocktrain.serving.engine.requests import (
    Chunk,
    DeadlineError,
    GenerationRequest,
    GenerationStats,
    ModelInfo,
    RequestError,
    TokenLogprob,
)
from blocktrain.serving.engine.rows import Rows
from blocktrain.serving.engine.sweeping import sweep

SCORING_WINDOWS_AT_ONCE = 4
"""Windows of one text under way: bounds what one request takes of the stages at a time."""


class TextEngine(ABC):
    def __init__(self, model: ModelInfo, batcher: Batcher, draft_blocks: Sequence[int]) -> None:
        self.model, self.batcher = model, batcher
        self.drafting = Drafting(batcher, draft_blocks)

    # ---- where rows come from ----

    @abstractmethod
    def row_source(self, request: GenerationRequest, stats: GenerationStats) -> RowSource:
        """A source for one generation, opened when its first chunk is asked for."""

    @abstractmethod
    async def refine(self, task: Refinement, deadline: float, stats: GenerationStats) -> Row:
        """The last block's log-probs [N, V] of the new tokens, after every block has refined them."""

    @abstractmethod
    async def window_rows(self, ids: Sequence[int], deadline: float, stats: GenerationStats) -> Rows:
        """The rows of what follows each of `ids`."""

    @abstractmethod
    def draft_length(self, request: GenerationRequest) -> DraftLength: ...

    @property
    @abstractmethod
    def ready(self) -> tuple[bool, str]:
        """Whether requests can be answered now, and a sentence that says why not."""

    @abstractmethod
    def check_covered(self) -> None:
        """Raise StagesUnavailableError where a block has never been there."""

    @abstractmethod
    async def start(self) -> None:
        """Be ready to answer."""

    async def close(self) -> None:
        await self.batcher.close()

    # ---- text ----

    def generate(self, request: GenerationRequest) -> Generation:
        """Checks the request (RequestError), then hands back a generation that has not begun."""
        request.check(self.model)
        # Checked now and not at the first chunk, so that the client gets a status and not a broken stream.
        self.check_covered()
        stats, context = GenerationStats(), self.model.context
        sampler = request.sampler(self.model)
        if request.mode == "sweep":
            chunks = sweep(request, sampler, stats, context=context, refine=self.refine)
        else:
            drafter: Drafter | LookupDrafter | None = None
            if request.mode == "verify" and self.drafting.blocks:
                drafter = Drafter(self.drafting, sampler, self.draft_length(request))
            elif request.mode == "verify":
                drafter = LookupDrafter(self.drafting, self.draft_length(request))
            chunks = decode(
                request,
                sampler,
                stats,
                context=context,
                open_source=lambda: self.row_source(request, stats),
                drafter=drafter,
            )
        return Generation(request, stats, chunks)

    async def score(
        self,
        tokens: Sequence[int],
        *,
        top: int = 0,
        deadline_seconds: float = 60.0,
        stats: GenerationStats | None = None,
    ) -> list[TokenLogprob]:
        """The log-prob of every token but the first, in the windows that training evaluation uses; what it
        cost is added to `stats`."""
        vocabulary = self.model.vocabulary
        if not tokens:
            raise RequestError("there is nothing to score; expected at least one token")
        if not all(0 <= token < vocabulary for token in tokens):
            raise RequestError(f"the text holds token ids outside 0..{vocabulary - 1}")
        if not 0 <= top <= vocabulary:
            raise RequestError(f"top log-probs must be between 0 and {vocabulary}, found {top}")
        self.check_covered()
        spent = stats or GenerationStats()
        deadline = asyncio.get_running_loop().time() + deadline_seconds
        gate = asyncio.Semaphore(SCORING_WINDOWS_AT_ONCE)

        async def one(inputs: Sequence[int], targets: Sequence[int]) -> list[TokenLogprob]:
            async with gate:
                spent.scoring_traversals += 1
                rows = await self.window_rows(inputs, deadline, spent)
            each = zip(rows.log_probs, targets, rows.weights, strict=True)
            return [token_logprob(row, target, top, weights) for row, target, weights in each]

        try:
            async with asyncio.timeout(deadline_seconds):
                scored = await asyncio.gather(
                    *(one(*window) for window in windows(tokens, self.model.context))
                )
        except TimeoutError:
            raise DeadlineError(
                f"the deadline of {deadline_seconds:g} s passed while scoring; allow more time"
            ) from None
        return [token for window in scored for token in window]


def windows(tokens: Sequence[int], context: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Inputs and targets of non-overlapping windows; every token but the first is a target once."""
    for start in range(0, len(tokens) - 1, context):
        end = min(start + context, len(tokens) - 1)
        yield tokens[start:end], tokens[start + 1 : end + 1]


class Generation:
    """A generation under way: iterate over it for chunks, all under one deadline; aclose() ends it early and
    frees its caches."""

    def __init__(
        self, request: GenerationRequest, stats: GenerationStats, chunks: AsyncGenerator[Chunk]
    ) -> None:
        self.request, self.stats = request, stats
        self._chunks = chunks
        self._started: float | None = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        now = time.monotonic()
        # The clock starts with the first chunk: a generation may wait for a place before that.
        self._started = self._started or now
        seconds = self.request.deadline_seconds
        try:
            async with asyncio.timeout(self._started + seconds - now):
                # One deadline for the whole text; what a slow reader takes between chunks counts too.
                return await anext(self._chunks)
        except TimeoutError:
            await self.aclose()
            raise DeadlineError(
                f"the deadline of {seconds:g} s passed after {self.stats.tokens} of "
                f"{self.request.max_tokens} tokens; ask for fewer tokens or allow more time"
            ) from None
        except BaseException:
            await self.aclose()
            raise
        finally:
            self.stats.seconds = time.monotonic() - self._started

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._chunks.aclose()
