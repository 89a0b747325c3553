"""Mode `sweep`: a whole stretch of text in one traversal, block after block.

All new positions start from noise keyed by the seed; every block refines them in turn (model/sweep.py). The
state between blocks is one row over the vocabulary for each new token, whatever the width of the model. Every
block is needed: there is no answer without one of them. Lossy by design, so near ties are not settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import numpy as np

from blocktrain.model.sampling import FLOAT32_TOLERANCE, Row, Sampler, choose, normalised
from blocktrain.serving.blocks import Refinement
from blocktrain.serving.engine.decoding import token_logprob
from blocktrain.serving.engine.requests import Chunk, GenerationRequest, GenerationStats

NO_WEIGHTS = np.empty(0)
SWEEP_TOKENS = 256
"""New tokens of one traversal at most, and never more than half the context."""


async def sweep(
    request: GenerationRequest,
    sampler: Sampler,
    stats: GenerationStats,
    *,
    context: int,
    refine: Callable[[Refinement, float, GenerationStats], Awaitable[Row]],
) -> AsyncGenerator[Chunk]:
    """A chunk for each stretch of new tokens, which is one traversal."""
    tokens = list(request.prompt)
    end = len(tokens) + request.max_tokens
    deadline = asyncio.get_running_loop().time() + request.deadline_seconds
    while len(tokens) < end:
        first = len(tokens)
        count = min(end - first, SWEEP_TOKENS, max(1, context // 2))
        task = Refinement(
            # The last known token shares its position with the first new one: it predicts it.
            known=tokens[-(context - count + 1) :],
            num_new=count,
            seed=request.seed,
            position=first,
            passes=request.passes,
        )
        rows = normalised(await refine(task, deadline, stats))
        stats.traversals += 1
        stats.tokens += count
        tokens += [choose(row, sampler, first + i, FLOAT32_TOLERANCE).token for i, row in enumerate(rows)]
        logprobs, top = None, request.logprobs
        if top is not None:
            logprobs = [token_logprob(row, tokens[first + i], top, NO_WEIGHTS) for i, row in enumerate(rows)]
        yield Chunk(tokens[first:], logprobs)
