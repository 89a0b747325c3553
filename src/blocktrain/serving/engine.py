"""The engine that a gateway runs: drafts here, blocks on stages, one round trip per traversal.

Composition is `consensus`: stages need nothing from each other, so all are asked at once. (`euler` would
be a chain of hops and is not served; `blocktrain evaluate` computes it.) Rows travel as Q16 codes by
default and as fp32 for scoring, log-probs and top-p; near ties are settled in fp64 (see `sampling`), so
the text does not depend on the codec. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from blocktrain.model.generation import window_start
from blocktrain.serving.batching import Batcher
from blocktrain.serving.decoding import DecodedGeneration, Decoder, Rows
from blocktrain.serving.draft_length import AdaptiveLength, DraftLength, FixedLength
from blocktrain.serving.drafting import DRAFT_BLOCK, Drafter
from blocktrain.serving.engine_api import (
    GenerationRequest,
    GenerationStats,
    ModelInfo,
    ServingError,
    StagesUnavailableError,
    TokenLogprob,
)
from blocktrain.serving.fanout import Call, Fanout, FanoutConfig, Part
from blocktrain.serving.fingerprint import fingerprint, model_info
from blocktrain.serving.held import HeldBlocks
from blocktrain.serving.link import LinkConfig, LinkError, StageLink
from blocktrain.serving.sampling import FLOAT32_TOLERANCE, Row, Sampler, normalised
from blocktrain.serving.scoring import check_scorable, scored_window, under_deadline, windows
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.wire.frames import (
    NO_DEADLINE,
    Ask,
    Codec,
    Frame,
    FrameType,
    Header,
    Hello,
    ModelShape,
    ServingFrameError,
    decode_rows,
    encode_ids,
    encode_metadata,
    prefix_checksum,
    row_tolerance,
)

SCORING_WINDOWS_AT_ONCE = 4
SPARE_SECONDS = 1.0
"""How long start() waits for stages that are not needed."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    stages: list[Address]
    """Where blocks are served; a block at several addresses has spares."""
    codec: Codec = Codec.Q16
    """How rows travel when neither log-probs nor top-p were asked for."""
    start_seconds: float = 10.0
    """How long start() waits for every block to be there; it goes on without if some are not."""
    token: str = ""
    """The secret of stages that ask for one."""
    fanout: FanoutConfig = field(default_factory=FanoutConfig)
    link: LinkConfig = field(default_factory=LinkConfig)


class StageRefusedError(ServingError):
    """A stage serves another model, or asks for a token we do not have."""


class Engine:
    def __init__(self, checkpoint_path: Path, config: EngineConfig) -> None:
        checkpoint = load_checkpoint(checkpoint_path, torch.device("cpu"), only=[DRAFT_BLOCK])
        self.config = config
        self.shape: ModelShape = fingerprint(checkpoint_path, checkpoint, [DRAFT_BLOCK])
        self._model = model_info(checkpoint, self.shape)
        self._held = HeldBlocks(checkpoint, [DRAFT_BLOCK])
        self.weights = np.array(checkpoint.pooling)
        self._adaptive = AdaptiveLength()
        self._generations: weakref.WeakSet[_RemoteScorer] = weakref.WeakSet()
        self._started = False

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def num_running(self) -> int:
        """Generations that hold caches on stages."""
        return len(self._generations)

    # ---- life ----

    async def start(self) -> None:
        """Connect to the stages; raises StageRefusedError when one serves something else."""
        hello = Hello(secrets.token_hex(16), self.shape, self.config.token)
        self.links = [
            StageLink(number, address, hello, self.config.link)
            for number, address in enumerate(self.config.stages)
        ]
        self.fanout = Fanout(self.links, self.shape.num_blocks, self.config.fanout)
        self._batcher = Batcher(self._held)
        self._batcher.start()
        for link in self.links:
            link.start()
        self._started = True
        await self._wait_for_stages()

    async def _wait_for_stages(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + self.config.start_seconds
        while loop.time() < until and any(link.problem is not None for link in self.links):
            if loop.time() - began > SPARE_SECONDS and self.ready[0]:
                return
            refused = [link.problem for link in self.links if link.refused and link.problem]
            if refused:
                await self.close()
                raise StageRefusedError(refused[0])
            await self.fanout.wait_for_change(min(0.1, max(0.0, until - loop.time())))

    async def close(self) -> None:
        if not self._started:
            return
        self._started = False
        for scorer in list(self._generations):
            await scorer.close()
        await asyncio.gather(*(link.close() for link in self.links))
        await self._batcher.close()

    @property
    def ready(self) -> tuple[bool, str]:
        if not self._started:
            return False, "the engine has not been started"
        lacking = sorted(set(self.fanout.blocks) - self.fanout.covered())
        if lacking:
            return False, self._lacking_sentence(lacking)
        now = asyncio.get_running_loop().time()
        lost = [block for block in self.fanout.blocks if self.fanout.lost_at(block, now) is not None]
        if len(lost) == len(self.fanout.blocks):
            return False, "no stage can be reached: " + "; ".join(self._problems())
        if lost:
            return True, f"degraded: no stage serves blocks {lost} now: {'; '.join(self._problems())}"
        return True, "ready"

    def _lacking_sentence(self, lacking: list[int]) -> str:
        numbers = ",".join(map(str, lacking))
        problems = "; ".join(self._problems())
        return (
            f"no stage serves block {numbers} of {self.shape.num_blocks}; start one with "
            f"`blocktrain stage CHECKPOINT --blocks {numbers}` and name it in --stages"
            + (f" ({problems})" if problems else "")
        )

    def _problems(self) -> list[str]:
        return [link.problem for link in self.links if link.problem is not None]

    def _check_covered(self) -> None:
        """A block that was never there is the operator's mistake; one that went away is not."""
        lacking = sorted(set(self.fanout.blocks) - self.fanout.covered())
        if lacking:
            raise StagesUnavailableError(self._lacking_sentence(lacking))

    # ---- text ----

    def generate(self, request: GenerationRequest) -> DecodedGeneration:
        request.check(self._model.vocabulary)
        self._check_covered()
        stats = GenerationStats()
        sampler = Sampler(request.seed, request.temperature, request.top_p)
        verify = request.mode == "verify"
        decoder = Decoder(
            request,
            context=self._model.context,
            scorer=_RemoteScorer(self, request, stats),
            drafter=Drafter(self._batcher, sampler, self._draft_length(request)) if verify else None,
            stats=stats,
        )
        return DecodedGeneration(decoder)

    def _draft_length(self, request: GenerationRequest) -> DraftLength:
        if request.draft_tokens is not None:
            return FixedLength(request.draft_tokens)
        return self._adaptive

    async def score(
        self, tokens: Sequence[int], *, top: int = 0, deadline_seconds: float = 60.0
    ) -> list[TokenLogprob]:
        check_scorable(tokens, self._model.vocabulary, top)
        self._check_covered()
        return await under_deadline(
            self._score(list(tokens), top, deadline_seconds), deadline_seconds, "scoring"
        )

    async def _score(self, tokens: list[int], top: int, seconds: float) -> list[TokenLogprob]:
        deadline = asyncio.get_running_loop().time() + seconds
        gate = asyncio.Semaphore(SCORING_WINDOWS_AT_ONCE)

        async def one(inputs: Sequence[int], targets: Sequence[int]) -> list[TokenLogprob]:
            async with gate:
                call = StatelessCall(self.shape, FrameType.SCORE, list(inputs), len(inputs), deadline)
                log_probs, _ = self.pooled(await self.fanout.collect(call))
                return scored_window(log_probs, targets, top)

        scored = await asyncio.gather(*(one(*window) for window in windows(tokens, self._model.context)))
        return [token for window in scored for token in window]

    def pooled(self, parts: Sequence[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Consensus log-probs [R, V] and their tolerance; weights are scaled up for blocks left out."""
        served = float(sum(self.weights[block] for part in parts for block in part.blocks))
        if served <= 0:
            missing = sorted(set(self.fanout.blocks) - {block for part in parts for block in part.blocks})
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
class _Leg:
    """What one stage holds of a session, as far as we know."""

    epoch: int
    blocks: tuple[int, ...]
    start: int
    ids: list[int] = field(default_factory=list)
    traversal: int = 0
    call: _TraverseCall | None = None
    """The call that `traversal` numbers: asked again, it keeps its number and may be answered from memory."""


class _RemoteScorer:
    """One generation's sessions on the stages: what each has cached, and what it must be sent."""

    def __init__(self, engine: Engine, request: GenerationRequest, stats: GenerationStats) -> None:
        self.engine, self.request, self.stats = engine, request, stats
        self.session = secrets.randbits(64)
        self.legs: dict[int, _Leg] = {}
        exact_rows = request.logprobs is not None or request.top_p < 1
        self.codec = Codec.F32 if exact_rows else engine.config.codec
        self._deadline: float | None = None

    @property
    def deadline(self) -> float:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self.request.deadline_seconds
            self.engine._generations.add(self)
        return self._deadline

    async def rows(self, tokens: Sequence[int], num_rows: int) -> Rows:
        start = window_start(len(tokens) - num_rows + 1, self.engine.model.context)
        call = _TraverseCall(self, list(tokens[start:]), start, num_rows)
        log_probs, tolerance = self.engine.pooled(await self._collect(call))
        return Rows(log_probs, tolerance)

    async def exact(self, tokens: Sequence[int]) -> Row:
        window = list(tokens[window_start(len(tokens), self.engine.model.context) :])
        call = StatelessCall(self.engine.shape, FrameType.EXACT, window, 1, self.deadline)
        try:
            log_probs, _ = self.engine.pooled(await self._collect(call))
        finally:
            self.stats.wire_bytes_sent += call.bytes_sent
            self.stats.wire_bytes_received += call.bytes_received
        row: Row = log_probs[0]
        return row

    async def _collect(self, call: Call) -> list[Part]:
        try:
            parts = await self.engine.fanout.collect(call)
        finally:
            self.stats.retries += call.retries
        missing = set(self.engine.fanout.blocks) - {block for part in parts for block in part.blocks}
        self.stats.degraded_blocks = sorted(missing | set(self.stats.degraded_blocks))
        return parts

    async def close(self) -> None:
        """Free the caches wherever the session left some."""
        self.engine._generations.discard(self)
        for number in self.legs:
            self.engine.links[number].release(self.session)
        self.legs = {}


class _TraverseCall:
    """New ids for whatever each stage has cached of the session."""

    def __init__(self, scorer: _RemoteScorer, window: list[int], start: int, num_rows: int) -> None:
        self.scorer, self.window, self.start, self.num_rows = scorer, window, start, num_rows
        self.deadline, self.spread = scorer.deadline, scorer.session
        self.retries = 0

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
        part = read_part(link, frame, blocks, self.num_rows, self.scorer.engine.shape.vocabulary)
        # All but the drafts are certain to stay in the text.
        leg.ids, leg.call = self.window[: len(self.window) - self.num_rows + 1], None
        return part

    def _leg(self, link: StageLink, blocks: tuple[int, ...]) -> _Leg:
        leg = self.scorer.legs.get(link.number)
        if leg is None or leg.blocks != blocks or leg.start != self.start:
            leg = self._renew(link, blocks)
        return leg

    def _renew(self, link: StageLink, blocks: tuple[int, ...]) -> _Leg:
        """A new epoch, in which the stage has nothing cached."""
        before = self.scorer.legs.get(link.number)
        leg = _Leg(before.epoch + 1 if before is not None else 0, blocks, self.start)
        self.scorer.legs[link.number] = leg
        return leg

    async def _send(self, link: StageLink, leg: _Leg) -> Frame:
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
        payload = encode_ids(self.window[base:], scorer.engine.shape.vocabulary)
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
