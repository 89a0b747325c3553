"""Mode `sweep`: a whole stretch of text in one traversal, block after block.

All new positions start from noise keyed by the seed; every block refines them in turn (model/sweep.py). The
gateway carries the state from stage to stage: one row over the vocabulary for each new token, whatever the
width of the model. Neighbouring blocks on one stage are one hop. A stage that fails or lags is replaced by
a spare for its hop; ids and rows are all that a hop needs, so nothing before it is lost. Every block is
needed: there is no answer without one of them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import Refinement
from blocktrain.serving.engine.api import (
    Chunk,
    GenerationRequest,
    GenerationStats,
    StagesUnavailableError,
)
from blocktrain.serving.engine.decoding import token_logprob
from blocktrain.serving.engine.fanout import Fanout, Part
from blocktrain.serving.engine.link import LinkError, StageLink
from blocktrain.serving.engine.remote import deadline_ms, read_part
from blocktrain.serving.engine.sampling import FLOAT32_TOLERANCE, Row, Sampler, choose, normalised
from blocktrain.wire.frame_metadata import ModelShape, Refine, encode_metadata
from blocktrain.wire.frames import Codec, FrameType, Header, encode_ids, encode_rows

SWEEP_TOKENS = 256
"""New tokens of one traversal at most, and never more than half the context."""
SECONDS_PER_POSITION = 0.01
"""What a lagging stage is granted for each position and pass before a spare is asked too."""


class Refiner(Protocol):
    async def log_probs(self, task: Refinement) -> Row:
        """The last block's log-probs [N, V] of the new tokens, after every block has refined them."""


class SweepWriter:
    """One generation: stretches of new tokens, each in one traversal."""

    def __init__(
        self, request: GenerationRequest, *, context: int, refiner: Refiner, stats: GenerationStats
    ) -> None:
        self.request, self.context, self.stats = request, context, stats
        self.refiner = refiner
        self.sampler = Sampler(request.seed, request.temperature, request.top_p)
        self.tokens = list(request.prompt)

    async def chunks(self) -> AsyncGenerator[Chunk]:
        end = len(self.request.prompt) + self.request.max_tokens
        while len(self.tokens) < end:
            chunk = await self._stretch(end - len(self.tokens))
            self.stats.tokens += len(chunk.tokens)
            yield chunk

    async def _stretch(self, remaining: int) -> Chunk:
        count = min(remaining, SWEEP_TOKENS, max(1, self.context // 2))
        task = Refinement(
            known=self.tokens[-(self.context - count + 1) :],
            num_new=count,
            seed=self.request.seed,
            position=len(self.tokens),
            passes=self.request.passes,
        )
        rows = normalised(await self.refiner.log_probs(task))
        self.stats.traversals += 1
        return self._choose(rows)

    def _choose(self, rows: Row) -> Chunk:
        first = len(self.tokens)
        for i, row in enumerate(rows):
            self.tokens.append(choose(row, self.sampler, first + i, FLOAT32_TOLERANCE).token)
        written, top = self.tokens[first:], self.request.logprobs
        if top is None:
            return Chunk(written)
        scores = [token_logprob(row, token, top) for row, token in zip(rows, written, strict=True)]
        return Chunk(written, scores)


class LocalRefiner:
    """Every block in this process."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    async def log_probs(self, task: Refinement) -> Row:
        blocks = tuple(sorted(self.batcher.held.blocks))
        rows = await self.batcher.call(lambda: self.batcher.held.refine(task, blocks, None))
        return rows.astype(np.float64)


class RemoteRefiner:
    """Blocks on stages, asked one after another."""

    def __init__(
        self, fanout: Fanout, shape: ModelShape, request: GenerationRequest, stats: GenerationStats
    ) -> None:
        self.fanout, self.shape, self.request, self.stats = fanout, shape, request, stats
        self._deadline: float | None = None

    async def log_probs(self, task: Refinement) -> Row:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self.request.deadline_seconds
        block, rows = 0, None
        while block < self.shape.num_blocks:
            call = RefineCall(self.shape, task, rows, self._deadline)
            part = await self._hop(call, block)
            block, rows = part.blocks[-1] + 1, part.rows
        assert rows is not None
        return rows

    async def _hop(self, call: RefineCall, block: int) -> Part:
        try:
            parts = await self.fanout.collect(call, (block,))
        except StagesUnavailableError as error:
            raise StagesUnavailableError(
                f"sweep needs every block, and block {block} is lost: {error}"
            ) from None
        finally:
            self.stats.retries += call.retries
            self.stats.wire_bytes_sent += call.bytes_sent
            self.stats.wire_bytes_received += call.bytes_received
        return parts[0]


@dataclass
class RefineCall:
    """One hop: asked for one block, a stage is given as many of the next ones as it holds."""

    shape: ModelShape
    task: Refinement
    rows: NDArray[np.float64] | None
    """The state so far; None before the first block."""
    deadline: float
    retries: int = 0
    spread: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def patience_seconds(self) -> float:
        positions = len(self.task.known) + self.task.num_new
        return SECONDS_PER_POSITION * positions * self.task.passes

    def is_warm(self, link: StageLink) -> bool:
        return False

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        run = run_of_blocks(blocks[0], link.blocks)
        header = Header(
            FrameType.REFINE,
            Codec.F32,
            session=secrets.randbits(64),
            rows=self.task.num_new,
            deadline_ms=deadline_ms(self.deadline),
        )
        frame, sent = await link.request(header, self._metadata(run), self._payload())
        self.bytes_sent += sent
        self.bytes_received += frame.num_bytes
        expected = FrameType.LOG_PROBS if run[-1] == self.shape.num_blocks - 1 else FrameType.REFINED
        if frame.type != expected:
            raise LinkError(f"stage {link.address}: expected {expected.name}, found {frame.type.name}")
        return read_part(link, frame, run, self.task.num_new, self.shape.vocabulary)

    def _metadata(self, run: tuple[int, ...]) -> bytes:
        task = self.task
        return encode_metadata(
            Refine(list(run), len(task.known), task.seed, task.position, task.passes, self.rows is not None)
        )

    def _payload(self) -> bytes:
        ids = encode_ids(list(self.task.known), self.shape.vocabulary)
        return ids if self.rows is None else ids + encode_rows(self.rows, Codec.F32)


def run_of_blocks(first: int, held: Sequence[int] | frozenset[int]) -> tuple[int, ...]:
    """`first` and the blocks that follow it without a gap."""
    end = first + 1
    while end in held:
        end += 1
    return tuple(range(first, end))
