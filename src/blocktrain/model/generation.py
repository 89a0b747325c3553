"""Text from all blocks on one device, token by token: the reference that every engine must agree with.

The same seed gives the same text however it is produced: with or without caches, drafts, retries or other
machines (see `sampling`). `blocktrain generate CHECKPOINT` and the sample in a run's report are written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.composition import block_log_probs, pool
from blocktrain.model.objective import Objective
from blocktrain.model.sampling import EXACT_TOLERANCE, Sampler, choose


class LocalModel:
    """All blocks on one device, composed by consensus, fed token by token through caches."""

    def __init__(
        self, objective: Objective, blocks: Sequence[Block], codebook_VD: Tensor, weights: Sequence[float]
    ) -> None:
        self.objective, self.blocks, self.codebook, self.weights = objective, blocks, codebook_VD, weights
        self.context = objective.model.context
        self.seen: list[int] = []
        self.caches = [block.new_cache() for block in blocks]

    @torch.no_grad()
    def next_log_probs(self, tokens: Sequence[int]) -> Tensor:
        """Log-probs of the token after `tokens`, reusing what the caches already hold."""
        visible = list(visible_context(tokens, self.context))
        # Caches only grow here: another text, or a window that slid, starts over.
        if self.seen != visible[: len(self.seen)] or len(self.seen) >= len(visible):
            self.seen, self.caches = [], [block.new_cache() for block in self.blocks]
        # At least one token is fresh, since a cache as long as the text was dropped above.
        fresh = torch.tensor([visible[len(self.seen) :]], device=self.codebook.device)
        log_probs = block_log_probs(self.objective, self.blocks, self.codebook, fresh, self.caches)
        self.seen = visible
        return pool(log_probs, self.weights)[0, -1]


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
    sampler, tokens = Sampler(seed, temperature, top_p), list(prompt)
    for _ in range(max_tokens):
        row = model.next_log_probs(tokens).double().cpu().numpy()
        tokens.append(choose(row, sampler, len(tokens), EXACT_TOLERANCE).token)
        yield tokens[-1]
