"""Batches from shards on disk: (dataset, seed, shard, step) gives the same windows on every machine.

Shards stay mapped files. The device gets batches only: the next one is gathered in a thread while the present
one trains, in pinned memory where the device is a GPU. Batches have the form of `shards.Shards`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from blocktrain.data.dataset import Dataset, TokenArray, shard_files
from blocktrain.data.shards import window_offsets
from blocktrain.errors import DataError


class DatasetBatches:
    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        batch: int,
        context: int,
        device: torch.device,
        spread: int = 2,
        cluster: int | None = None,
    ) -> None:
        self.dataset, self.seed, self.batch_size, self.context = dataset, seed, batch, context
        self.device, self.spread, self.cluster = device, spread, cluster
        self.identity = dataset.manifest.identity
        self._mapped: tuple[int, list[TokenArray]] | None = None
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[tuple[int, int], Future[Tensor]] | None = None

    def files(self, shard: int) -> tuple[int, ...]:
        """Numbers of the training files this shard draws from."""
        return shard_files(
            self.dataset.manifest,
            self.seed,
            shard,
            context=self.context,
            spread=self.spread,
            cluster=self.cluster,
        )

    def batch(self, shard: int, step: int) -> tuple[Tensor, Tensor]:
        """Context tokens x_BT and the tokens y_BT that follow them."""
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
        """Windows of context + 1 tokens as int32, each inside one file; every start is equally likely."""
        if self._mapped is None or self._mapped[0] != shard:
            entries = [self.dataset.manifest.training[index] for index in self.files(shard)]
            self._mapped = (shard, [self.dataset.tokens(entry) for entry in entries])
        mapped = self._mapped[1]
        ends = np.cumsum([len(tokens) - self.context for tokens in mapped])
        if ends[-1] < self.batch_size:
            raise DataError(
                f"the files of shard {shard} have {sum(map(len, mapped))} tokens, fewer than one batch needs "
                f"({self.batch_size} windows of {self.context + 1}); use more text, a smaller training.batch "
                "or a smaller model.context"
            )
        starts = window_offsets(
            self.identity, self.seed, shard, step, count=self.batch_size, choices=int(ends[-1])
        )
        windows = torch.empty(
            (self.batch_size, self.context + 1), dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        rows = windows.numpy()
        for row, file, start in zip(rows, np.searchsorted(ends, starts, "right"), starts, strict=True):
            first = int(start) - (int(ends[file - 1]) if file else 0)
            row[:] = mapped[file][first : first + self.context + 1]
        return windows
