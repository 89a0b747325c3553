"""The whole model in this process: the engine that every other one must agree with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from blocktrain.model.block import Cache
from blocktrain.model.generation import window_start
from blocktrain.serving.decoding import DecodedGeneration, Decoder, FixedLength, Rows
from blocktrain.serving.drafting import Drafter
from blocktrain.serving.engine_api import GenerationRequest, GenerationStats, ModelInfo, TokenLogprob
from blocktrain.serving.fingerprint import Fingerprint, fingerprint
from blocktrain.serving.held import HeldBlocks, Work
from blocktrain.serving.sampling import FLOAT32_TOLERANCE, Row, Sampler, normalised
from blocktrain.serving.scoring import scored_window, under_deadline, windows
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint

T = TypeVar("T")

LOCAL_DRAFT_TOKENS = 8
"""Without a network a draft only pays by sharing a forward pass."""


def model_info(checkpoint: Checkpoint, print_: Fingerprint) -> ModelInfo:
    return ModelInfo(
        name=print_.name,
        model_hash=print_.model_hash,
        vocabulary=print_.vocabulary,
        context=print_.context,
        num_blocks=print_.num_blocks,
        tokenizer=checkpoint.tokenizer,
    )


class LocalEngine:
    def __init__(self, checkpoint_path: Path, device: torch.device | None = None) -> None:
        self._checkpoint = load_checkpoint(checkpoint_path, device or torch.device("cpu"))
        self._blocks = tuple(range(len(self._checkpoint.blocks)))
        print_ = fingerprint(checkpoint_path, self._checkpoint, self._blocks)
        self._model = model_info(self._checkpoint, print_)
        self._held = HeldBlocks(self._checkpoint, self._blocks)
        self._executor: ThreadPoolExecutor | None = None

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def ready(self) -> tuple[bool, str]:
        return (True, "ready") if self._executor is not None else (False, "the engine has not been started")

    async def start(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="local-engine")

    async def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def generate(self, request: GenerationRequest) -> DecodedGeneration:
        request.check(self._model.vocabulary)
        assert self._executor is not None, "start the engine first"
        sampler = Sampler(request.seed, request.temperature, request.top_p)
        drafter = Drafter(self._held, sampler, self._executor) if request.mode == "verify" else None
        drafted = LOCAL_DRAFT_TOKENS if request.draft_tokens is None else request.draft_tokens
        decoder = Decoder(
            request,
            context=self._model.context,
            scorer=_LocalScorer(self),
            drafter=drafter,
            length=FixedLength(drafted),
            stats=GenerationStats(),
        )
        return DecodedGeneration(decoder)

    async def score(
        self, tokens: Sequence[int], *, top: int = 0, deadline_seconds: float = 60.0
    ) -> list[TokenLogprob]:
        return await under_deadline(self._score(list(tokens), top), deadline_seconds, "scoring")

    async def _score(self, tokens: list[int], top: int) -> list[TokenLogprob]:
        scored: list[TokenLogprob] = []
        for inputs, targets in windows(tokens, self._model.context):
            caches = self._held.new_caches(self._blocks)
            sums = await self._rows(Work(inputs, len(inputs), self._blocks, caches))
            scored += scored_window(sums, targets, top)
        return scored

    async def _rows(self, work: Work) -> Row:
        sums = await self._in_thread(lambda: self._held.rows([work])[0])
        return normalised(sums.astype(np.float64))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


class _LocalScorer:
    """Rows from caches that follow one generation's text."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._caches: dict[int, Cache] = engine._held.new_caches(engine._blocks)
        self._start = self._cached = 0

    async def rows(self, tokens: Sequence[int], num_rows: int) -> Rows:
        start = window_start(len(tokens) - num_rows + 1, self._engine.model.context)
        if start != self._start:
            self._start, self._cached = start, 0
        window = tokens[start:]
        base = min(self._cached, len(window) - num_rows)
        for cache in self._caches.values():
            cache.truncate(base)
        work = Work(window[base:], num_rows, self._engine._blocks, self._caches)
        log_probs = await self._engine._rows(work)
        # All but the drafts are certain to stay; a wrong draft is cut off by the next truncate.
        self._cached = len(window) - num_rows + 1
        return Rows(log_probs, FLOAT32_TOLERANCE)

    async def exact(self, tokens: Sequence[int]) -> Row:
        engine = self._engine
        window = list(tokens[window_start(len(tokens), engine.model.context) :])
        row = await engine._in_thread(lambda: engine._held.exact_row(window, engine._blocks))
        return normalised(row)

    async def close(self) -> None:
        self._caches = {}
