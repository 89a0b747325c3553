"""Sampling text: Gumbel noise keyed by (seed, position), so the same seed gives the same text however
it is produced: with or without caches, drafts, retries or other machines.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.composition import block_log_probs, pool
from blocktrain.model.objective import Objective


def gumbel_noise(seed: int, position: int, vocabulary: int) -> Tensor:
    """Standard Gumbel noise of one absolute position, the same on every machine."""
    key = f"blocktrain-gumbel/{seed}/{position}".encode()
    raw = np.frombuffer(hashlib.shake_128(key).digest(8 * vocabulary), dtype="<u8")
    uniform = (raw.astype(np.float64) + 0.5) / 2.0**64
    return torch.from_numpy(-np.log(-np.log(uniform)))


def choose_token(
    log_probs_V: Tensor, *, seed: int, position: int, temperature: float = 1.0, top_p: float = 1.0
) -> int:
    """The sampled token; temperature 0 is the most likely one (the lowest id of equals)."""
    scores = log_probs_V.double().cpu()
    if temperature == 0:
        return int(scores.argmax())
    scores = F.log_softmax(scores / temperature, dim=-1)
    if top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        beyond = ordered.exp().cumsum(-1) - ordered.exp() >= top_p
        scores[order[beyond]] = -math.inf
    return int((scores + gumbel_noise(seed, position, len(scores))).argmax())


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
        if self.seen != visible[: len(self.seen)] or len(self.seen) >= len(visible):
            self.seen, self.caches = [], [block.new_cache() for block in self.blocks]
        fresh = torch.tensor([visible[len(self.seen) :]], device=self.codebook.device)
        log_probs = block_log_probs(self.objective, self.blocks, self.codebook, fresh, self.caches)
        self.seen = visible
        return pool(log_probs, self.weights)[0, -1]


def visible_context(tokens: Sequence[int], context: int) -> Sequence[int]:
    """The tail of the text the model sees. It slides by half a context at a time, so that caches live
    for many tokens and the tail depends on the text's length alone."""
    return tokens[window_start(len(tokens), context) :]


def window_start(length: int, context: int) -> int:
    """Where the visible tail of a text of `length` tokens begins."""
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
    tokens = list(prompt)
    for _ in range(max_tokens):
        log_probs = model.next_log_probs(tokens)
        token = choose_token(log_probs, seed=seed, position=len(tokens), temperature=temperature, top_p=top_p)
        tokens.append(token)
        yield token
