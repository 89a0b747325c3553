"""The whole model in this process: the engine that every other one must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from blocktrain.model.block import Cache
from blocktrain.model.generation import window_start
from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import HeldBlocks, Work
from blocktrain.serving.engine.api import GenerationRequest, GenerationStats, ModelInfo, TokenLogprob
from blocktrain.serving.engine.decoding import DecodedGeneration, Decoder, Rows
from blocktrain.serving.engine.draft_length import FixedLength
from blocktrain.serving.engine.drafting import Drafter
from blocktrain.serving.engine.fingerprint import fingerprint, model_info
from blocktrain.serving.engine.sampling import FLOAT32_TOLERANCE, Row, Sampler, normalised
from blocktrain.serving.engine.scoring import check_scorable, scored_window, under_deadline, windows
from blocktrain.serving.engine.sweeping import LocalRefiner, SweepWriter
from blocktrain.training.checkpoint import load_checkpoint

LOCAL_DRAFT_TOKENS = 8
"""Without a network a draft only pays by sharing a forward pass."""


class LocalEngine:
    def __init__(self, checkpoint_path: Path, device: torch.device | None = None) -> None:
        self._checkpoint = load_checkpoint(checkpoint_path, device or torch.device("cpu"))
        self._blocks = tuple(range(len(self._checkpoint.blocks)))
        shape = fingerprint(checkpoint_path, self._checkpoint)
        self._model = model_info(self._checkpoint, shape)
        self._held = HeldBlocks(self._checkpoint, self._blocks)
        self._batcher: Batcher | None = None

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def ready(self) -> tuple[bool, str]:
        return (True, "ready") if self._batcher is not None else (False, "the engine has not been started")

    async def start(self) -> None:
        self._batcher = Batcher(self._held)
        self._batcher.start()

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
            self._batcher = None

    def generate(self, request: GenerationRequest) -> DecodedGeneration:
        request.check(self._model)
        if request.mode == "sweep":
            return DecodedGeneration(
                SweepWriter(
                    request,
                    context=self._model.context,
                    refiner=LocalRefiner(self._running),
                    stats=GenerationStats(),
                )
            )
        sampler = Sampler(request.seed, request.temperature, request.top_p)
        length = FixedLength(LOCAL_DRAFT_TOKENS if request.draft_tokens is None else request.draft_tokens)
        verify = request.mode == "verify"
        decoder = Decoder(
            request,
            context=self._model.context,
            scorer=_LocalScorer(self._running, self._blocks),
            drafter=Drafter(self._running, sampler, length) if verify else None,
            stats=GenerationStats(),
        )
        return DecodedGeneration(decoder)

    @property
    def _running(self) -> Batcher:
        assert self._batcher is not None, "start the engine first"
        return self._batcher

    async def score(
        self,
        tokens: Sequence[int],
        *,
        top: int = 0,
        deadline_seconds: float = 60.0,
        stats: GenerationStats | None = None,
    ) -> list[TokenLogprob]:
        check_scorable(tokens, self._model.vocabulary, top)
        work = self._score(list(tokens), top, stats or GenerationStats())
        return await under_deadline(work, deadline_seconds, "scoring")

    async def _score(self, tokens: list[int], top: int, stats: GenerationStats) -> list[TokenLogprob]:
        scored: list[TokenLogprob] = []
        for inputs, targets in windows(tokens, self._model.context):
            work = Work(inputs, len(inputs), self._blocks, self._held.new_caches(self._blocks))
            outcome = await self._running.rows(work)
            stats.scoring_traversals += 1
            scored += scored_window(normalised(outcome.rows.astype(np.float64)), targets, top)
        return scored


class _LocalScorer:
    """Rows from caches that follow one generation's text."""

    def __init__(self, batcher: Batcher, blocks: tuple[int, ...]) -> None:
        self._batcher, self._blocks = batcher, blocks
        self._context = batcher.held.context
        self._caches: dict[int, Cache] = batcher.held.new_caches(blocks)
        self._start = self._cached = 0

    async def rows(self, tokens: Sequence[int], num_rows: int) -> Rows:
        start = window_start(len(tokens) - num_rows + 1, self._context)
        if start != self._start:
            self._start, self._cached = start, 0
        window = tokens[start:]
        base = min(self._cached, len(window) - num_rows)
        outcome = await self._batcher.rows(Work(window[base:], num_rows, self._blocks, self._caches, base))
        # All but the drafts are certain to stay; a wrong draft is cut off by the next truncate.
        self._cached = len(window) - num_rows + 1
        log_probs = normalised(outcome.rows.astype(np.float64))
        return Rows(log_probs, np.full_like(log_probs, FLOAT32_TOLERANCE))

    async def exact(self, tokens: Sequence[int]) -> Row:
        window = list(tokens[window_start(len(tokens), self._context) :])
        outcome = await self._batcher.exact_row(window, self._blocks, float("inf"))
        return normalised(outcome.rows[0])

    async def close(self) -> None:
        self._caches = {}
