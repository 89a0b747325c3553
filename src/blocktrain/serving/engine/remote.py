"""The engine that a gateway runs: drafts here, blocks on stages, one round trip per traversal.

`ar` and `verify` compose by `consensus`: stages need nothing from each other, so all are asked at once. The
parts of a serial model are asked as a chain in which stages hand on to one another (`pipeline`).
`sweep` composes by `euler`, a chain, and the gateway carries its state from stage to stage (decision 0005).
Of rows only the best tokens travel, as Q16 codes, and whole rows where these cannot settle a choice; rows are
fp32 for scoring, log-probs, top-p and sweeps. Near ties are settled in fp64 (`model.sampling`), so the text
does not depend on the codec. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from blocktrain.model.generation import window_start
from blocktrain.model.sampling import Row
from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import HeldBlocks, Refinement
from blocktrain.serving.engine.draft_length import FLIGHTS, AdaptiveLength, DraftLength
from blocktrain.serving.engine.drafting import blocks_for_drafts
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.fanout import Fanout, FanoutConfig
from blocktrain.serving.engine.link import LinkConfig, StageLink
from blocktrain.serving.engine.pipeline import Pipeline
from blocktrain.serving.engine.questions import (
    LEAST_SHARED,
    KeptSessions,
    Question,
    RefineQuestion,
    StageCache,
    TraverseQuestion,
)
from blocktrain.serving.engine.requests import (
    GenerationRequest,
    GenerationStats,
    ServingError,
    StagesUnavailableError,
)
from blocktrain.serving.engine.rows import BestRows, Rows, Traversal, best_pooled, joined, pooled
from blocktrain.serving.fingerprint import fingerprint, model_info
from blocktrain.serving.transport import Address
from blocktrain.training.checkpoint import Description, load_checkpoint, read_config
from blocktrain.wire.frame_metadata import Draw, Hello
from blocktrain.wire.frames import ActivationCodec, Codec, FrameType

BEST_TOKENS = 32
"""With two bytes each for id and score, a row of 32,768 tokens takes 132 bytes instead of 65,540; one of 256
takes 100 instead of 516, and of 6,144 choices between bytes none needed a second question."""
LEAST_VOCABULARY = 8 * BEST_TOKENS
"""Below, whole rows take little more."""
SPARE_SECONDS = 1.0
"""How long start() waits for stages that are not needed."""
SECONDS_PER_POSITION = 0.01
"""What a lagging stage is granted for each position and pass of a sweep before a spare is asked too."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    stages: list[Address]
    """Where blocks are served; a block at several addresses has spares."""
    codec: Codec = Codec.Q16
    """How rows travel when neither log-probs nor top-p were asked for."""
    start_seconds: float = 10.0
    """How long start() waits for every block to be there; it goes on without if some are not."""
    activations: ActivationCodec = ActivationCodec.F32
    """How values travel between the stages of a serial model."""
    best_tokens: int | None = None
    """Tokens of each row that stages send, where a choice depends on temperature and noise alone; the others
    are asked for only when these cannot settle it. None: BEST_TOKENS for a vocabulary that is much larger, as
    one of bytes is."""
    kept_sessions: int = 32
    """Windows of texts whose caches stay on the stages for others that begin alike; 0 for none. A text that
    outgrows the context has two or three."""
    draft_blocks: int | None = None
    """Blocks held here to draft with; None: see `drafting.blocks_for_drafts`."""
    token: str = ""
    """The secret of stages that ask for one."""
    fanout: FanoutConfig = field(default_factory=FanoutConfig)
    link: LinkConfig = field(default_factory=LinkConfig)


class StageRefusedError(ServingError):
    """A stage serves another model, or asks for a token we do not have."""


class RemoteEngine(TextEngine):
    def __init__(self, checkpoint_path: Path, config: EngineConfig) -> None:
        described = Description.of(read_config(checkpoint_path), checkpoint_path)
        draft_blocks = blocks_for_drafts(described.setup().objective, config.draft_blocks)
        checkpoint = load_checkpoint(checkpoint_path, torch.device("cpu"), only=draft_blocks)
        self.config = config
        self.shape = fingerprint(checkpoint_path, checkpoint)
        batcher = Batcher(HeldBlocks(checkpoint, draft_blocks))
        super().__init__(model_info(checkpoint_path, checkpoint, self.shape), batcher, draft_blocks)
        self.pooling = checkpoint.pooling
        # One random name for this engine: its sessions outlive a connection, and no other client can guess
        # it.
        hello = Hello(secrets.token_hex(16), self.shape, config.token)
        self.links = [StageLink(i, address, hello, config.link) for i, address in enumerate(config.stages)]
        self.fanout = Fanout(self.links, self.shape.num_blocks, config.fanout)
        if checkpoint.objective.is_serial:
            self.fanout = Pipeline(self.links, self.shape.num_blocks, config.fanout, config.activations)
        self.running: weakref.WeakSet[StageSession] = weakref.WeakSet()
        """Generations that hold caches on stages."""
        self.kept = KeptSessions(config.kept_sessions)
        large = self.shape.vocabulary >= LEAST_VOCABULARY
        self.best_tokens = (BEST_TOKENS if large else 0) if config.best_tokens is None else config.best_tokens
        self._adaptive = AdaptiveLength()

    # ---- life ----

    async def start(self) -> None:
        """Connect to the stages; raises StageRefusedError when one serves something else."""
        for link in self.links:
            link.start()
        prepared = asyncio.get_running_loop().run_in_executor(self.batcher.executor, self.drafting.prepare)
        try:
            await self._connect()
        finally:
            await prepared

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + self.config.start_seconds
        while loop.time() < until and any(link.problem is not None for link in self.links):
            # Every block is there; what is still away is a spare, and it may come later.
            if loop.time() - began > SPARE_SECONDS and self.ready[0]:
                return
            # Another model or a wrong token will not mend itself: the operator should hear of it now.
            refused = [link.problem for link in self.links if link.refused and link.problem]
            if refused:
                await self.close()
                raise StageRefusedError(refused[0])
            await self.fanout.wait_for_change(min(0.1, max(0.0, until - loop.time())))

    async def close(self) -> None:
        # Stages free forgotten sessions by themselves, but only after two minutes.
        for session in list(self.running):
            await session.close()
        self.release(self.kept.drop())
        await asyncio.gather(*(link.close() for link in self.links))
        await super().close()

    def release(self, sessions: Mapping[int, Iterable[int]]) -> None:
        """Have the links that are named with each session free its caches."""
        for session, links in sessions.items():
            for number in links:
                self.links[number].release(session)

    @property
    def ready(self) -> tuple[bool, str]:
        try:
            self.check_covered()
        except StagesUnavailableError as error:
            return False, str(error)
        now = asyncio.get_running_loop().time()
        lost = [block for block in self.fanout.blocks if not self.fanout.within_reach(block, now)]
        # Why is in the log alone, under "lost stage": strangers read this, and need no addresses of ours.
        if len(lost) == len(self.fanout.blocks):
            return False, "no stage can be reached"
        if lost and self.fanout.needs_all:
            return False, f"a serial model needs every part, and no stage serves parts {lost} now"
        if lost and not self.config.fanout.may_degrade:
            return False, f"no stage serves blocks {lost} now"
        if lost:
            return True, f"degraded: no stage serves blocks {lost} now"
        return True, "ready"

    def check_covered(self) -> None:
        """A block that was never there is the operator's mistake; one that went away is not."""
        lacking = ",".join(map(str, self.fanout.never_served()))
        if not lacking:
            return
        raise StagesUnavailableError(
            f"no stage serves block {lacking} of {self.shape.num_blocks}; start one with "
            f"`blocktrain stage CHECKPOINT --blocks {lacking}` and name it in --stages, or see in the "
            "gateway's log why one that is named is lost"
        )

    # ---- rows ----

    def draft_length(self, request: GenerationRequest) -> DraftLength:
        return self._adaptive if request.draft_tokens is None else DraftLength(request.draft_tokens)

    def row_source(self, request: GenerationRequest, stats: GenerationStats) -> StageSession:
        return StageSession(self, request, stats)

    async def window_rows(self, ids: Sequence[int], deadline: float, stats: GenerationStats) -> Rows:
        return await self.consensus(FrameType.SCORE, ids, len(ids), deadline, stats)

    async def consensus(
        self, kind: FrameType, ids: Sequence[int], num_rows: int, deadline: float, stats: GenerationStats
    ) -> Rows:
        """Rows for ids alone, from all stages at once."""
        question = Question(
            type=kind,
            codec=Codec.F64 if kind == FrameType.EXACT else Codec.F32,
            shape=self.shape,
            ids=list(ids),
            num_rows=num_rows,
            deadline=deadline,
            stats=stats,
            follows_text=self.pooling.follows_text,
        )
        return pooled(await self.fanout.collect(question), self.pooling)

    async def refine(self, task: Refinement, deadline: float, stats: GenerationStats) -> Row:
        """Stages one after another; neighbouring blocks on one stage are one hop. Ids and rows are all that a
        hop needs, so a stage that fails or lags is replaced for its hop and nothing before it is lost."""
        block, rows = 0, None
        positions = len(task.known) + task.num_new
        while block < self.shape.num_blocks:
            question = RefineQuestion(
                type=FrameType.REFINE,
                codec=Codec.F32,
                shape=self.shape,
                ids=list(task.known),
                num_rows=task.num_new,
                deadline=deadline,
                stats=stats,
                spread=0,
                patience_seconds=SECONDS_PER_POSITION * positions * task.passes,
                task=task,
                rows=rows,
            )
            try:
                part = (await self.fanout.collect(question, (block,)))[0]
            except StagesUnavailableError as error:
                raise StagesUnavailableError(
                    f"sweep needs every block, and block {block} is lost: {error}"
                ) from None
            block, rows = part.blocks[-1] + 1, part.said.rows
        assert rows is not None
        return rows


@dataclass(eq=False)
class Window:
    """What the stages hold of one window of a text, between traversals: a session there. When the context
    slides the next one is another session, so that texts that begin alike share both."""

    start: int
    """In the text."""
    # Random, because stages tell sessions of one client apart by this number alone.
    session: int = field(default_factory=lambda: secrets.randbits(64))
    caches: dict[int, StageCache] = field(default_factory=dict)
    """By link number."""
    under_way: int = 0
    """Traversals."""


class StageSession:
    """One generation's text on the stages, which keep its caches between traversals."""

    def __init__(self, engine: RemoteEngine, request: GenerationRequest, stats: GenerationStats) -> None:
        self.engine, self.request, self.stats = engine, request, stats
        self.windows: dict[int, Window] = {}
        """By start: that of the text that is written, and those that drafts reached behind it."""
        self.written_start = 0
        """Of the first of these."""
        self.spread = secrets.randbits(62)
        """The same for all windows: equal stages are asked in one order."""
        self.deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        # A reported log-prob and the border of a nucleus should be the model's own, not a code's nearest
        # value.
        shown = request.logprobs is not None or request.top_p < 1
        self.codec = Codec.F32 if shown else engine.config.codec
        self.sampler = request.sampler(engine.model)
        self.best_tokens = engine.best_tokens if self.sampler.plain and not shown else 0
        self.slides = True
        # What a chain has cached is known when it has answered, so its traversals come one after another.
        self.most_flights = 1 if engine.fanout.needs_all else FLIGHTS
        engine.running.add(self)

    async def rows(self, traversal: Traversal) -> Rows | BestRows:
        context, end = self.engine.shape.context, len(traversal.tokens)
        first, spanned = end - traversal.num_rows + 1, []
        while first <= end:
            start = window_start(first, context)
            spanned.append((start, first, min(end, start + context)))
            first = start + context + 1
        self.written_start = max(self.written_start, window_start(traversal.written, context))
        # A wrong draft comes back to what is written, and never to a window before.
        for before in [start for start in self.windows if start < self.written_start]:
            self._leave(self.windows[before])
        if len(spanned) == 1:
            return await self._rows_of(traversal, *spanned[0])
        # The draft goes on where the window slides: all windows are asked at once.
        asked = [asyncio.ensure_future(self._rows_of(traversal, *place)) for place in spanned]
        try:
            # Where one fails the others' answers are waited for: until then stages count them as under way.
            await asyncio.gather(*asked, return_exceptions=True)
            return joined([task.result() for task in asked])
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _rows_of(self, traversal: Traversal, start: int, first: int, end: int) -> Rows | BestRows:
        """What follows the prefixes of `first` to `end` tokens, whose window begins at `start`."""
        window = self.windows.setdefault(start, Window(start))
        draw = None
        # As few as the least capable stage sends; an older one sends whole rows alone.
        count = min([self.best_tokens, *(link.best_tokens for link in self.engine.links if link.blocks)])
        if count and not traversal.whole:
            draw = Draw(self.sampler.seed, first, self.sampler.temperature, count)
        ids = traversal.tokens[start:end]
        question = TraverseQuestion(
            type=FrameType.TRAVERSE,
            codec=self.codec if draw is None else Codec.BEST,
            draw=draw,
            shape=self.engine.shape,
            ids=ids,
            num_rows=end - first + 1,
            deadline=self.deadline,
            stats=self.stats,
            spread=self.spread,
            follows_text=self.engine.pooling.follows_text,
            session=window.session,
            caches=window.caches,
            traversal=traversal,
            kept=self.engine.kept,
        )
        self.engine.kept.begin(window.session, window.caches, ids)
        window.under_way += 1
        try:
            parts = await self.engine.fanout.collect(question)
        finally:
            window.under_way -= 1
            if window is not self.windows.get(start) and not window.under_way:
                self._keep(window)
        if draw is None:
            return pooled(parts, self.engine.pooling)
        return best_pooled(parts, self.engine.pooling, self.engine.shape.vocabulary, draw.temperature)

    async def exact(self, tokens: Sequence[int]) -> Row:
        window = tokens[window_start(len(tokens), self.engine.shape.context) :]
        rows = await self.engine.consensus(FrameType.EXACT, window, 1, self.deadline, self.stats)
        row: Row = rows.log_probs[0]
        return row

    def _leave(self, window: Window, *, last: bool = False) -> None:
        """The text is through with it."""
        del self.windows[window.start]
        # Void traversals of it may still be under way.
        if not window.under_way:
            self._keep(window, last=last)

    def _keep(self, window: Window, *, last: bool = False) -> None:
        """For texts that begin alike; or free the caches wherever it left some."""
        kept, caches = self.engine.kept, window.caches
        kept.end(window.session)
        # Others may write on from the end of this text, or from its prompt. What lies between is its own, and
        # a long text would push out everybody's prompts.
        shared = last or window.start + LEAST_SHARED <= len(self.request.prompt)
        worth_it = shared and any(len(cache.ids) >= LEAST_SHARED for cache in caches.values())
        self.engine.release(kept.keep(window.session, caches) if worth_it else {window.session: caches})

    async def close(self) -> None:
        """Have the windows kept, or freed."""
        self.engine.running.discard(self)
        for window in list(self.windows.values()):
            self._leave(window, last=True)
