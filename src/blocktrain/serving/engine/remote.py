"""What one generation says to the stages: sessions and their legs, questions, and answers pooled.

A leg is what one stage holds of a session as far as we know; a call is one question that any stage may be
asked. Ids are sent from where the stage's cache ends, and from the start when it lost it.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blocktrain.model.generation import window_start
from blocktrain.serving.engine.api import GenerationRequest, GenerationStats, StagesUnavailableError
from blocktrain.serving.engine.decoding import Rows
from blocktrain.serving.engine.fanout import Call, Fanout, Part
from blocktrain.serving.engine.link import LinkError, StageLink
from blocktrain.serving.engine.sampling import FLOAT32_TOLERANCE, Row, normalised
from blocktrain.wire.frame_metadata import (
    Ask,
    ModelShape,
    encode_metadata,
)
from blocktrain.wire.frames import (
    NO_DEADLINE,
    Codec,
    Frame,
    FrameType,
    Header,
    ServingFrameError,
    decode_rows,
    encode_ids,
    prefix_checksum,
    row_tolerance,
)


class Consensus:
    """The stages as one model: their answers summed, normalised, and scaled where blocks are missing."""

    def __init__(self, fanout: Fanout, shape: ModelShape, weights: Sequence[float]) -> None:
        self.fanout, self.shape, self.weights = fanout, shape, np.array(weights)
        self.running: weakref.WeakSet[RemoteScorer] = weakref.WeakSet()
        """Generations that hold caches on stages."""

    def pooled(self, parts: Sequence[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Consensus log-probs [R, V] and their tolerance; weights are scaled up for blocks left out."""
        served = float(sum(self.weights[block] for part in parts for block in part.blocks))
        if served <= 0:
            missing = sorted(self.fanout.missing(parts))
            raise StagesUnavailableError(f"the blocks left without {missing} are no model on their own")
        scale = float(self.weights.sum()) / served
        total = sum((part.rows for part in parts), start=np.zeros_like(parts[0].rows))
        tolerance = sum((part.tolerance for part in parts), start=np.zeros_like(parts[0].rows))
        return normalised(scale * total), scale * tolerance + FLOAT32_TOLERANCE


@dataclass
class StatelessCall:
    """Rows for ids alone: scoring a window, or settling a near tie."""

    shape: ModelShape
    type: FrameType
    ids: list[int]
    num_rows: int
    deadline: float
    retries: int = 0
    spread: int = field(default_factory=lambda: secrets.randbits(62))
    bytes_sent: int = 0
    bytes_received: int = 0
    patience_seconds: float = 0.0

    def is_warm(self, link: StageLink) -> bool:
        return False

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        codec = Codec.F64 if self.type == FrameType.EXACT else Codec.F32
        header = Header(
            self.type,
            codec,
            session=secrets.randbits(64),
            rows=self.num_rows,
            deadline_ms=deadline_ms(self.deadline),
        )
        metadata = encode_metadata(Ask(list(blocks)))
        frame, sent = await link.request(header, metadata, encode_ids(self.ids, self.shape.vocabulary))
        self.bytes_sent += sent
        self.bytes_received += frame.num_bytes
        return read_part(link, frame, blocks, self.num_rows, self.shape.vocabulary)


def deadline_ms(deadline: float) -> int:
    """What is left of a deadline on the loop's clock, as frames carry it."""
    left = deadline - asyncio.get_running_loop().time()
    return min(max(int(left * 1000), 0), NO_DEADLINE - 1)


def read_part(link: StageLink, frame: Frame, blocks: tuple[int, ...], rows: int, vocabulary: int) -> Part:
    try:
        if frame.header.rows != rows:
            raise LinkError(f"stage {link.address}: expected {rows} rows, found {frame.header.rows}")
        values = decode_rows(frame.payload, frame.header.codec, rows, vocabulary)
    except ServingFrameError as error:
        link.distrust()
        raise LinkError(f"stage {link.address}: {error}") from None
    return Part(blocks, values, row_tolerance(values, frame.header.codec))


@dataclass
class Leg:
    """What one stage holds of a session, as far as we know."""

    epoch: int
    blocks: tuple[int, ...]
    start: int
    ids: list[int] = field(default_factory=list)
    traversal: int = 0
    call: TraverseCall | None = None
    """The call that `traversal` numbers: asked again, it keeps its number and may be answered from memory."""


class RemoteScorer:
    """One generation's sessions on the stages: what each has cached, and what it must be sent."""

    def __init__(
        self, consensus: Consensus, request: GenerationRequest, stats: GenerationStats, codec: Codec
    ) -> None:
        self.consensus, self.request, self.stats = consensus, request, stats
        self.session = secrets.randbits(64)
        self.legs: dict[int, Leg] = {}
        exact_rows = request.logprobs is not None or request.top_p < 1
        self.codec = Codec.F32 if exact_rows else codec
        self._deadline: float | None = None

    @property
    def deadline(self) -> float:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self.request.deadline_seconds
            self.consensus.running.add(self)
        return self._deadline

    async def rows(self, tokens: Sequence[int], num_rows: int) -> Rows:
        start = window_start(len(tokens) - num_rows + 1, self.consensus.shape.context)
        call = TraverseCall(self, list(tokens[start:]), start, num_rows)
        log_probs, tolerance = self.consensus.pooled(await self._collect(call))
        return Rows(log_probs, tolerance)

    async def exact(self, tokens: Sequence[int]) -> Row:
        window = list(tokens[window_start(len(tokens), self.consensus.shape.context) :])
        call = StatelessCall(self.consensus.shape, FrameType.EXACT, window, 1, self.deadline)
        try:
            log_probs, _ = self.consensus.pooled(await self._collect(call))
        finally:
            self.stats.wire_bytes_sent += call.bytes_sent
            self.stats.wire_bytes_received += call.bytes_received
        row: Row = log_probs[0]
        return row

    async def _collect(self, call: Call) -> list[Part]:
        try:
            parts = await self.consensus.fanout.collect(call)
        finally:
            self.stats.retries += call.retries
        self.stats.lose_blocks(self.consensus.fanout.missing(parts))
        return parts

    async def close(self) -> None:
        """Free the caches wherever the session left some."""
        self.consensus.running.discard(self)
        for number in self.legs:
            self.consensus.fanout.links[number].release(self.session)
        self.legs = {}


class TraverseCall:
    """New ids for whatever each stage has cached of the session."""

    def __init__(self, scorer: RemoteScorer, window: list[int], start: int, num_rows: int) -> None:
        self.scorer, self.window, self.start, self.num_rows = scorer, window, start, num_rows
        self.deadline, self.spread = scorer.deadline, scorer.session
        self.retries = 0
        self.patience_seconds = 0.0

    def is_warm(self, link: StageLink) -> bool:
        leg = self.scorer.legs.get(link.number)
        return leg is not None and leg.start == self.start

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        leg = self._leg(link, blocks)
        frame = await self._send(link, leg)
        if frame.type == FrameType.RESEND:
            self.retries += 1
            leg = self._renew(link, blocks)
            frame = await self._send(link, leg)
        if frame.type == FrameType.RESEND:
            raise LinkError(f"stage {link.address} keeps asking for ids it was sent; it is short of caches")
        part = read_part(link, frame, blocks, self.num_rows, self.scorer.consensus.shape.vocabulary)
        # All but the drafts are certain to stay in the text.
        leg.ids, leg.call = self.window[: len(self.window) - self.num_rows + 1], None
        return part

    def _leg(self, link: StageLink, blocks: tuple[int, ...]) -> Leg:
        leg = self.scorer.legs.get(link.number)
        if leg is None or leg.blocks != blocks or leg.start != self.start:
            leg = self._renew(link, blocks)
        return leg

    def _renew(self, link: StageLink, blocks: tuple[int, ...]) -> Leg:
        """A new epoch, in which the stage has nothing cached."""
        before = self.scorer.legs.get(link.number)
        leg = Leg(before.epoch + 1 if before is not None else 0, blocks, self.start)
        self.scorer.legs[link.number] = leg
        return leg

    async def _send(self, link: StageLink, leg: Leg) -> Frame:
        scorer = self.scorer
        if leg.call is not self:
            leg.traversal, leg.call = leg.traversal + 1, self
        base = min(len(leg.ids), len(self.window) - self.num_rows)
        header = Header(
            FrameType.TRAVERSE,
            scorer.codec,
            session=scorer.session,
            epoch=leg.epoch,
            traversal=leg.traversal,
            base=base,
            rows=self.num_rows,
            deadline_ms=deadline_ms(self.deadline),
        )
        metadata = encode_metadata(Ask(list(leg.blocks), prefix_checksum(self.window[:base])))
        payload = encode_ids(self.window[base:], scorer.consensus.shape.vocabulary)
        loop = asyncio.get_running_loop()
        began = loop.time()
        frame, sent = await link.request(header, metadata, payload)
        self._observe(link, loop.time() - began)
        scorer.stats.wire_bytes_sent += sent
        scorer.stats.wire_bytes_received += frame.num_bytes
        return frame

    def _observe(self, link: StageLink, seconds: float) -> None:
        usual = link.latency_seconds
        link.latency_seconds = seconds if usual is None else usual + 0.2 * (seconds - usual)
