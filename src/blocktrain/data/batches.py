"""Batches from shards on disk: (text, seed, shard, step, block) gives the same windows on every machine.

Shards stay mapped files. The device gets batches only: the next one is gathered in a thread while the present
one trains, in pinned memory where the device is a GPU. A text of one file gives exactly the batches that
`Shards` draws from it in memory, so a worker that fetched plain text and one that has it train alike.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blocktrain.config import Recipe
from blocktrain.data.corpora import Corpus
from blocktrain.data.dataset import Manifest, RunText, TokenArray, Windows, own_cluster, shard_files
from blocktrain.data.shards import Shards, window_offsets
from blocktrain.data.tokenizer import Tokens
from blocktrain.errors import DataError
from blocktrain.ids import CorpusHash

TURN_TOKENS = 1 << 23
"""Tokens that a shard draws before it moves on to two other files: as many as two files usually have, so
that text repeats no sooner than it must, and a worker fetches a file about as often as it has read one."""


class Batches(Protocol):
    def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
        """Context tokens x_BT and the tokens y_BT that follow them; `block` None is the reference."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How batches are drawn from a dataset."""

    seed: int
    batch: int
    context: int
    steps_per_round: int = 1
    num_blocks: int = 1
    own_share: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe) -> Drawing:
        return cls(
            seed=recipe.seed,
            batch=recipe.training.batch,
            context=recipe.model.context,
            steps_per_round=recipe.swarm.steps_per_round,
            num_blocks=recipe.model.blocks,
            own_share=recipe.data.own_share,
        )

    def turn(self, step: int) -> int:
        """How often a shard has moved on to other files by this step; the same in a whole round, so that an
        assignment needs the files of one turn."""
        first = step - step % self.steps_per_round
        return first // max(1, TURN_TOKENS // (self.batch * self.context))

    def files(
        self, manifest: Manifest, shard: int, step: int, block: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Training files of all text, and of the block's own cluster where it has one."""
        chosen = partial(shard_files, manifest, self.seed, shard, context=self.context, turn=self.turn(step))
        cluster = own_cluster(manifest, self.num_blocks, self.own_share, block)
        if cluster is None:
            return chosen(), ()
        # One of each cluster, where two by chance could be of one and the same: blocks forgot the others.
        shared = [file for one in range(manifest.clusters) for file in chosen(cluster=one, spread=1)]
        return tuple(shared), chosen(cluster=cluster)

    def windows(self, text: RunText, shard: int, step: int, block: int | None) -> BatchWindows:
        shared, own = self.files(text.manifest, shard, step, block)

        def opened(files: Sequence[int]) -> list[TokenArray]:
            found = [text.tokens(text.manifest.training[index]) for index in files]
            # Windows lie anywhere: reading ahead of one fetches what is not wanted (500 windows of a file
            # that was not in memory: 0.59 s of processor with it, 0.01 s without).
            for tokens in found:
                if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
                    tokens.base.madvise(mmap.MADV_RANDOM)
            return found

        return BatchWindows(self, text.sha256, shard, opened(shared), opened(own))


class BatchWindows(Windows):
    """The windows of one shard in one turn: those of all text, and behind them those of the own cluster."""

    def __init__(
        self,
        drawing: Drawing,
        corpus: CorpusHash,
        shard: int,
        shared: Sequence[TokenArray],
        own: Sequence[TokenArray],
    ) -> None:
        super().__init__([*shared, *own], drawing.context)
        self.drawing, self.corpus, self.shard = drawing, corpus, shard
        self.num_shared = Windows(shared, drawing.context).choices
        smallest = min(self.num_shared, self.choices - self.num_shared) if own else self.num_shared
        if smallest < drawing.batch:
            raise DataError(
                f"the files of shard {shard} have {sum(map(len, self.files))} tokens, fewer than one "
                f"batch needs ({drawing.batch} windows of {drawing.context + 1}); use more text, a smaller "
                "training.batch or a smaller model.context"
            )

    def starts(self, step: int) -> Tokens:
        """Where the windows of a step's batch begin."""
        count = self.drawing.batch
        key = (self.corpus, self.drawing.seed, self.shard, step)
        starts = window_offsets(*key, count=count, choices=self.num_shared)
        num_own = self.choices - self.num_shared
        if not num_own:
            return starts
        own = self.num_shared + window_offsets(*key, count=count, choices=num_own)
        # Spread over the batch: its first rows are the ones with hints, and these should be of all kinds too.
        upto = np.floor(np.arange(count + 1) * self.drawing.own_share)
        return np.where(np.diff(upto) > 0, own, starts)

    def anywhere(self, generator: np.random.Generator, count: int) -> Tokens:
        """Starts at random, as many from the own cluster as in a batch."""
        starts = generator.integers(0, self.num_shared, count)
        if self.choices == self.num_shared:
            return starts
        own = generator.integers(self.num_shared, self.choices, count)
        return np.where(generator.random(count) < self.drawing.own_share, own, starts)


def open_batches(recipe: Recipe, text: RunText, device: torch.device) -> Batches:
    """Batches as the recipe wants them: plain text lies on the device as a whole, shards stay on the disk."""
    own_cluster(text.manifest, recipe.model.blocks, recipe.data.own_share, None)
    if isinstance(text, Corpus):
        return Shards.of(recipe, text.train_tokens(), text.sha256, device)
    return DatasetBatches(text, Drawing.of(recipe), device)


class DatasetBatches:
    def __init__(self, text: RunText, drawing: Drawing, device: torch.device) -> None:
        self.text, self.drawing, self.device = text, drawing, device
        self._windows: tuple[tuple[int, int, int | None], BatchWindows] | None = None
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[tuple[int, int, int | None], Future[Tensor]] | None = None

    def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
        if self._ahead is not None and self._ahead[0] == (shard, step, block):
            windows = self._ahead[1].result()
        else:
            windows = self._reader.submit(self._gather, shard, step, block).result()
        # A guess that costs nothing when wrong: a batch does not depend on the batches before it. Not beyond
        # the turn: the files of the next may have to be fetched first.
        if self.drawing.turn(step + 1) == self.drawing.turn(step):
            self._ahead = (shard, step + 1, block), self._reader.submit(self._gather, shard, step + 1, block)
        moved = windows.to(self.device, non_blocking=True).long()
        return moved[:, :-1], moved[:, 1:]

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _gather(self, shard: int, step: int, block: int | None) -> Tensor:
        """Windows of context + 1 tokens as int32."""
        place = shard, self.drawing.turn(step), block
        if self._windows is None or self._windows[0] != place:
            self._windows = place, self.drawing.windows(self.text, shard, step, block)
        windows = self._windows[1]
        gathered = torch.from_numpy(windows.cut(windows.starts(step), self.drawing.context + 1))
        return gathered.pin_memory() if self.device.type == "cuda" else gathered
