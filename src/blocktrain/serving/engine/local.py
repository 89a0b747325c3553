"""The whole model in this process: the engine that every other one must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from blocktrain.model.generation import window_start
from blocktrain.model.sampling import Row
from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import HeldBlocks, Refinement, RowWork
from blocktrain.serving.engine.draft_length import DraftLength
from blocktrain.serving.engine.drafting import blocks_for_drafts
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.requests import GenerationRequest, GenerationStats
from blocktrain.serving.engine.rows import Part, Rows, Traversal, pooled
from blocktrain.serving.fingerprint import fingerprint, model_info
from blocktrain.training.checkpoint import load_checkpoint

LOCAL_DRAFT_TOKENS = 8
"""Without a network a draft only pays by sharing a forward pass."""


class LocalEngine(TextEngine):
    def __init__(self, checkpoint_path: Path, device: torch.device | None = None) -> None:
        checkpoint = load_checkpoint(checkpoint_path, device or torch.device("cpu"))
        self.blocks = tuple(range(len(checkpoint.blocks)))
        info = model_info(checkpoint_path, checkpoint, fingerprint(checkpoint_path, checkpoint))
        draft_blocks = blocks_for_drafts(checkpoint.objective, 1)
        super().__init__(info, Batcher(HeldBlocks(checkpoint, self.blocks)), draft_blocks)

    @property
    def ready(self) -> tuple[bool, str]:
        return True, "ready"

    def check_covered(self) -> None:
        """Every block is here."""

    async def start(self) -> None:
        """Nothing to connect to."""

    def draft_length(self, request: GenerationRequest) -> DraftLength:
        return DraftLength(LOCAL_DRAFT_TOKENS if request.draft_tokens is None else request.draft_tokens)

    def row_source(self, request: GenerationRequest, stats: GenerationStats) -> LocalRows:
        return LocalRows(self.batcher, self.blocks)

    async def refine(self, task: Refinement, deadline: float, stats: GenerationStats) -> Row:
        rows = await self.batcher.call(lambda: self.batcher.held.refine(task, self.blocks, None))
        return rows.astype(np.float64)

    async def window_rows(self, ids: Sequence[int], deadline: float, stats: GenerationStats) -> Rows:
        caches = self.batcher.held.new_caches(self.blocks)
        return await local_rows(self.batcher, RowWork(ids, len(ids), self.blocks, caches))


async def local_rows(batcher: Batcher, work: RowWork) -> Rows:
    said = await batcher.submit(work)
    return pooled([Part(work.blocks, said, np.zeros(said.rows.shape))], batcher.held.pooling)


class LocalRows:
    """Rows from caches that follow one generation's text."""

    def __init__(self, batcher: Batcher, blocks: tuple[int, ...]) -> None:
        self._batcher, self._blocks = batcher, blocks
        self._context = batcher.held.context
        self._caches = batcher.held.new_caches(blocks)
        self._start = self._cached = 0
        # Without a network nothing is gained by asking ahead.
        self.most_flights = 1
        # There is one cache of each block, and a wrong draft would have it read the window before again.
        self.slides = False

    async def rows(self, traversal: Traversal) -> Rows:
        tokens, num_rows = traversal.tokens, traversal.num_rows
        start = window_start(len(tokens) - num_rows + 1, self._context)
        if start != self._start:
            self._start, self._cached = start, 0
        window = tokens[start:]
        # The token before the first row runs again if it must: every row needs its own position in the pass.
        base = min(self._cached, len(window) - num_rows)
        work = RowWork(window[base:], num_rows, self._blocks, self._caches, base)
        rows = await local_rows(self._batcher, work)
        # All but the drafts are certain to stay; a wrong draft is cut off by the next truncate.
        self._cached = len(window) - num_rows + 1
        return rows

    async def exact(self, tokens: Sequence[int]) -> Row:
        window = tokens[window_start(len(tokens), self._context) :]
        caches = self._batcher.held.new_caches(self._blocks)
        rows = await local_rows(self._batcher, RowWork(window, 1, self._blocks, caches, exact=True))
        row: Row = rows.log_probs[0]
        return row

    async def close(self) -> None:
        self._caches = {}
