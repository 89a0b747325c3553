"""Batches from shards on disk: (text, seed, shard, step) gives the same windows on every machine.

Shards stay mapped files. The device gets batches only: the next one is gathered in a thread while the present
one trains, in pinned memory where the device is a GPU. A text of one file gives exactly the batches that
`Shards` draws from it in memory, so a worker that fetched plain text and one that has it train alike.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from blocktrain.config import Recipe
from blocktrain.data.corpora import Corpus
from blocktrain.data.dataset import RunText, Windows
from blocktrain.data.shards import Shards, window_offsets
from blocktrain.errors import DataError


class Batches(Protocol):
    def batch(self, shard: int, step: int) -> tuple[Tensor, Tensor]:
        """Context tokens x_BT and the tokens y_BT that follow them."""


def open_batches(recipe: Recipe, text: RunText, device: torch.device) -> Batches:
    """Batches as the recipe wants them: plain text lies on the device as a whole, shards stay on the disk."""
    if isinstance(text, Corpus):
        return Shards.of(recipe, text.train_tokens(), text.sha256, device)
    batch, context = recipe.training.batch, recipe.model.context
    return DatasetBatches(text, seed=recipe.seed, batch=batch, context=context, device=device)


class DatasetBatches:
    def __init__(
        self,
        text: RunText,
        *,
        seed: int,
        batch: int,
        context: int,
        device: torch.device,
        cluster: int | None = None,
    ) -> None:
        self.text, self.seed, self.batch_size, self.context = text, seed, batch, context
        self.device, self.cluster = device, cluster
        self._windows: tuple[int, Windows] | None = None
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[tuple[int, int], Future[Tensor]] | None = None

    def batch(self, shard: int, step: int) -> tuple[Tensor, Tensor]:
        if self._ahead is not None and self._ahead[0] == (shard, step):
            windows = self._ahead[1].result()
        else:
            windows = self._reader.submit(self._gather, shard, step).result()
        # A guess that costs nothing when wrong: a batch does not depend on the batches before it.
        self._ahead = ((shard, step + 1), self._reader.submit(self._gather, shard, step + 1))
        moved = windows.to(self.device, non_blocking=True).long()
        return moved[:, :-1], moved[:, 1:]

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

    def _gather(self, shard: int, step: int) -> Tensor:
        """Windows of context + 1 tokens as int32."""
        if self._windows is None or self._windows[0] != shard:
            found = self.text.shard_windows(self.seed, shard, self.context, self.cluster)
            self._windows = (shard, found)
        windows = self._windows[1]
        if windows.choices < self.batch_size:
            raise DataError(
                f"the files of shard {shard} have {sum(map(len, windows.files))} tokens, fewer than one "
                f"batch needs ({self.batch_size} windows of {self.context + 1}); use more text, a smaller "
                "training.batch or a smaller model.context"
            )
        starts = window_offsets(
            self.text.sha256, self.seed, shard, step, count=self.batch_size, choices=windows.choices
        )
        gathered = torch.from_numpy(windows.cut(starts, self.context + 1)).to(torch.int32)
        return gathered.pin_memory() if self.device.type == "cuda" else gathered
