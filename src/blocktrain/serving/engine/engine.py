"""The engine that a gateway runs: drafts here, blocks on stages, one round trip per traversal.

`ar` and `verify` compose by `consensus`: stages need nothing from each other, so all are asked at once.
`sweep` composes by `euler`, a chain: stages are asked one after another (see `sweeping`). Rows travel as
Q16 codes by default and as fp32 for scoring, log-probs, top-p and sweeps; near ties are settled in fp64
(see `sampling`), so the text does not depend on the codec. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import HeldBlocks
from blocktrain.serving.engine.api import (
    GenerationRequest,
    GenerationStats,
    ModelInfo,
    ServingError,
    StagesUnavailableError,
    TokenLogprob,
)
from blocktrain.serving.engine.decoding import DecodedGeneration, Decoder
from blocktrain.serving.engine.draft_length import AdaptiveLength, DraftLength, FixedLength
from blocktrain.serving.engine.drafting import Drafter, blocks_for_drafts
from blocktrain.serving.engine.fanout import Fanout, FanoutConfig
from blocktrain.serving.engine.fingerprint import fingerprint, model_info
from blocktrain.serving.engine.link import LinkConfig, StageLink
from blocktrain.serving.engine.remote import Consensus, RemoteScorer, StatelessCall
from blocktrain.serving.engine.sampling import Sampler
from blocktrain.serving.engine.scoring import check_scorable, scored_window, under_deadline, windows
from blocktrain.serving.engine.sweeping import RemoteRefiner, SweepWriter
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import Description, load_checkpoint, read_config
from blocktrain.wire.frame_metadata import (
    Hello,
    ModelShape,
)
from blocktrain.wire.frames import (
    Codec,
    FrameType,
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
    draft_blocks: int = 2
    """Blocks held here to draft with: two agree with four on 95 % of bytes, one on 91 % (experiments.md)."""
    token: str = ""
    """The secret of stages that ask for one."""
    fanout: FanoutConfig = field(default_factory=FanoutConfig)
    link: LinkConfig = field(default_factory=LinkConfig)


class StageRefusedError(ServingError):
    """A stage serves another model, or asks for a token we do not have."""


class Engine:
    def __init__(self, checkpoint_path: Path, config: EngineConfig) -> None:
        described = Description.of(read_config(checkpoint_path), checkpoint_path)
        self._draft_blocks = blocks_for_drafts(described.setup().objective, config.draft_blocks)
        checkpoint = load_checkpoint(checkpoint_path, torch.device("cpu"), only=self._draft_blocks)
        self.config = config
        self.shape: ModelShape = fingerprint(checkpoint_path, checkpoint)
        self._model = model_info(checkpoint, self.shape)
        self._held = HeldBlocks(checkpoint, self._draft_blocks)
        self._weights = checkpoint.pooling
        self._adaptive = AdaptiveLength()
        self._started = False

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def num_running(self) -> int:
        """Generations that hold caches on stages."""
        return len(self.consensus.running)

    # ---- life ----

    async def start(self) -> None:
        """Connect to the stages; raises StageRefusedError when one serves something else."""
        hello = Hello(secrets.token_hex(16), self.shape, self.config.token)
        self.links = [
            StageLink(number, address, hello, self.config.link)
            for number, address in enumerate(self.config.stages)
        ]
        self.fanout = Fanout(self.links, self.shape.num_blocks, self.config.fanout)
        self.consensus = Consensus(self.fanout, self.shape, self._weights)
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
        for scorer in list(self.consensus.running):
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
        request.check(self._model)
        self._check_covered()
        stats = GenerationStats()
        if request.mode == "sweep":
            refiner = RemoteRefiner(self.fanout, self.shape, request, stats)
            writer = SweepWriter(request, context=self._model.context, refiner=refiner, stats=stats)
            return DecodedGeneration(writer)
        sampler = Sampler(request.seed, request.temperature, request.top_p)
        verify = request.mode == "verify"
        decoder = Decoder(
            request,
            context=self._model.context,
            scorer=RemoteScorer(self.consensus, request, stats, self.config.codec),
            drafter=Drafter(self._batcher, sampler, self._draft_length(request), self._draft_blocks)
            if verify
            else None,
            stats=stats,
        )
        return DecodedGeneration(decoder)

    def _draft_length(self, request: GenerationRequest) -> DraftLength:
        if request.draft_tokens is not None:
            return FixedLength(request.draft_tokens)
        return self._adaptive

    async def score(
        self,
        tokens: Sequence[int],
        *,
        top: int = 0,
        deadline_seconds: float = 60.0,
        stats: GenerationStats | None = None,
    ) -> list[TokenLogprob]:
        check_scorable(tokens, self._model.vocabulary, top)
        self._check_covered()
        return await under_deadline(
            self._score(list(tokens), top, deadline_seconds, stats or GenerationStats()),
            deadline_seconds,
            "scoring",
        )

    async def _score(
        self, tokens: list[int], top: int, seconds: float, stats: GenerationStats
    ) -> list[TokenLogprob]:
        deadline = asyncio.get_running_loop().time() + seconds
        gate = asyncio.Semaphore(SCORING_WINDOWS_AT_ONCE)

        async def one(inputs: Sequence[int], targets: Sequence[int]) -> list[TokenLogprob]:
            async with gate:
                call = StatelessCall(self.shape, FrameType.SCORE, list(inputs), len(inputs), deadline)
                try:
                    parts = await self.fanout.collect(call)
                    stats.lose_blocks(self.fanout.missing(parts))
                finally:
                    stats.scoring_traversals += 1
                    stats.retries += call.retries
                    stats.wire_bytes_sent += call.bytes_sent
                    stats.wire_bytes_received += call.bytes_received
                log_probs, _ = self.consensus.pooled(parts)
                return scored_window(log_probs, targets, top)

        scored = await asyncio.gather(*(one(*window) for window in windows(tokens, self._model.context)))
        return [token for window in scored for token in window]
