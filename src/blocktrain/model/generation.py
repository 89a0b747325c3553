"""Text from all blocks on one device, token by token: the reference that every engine must agree with.

The same seed gives the same text however it is produced: with or without caches, drafts, retries or other
machines (see `sampling`). `blocktrain generate CHECKPOINT` and the sample in a run's report are written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.composition import block_log_probs
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import Pooling, TrackRecord, pool
from blocktrain.model.sampling import EXACT_TOLERANCE, Sampler, choose, normalised


class LocalModel:
    """All blocks on one device, composed by consensus, fed token by token through caches."""

    def __init__(
        self, objective: Objective, blocks: Sequence[Block], codebook_VD: Tensor, pooling: Pooling
    ) -> None:
        self.objective, self.blocks, self.codebook, self.pooling = objective, blocks, codebook_VD, pooling
        self.context = objective.model.context
        self._start_over()

    def _start_over(self) -> None:
        self.seen: list[int] = []
        self.caches = [block.new_cache() for block in self.blocks]
        self.records = [TrackRecord(self.pooling.decays) for _ in self.blocks]

    @torch.no_grad()
    def next_log_probs(self, tokens: Sequence[int]) -> Tensor:
        """Log-probs of the token after `tokens`, reusing what the caches already hold."""
        visible = list(visible_context(tokens, self.context))
        # Caches only grow here: another text, or a window that slid, starts over.
        if self.seen != visible[: len(self.seen)] or len(self.seen) >= len(visible):
            self._start_over()
        # At least one token is fresh, since a cache as long as the text was dropped above.
        base, fresh = len(self.seen), visible[len(self.seen) :]
        fresh_1T = torch.tensor([fresh], device=self.codebook.device)
        log_probs = block_log_probs(self.objective, self.blocks, self.codebook, fresh_1T, self.caches)
        self.seen = visible
        rows = [part[0, -1] for part in log_probs]
        # The records of how well each block did cost a pass over all rows; equal blocks need none.
        if not self.pooling.follows_text:
            return pool(rows, self.pooling.weights)
        logs = [
            self.pooling.log_weights(index, record.extend(base, fresh, part[0], keep=1))[-1]
            for index, (record, part) in enumerate(zip(self.records, log_probs, strict=True))
        ]
        return pool(rows, np.exp(normalised(np.array(logs))).tolist())


def visible_context(tokens: Sequence[int], context: int) -> Sequence[int]:
    """The tail of the text the model sees."""
    return tokens[window_start(len(tokens), context) :]


def window_start(length: int, context: int) -> int:
    """Where the visible tail of a text of `length` tokens begins.

    It slides by half a context at a time, so that caches live for many tokens, and depends on the length
    alone, so that every engine sees the same tail.
    """
    # Sliding by one would move every position and so drop the caches at every token; by half it happens once
    # in context / 2 tokens, and the model still sees at least half its context.
    half = max(1, context // 2)
    return max(0, -(-(length - context) // half) * half)


def shared_length(first: list[int], second: list[int]) -> int:
    """How many tokens two texts have in common from their start."""
    # The usual case is that one begins with the other, and lists are compared faster than a loop could.
    if first == second[: len(first)]:
        return len(first)
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def generate(
    model: LocalModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    seed: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Yields tokens after the prompt, one at a time."""
    sampler, tokens = Sampler(seed=seed, temperature=temperature, top_p=top_p), list(prompt)
    for _ in range(max_tokens):
        # In float64, as engines choose: a near tie must fall the same way for all of them.
        row = model.next_log_probs(tokens).double().cpu().numpy()
        tokens.append(choose(row, sampler, len(tokens), EXACT_TOLERANCE).token)
        yield tokens[-1]
