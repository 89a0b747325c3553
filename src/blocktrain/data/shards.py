"""Deterministic batches: (corpus hash, seed, shard, step) gives the same windows on every machine.

Offsets come from SHAKE-128, whose output never changes, and not from a library's random generator,
whose stream may change between versions. Windows lie inside the text given, so a batch drawn from
the training part cannot contain a held-out byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.config import Recipe
from blocktrain.data.tokenizer import Tokens
from blocktrain.errors import DataError
from blocktrain.ids import CorpusHash


def window_offsets(
    corpus: CorpusHash, seed: int, shard: int, step: int, *, count: int, choices: int
) -> NDArray[np.int64]:
    """`count` window starts in [0, choices), uniform to within choices / 2^64."""
    key = f"blocktrain-batch/{corpus}/{seed}/{shard}/{step}".encode()
    # 64 bits for each start: the remainder favours low offsets by less than one in 10^12 for 10 MB of text.
    raw = np.frombuffer(hashlib.shake_128(key).digest(8 * count), dtype="<u8")
    return (raw % np.uint64(choices)).astype(np.int64)


class Shards:
    """Training windows of one tokenised text, kept on the training device."""

    def __init__(
        self, tokens: Tokens, corpus: CorpusHash, *, seed: int, batch: int, context: int, device: torch.device
    ) -> None:
        self.choices = len(tokens) - context
        if self.choices < batch:
            raise DataError(
                f"the training text has {len(tokens)} tokens, fewer than one batch needs "
                f"({batch} windows of {context + 1}); use more text, a smaller training.batch or a "
                "smaller model.context"
            )
        self.corpus, self.seed, self.batch_size = corpus, seed, batch
        # int32 on the device, half of int64; a batch becomes int64 when it is cut.
        self.tokens = torch.from_numpy(tokens).to(device=device, dtype=torch.int32)
        self.reach = torch.arange(context + 1, device=device)

    @classmethod
    def of(cls, recipe: Recipe, tokens: Tokens, corpus: CorpusHash, device: torch.device) -> Shards:
        """Batches as the recipe wants them."""
        batch, context = recipe.training.batch, recipe.model.context
        return cls(tokens, corpus, seed=recipe.seed, batch=batch, context=context, device=device)

    def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
        """Context tokens x_BT and the tokens y_BT that follow them; the same for every block."""
        starts = window_offsets(
            self.corpus, self.seed, shard, step, count=self.batch_size, choices=self.choices
        )
        offsets = torch.from_numpy(starts).to(self.tokens.device, non_blocking=True)
        windows = self.tokens[offsets[:, None] + self.reach].long()
        return windows[:, :-1], windows[:, 1:]


def scoring_windows(tokens: Tokens, *, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Non-overlapping windows in which every token but the first is a target exactly once.

    Yields x_BT, y_BT and a mask_BT that is false where the last window is padded.
    """
    if len(tokens) < 2:
        raise DataError("scoring needs at least two tokens of text")
    targets = len(tokens) - 1
    windows = -(-targets // context)
    padded = np.zeros(windows * context + 1, dtype=np.int64)
    padded[: len(tokens)] = tokens
    x = torch.from_numpy(padded[:-1].reshape(windows, context))
    y = torch.from_numpy(padded[1:].reshape(windows, context))
    mask = torch.arange(windows * context).reshape(windows, context) < targets
    for start in range(0, windows, batch):
        end = start + batch
        yield x[start:end], y[start:end], mask[start:end]
