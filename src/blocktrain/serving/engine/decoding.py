"""Modes `ar` and `verify`: draft, score in one traversal, accept while the sampler agrees.

Knows a source of rows (consensus log-probs for a text) and a drafter (guesses); nothing of where the blocks
are. `ar` is `verify` without a drafter.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import numpy as np

from blocktrain.model.generation import window_start
from blocktrain.model.sampling import EXACT_TOLERANCE, Row, Sampler, choose
from blocktrain.serving.engine.drafting import Drafter
from blocktrain.serving.engine.lookup import LookupDrafter
from blocktrain.serving.engine.requests import Chunk, GenerationRequest, GenerationStats, TokenLogprob
from blocktrain.serving.engine.rows import BestRows, Rows


class RowSource(Protocol):
    """What one generation asks of the blocks."""

    async def rows(self, tokens: Sequence[int], num_rows: int) -> Rows | BestRows:
        """Log-probs of what follows each of the last `num_rows` prefixes of `tokens`, in one traversal."""

    async def whole_rows(self) -> Rows:
        """Those of the last traversal again, now over the whole vocabulary."""

    async def exact(self, tokens: Sequence[int]) -> Row:
        """Log-probs of what follows `tokens`, computed in float64."""

    async def close(self) -> None:
        """Free what is held for this generation."""


async def decode(
    request: GenerationRequest,
    sampler: Sampler,
    stats: GenerationStats,
    *,
    context: int,
    open_source: Callable[[], RowSource],
    drafter: Drafter | LookupDrafter | None,
) -> AsyncGenerator[Chunk]:
    """A chunk for each traversal. Frees the source at the end, also when the consumer closes or forgets
    it."""
    tokens = list(request.prompt)
    end = len(tokens) + request.max_tokens
    async with AsyncExitStack() as held:
        source = open_source()
        held.push_async_callback(source.close)
        if drafter is not None:
            held.enter_context(drafter)
        while len(tokens) < end:
            began = time.monotonic()
            draft: list[int] = []
            if drafter is not None:
                # Never past the point where the visible context slides: a traversal has one window.
                room = window_start(len(tokens), context) + context - len(tokens)
                draft = await drafter.draft(tokens, max(0, min(room, end - len(tokens) - 1)))
            drafted = time.monotonic()
            rows = await source.rows(tokens + draft, len(draft) + 1)
            scored = time.monotonic()
            stats.traversals += 1

            # Row i is what follows the text and i drafted tokens, so it is valid only while all of them were
            # chosen; the first row that disagrees with the draft still gives a token, so each traversal does.
            written: list[int] = []
            logprobs: list[TokenLogprob] = []
            for i in range(len(draft) + 1):
                choice = rows.choose(i, sampler, tokens)
                if not choice.settled and not isinstance(rows, Rows):
                    # A token that not all stages sent may be better.
                    rows = await source.whole_rows()
                    stats.traversals += 1
                    stats.second_questions += 1
                    choice = rows.choose(i, sampler, tokens)
                if not choice.settled:
                    # A near tie, about once in 2,000 tokens with Q16 rows: one more round trip decides it.
                    exact = await source.exact(tokens)
                    stats.traversals += 1
                    stats.exact_passes += 1
                    choice = choose(exact, sampler, len(tokens), EXACT_TOLERANCE, tokens)
                tokens.append(choice.token)
                written.append(choice.token)
                if request.logprobs is not None:
                    assert isinstance(rows, Rows), "log-probs are asked for over the whole vocabulary"
                    row, weights = rows.log_probs[i], rows.weights[i]
                    logprobs.append(token_logprob(row, choice.token, request.logprobs, weights))
                if i < len(draft) and choice.token != draft[i]:
                    break

            accepted = len(written) - 1
            stats.drafted += len(draft)
            stats.accepted += accepted
            stats.tokens += len(written)
            if drafter is not None:
                weights = rows.weights[accepted]
                drafter.observe(accepted, drafted - began, scored - drafted, weights)
            yield Chunk(written, logprobs if request.logprobs is not None else None)


def token_logprob(row: Row, token: int, top: int, weights: Row) -> TokenLogprob:
    best = np.argsort(-row, kind="stable")[:top]
    tops = [(int(t), float(row[t])) for t in best]
    return TokenLogprob(token, float(row[token]), tops, [float(weight) for weight in weights])
