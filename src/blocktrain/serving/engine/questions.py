"""Questions to the stages, and the one place that knows what each stage has cached of a session.

A question may be put to any stage, to several, and to the same one again; what asking costs is added to its
stats. Ids are sent from where the stage's cache ends, and from the start when it lost it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktrain.model.generation import shared_length
from blocktrain.serving.blocks import Refinement, WeighedRows
from blocktrain.serving.engine.link import LinkError, StageLink
from blocktrain.serving.engine.requests import GenerationStats
from blocktrain.serving.engine.rows import Part, Traversal
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import Ask, Draw, ModelShape, Refine, encode_metadata
from blocktrain.wire.frames import Codec, Frame, FrameType, Header, ServingFrameError

LEAST_SHARED = 32
"""Tokens that two texts must share before one begins with the other's caches: fewer are read as fast."""


@dataclass(eq=False, kw_only=True)
class Question:
    """Rows for ids alone: SCORE a window, or settle a near tie with EXACT."""

    type: FrameType
    codec: Codec
    shape: ModelShape
    ids: list[int]
    num_rows: int
    deadline: float
    """On the event loop's clock."""
    stats: GenerationStats
    spread: int = field(default_factory=lambda: secrets.randbits(62))
    """Turns the order of equal stages, see `fanout.stage_route`."""
    patience_seconds: float = 0.0
    """Time for computing before a leg counts as lagging."""
    follows_text: bool = False
    """Whether each block's log-weights come with the rows."""
    draw: Draw | None = None
    """With the codec BEST, how the choice will be made."""

    def is_warm(self, link: StageLink) -> bool:
        """Whether the stage holds caches that the question continues."""
        return False

    @property
    def is_void(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return False

    def asks_again(self) -> bool:
        """Whether the question is put again where a stage failed."""
        return True

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        """The stage's answer, or LinkError."""
        payload = frames.encode_ids(self.ids, self.shape.vocabulary)
        frame = await self.send(link, Ask(list(blocks)), payload, session=secrets.randbits(64))
        return self.read(link, frame, blocks)

    async def send(
        self,
        link: StageLink,
        metadata: msgspec.Struct,
        payload: bytes,
        behind: Sequence[StageLink] = (),
        **names: int,
    ) -> Frame:
        """The reply to a frame whose session, epoch, traversal and base are `names`."""
        left = self.deadline - asyncio.get_running_loop().time()
        deadline_ms = min(max(int(left * 1000), 0), frames.NO_DEADLINE - 1)
        header = Header(self.type, self.codec, rows=self.num_rows, deadline_ms=deadline_ms, **names)
        frame, sent = await link.request(header, encode_metadata(metadata), payload, behind)
        self.stats.wire_bytes_sent += sent
        self.stats.wire_bytes_received += frame.num_bytes
        return frame

    def read(self, link: StageLink, frame: Frame, blocks: tuple[int, ...]) -> Part:
        try:
            if frame.header.rows != self.num_rows:
                raise LinkError(
                    f"stage {link.address}: expected {self.num_rows} rows, found {frame.header.rows}"
                )
            codec, vocabulary = frame.header.codec, self.shape.vocabulary
            weighed = len(blocks) if self.follows_text else 0
            if self.draw is not None:
                count = min(self.draw.tokens, vocabulary)
                end = self.num_rows * frames.best_bytes(count, vocabulary)
                ids, scores, tolerance = frames.decode_best(
                    frame.payload[:end], self.num_rows, count, vocabulary
                )
                logs = frames.decode_log_weights(frame.payload[end:], self.num_rows, weighed)
                return Part(blocks, WeighedRows(scores, logs), tolerance, ids)
            end = self.num_rows * frames.row_bytes(codec, vocabulary)
            values = frames.decode_rows(frame.payload[:end], codec, self.num_rows, vocabulary)
            logs = frames.decode_log_weights(frame.payload[end:], self.num_rows, weighed)
        except ServingFrameError as error:
            link.distrust()
            raise LinkError(f"stage {link.address}: {error}") from None
        return Part(blocks, WeighedRows(values, logs), frames.row_tolerance(values, codec))


@dataclass
class StageCache:
    """What one stage has cached of a window of a text, as far as we know."""

    epoch: int
    blocks: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    """Once it has run what it was sent: several traversals may be under way, and a stage takes them in order.
    Where one got lost it finds that its ids are others, and has them sent again."""
    checksum: tuple[int, int] = (0, 0)
    """So many ids from the start, and their `prefix_checksum`."""
    traversal: int = 0
    like: int | None = None
    """Before the first traversal is sent (in a chain, answered), the session whose caches this one begins
    with."""
    question: Question | None = None
    """The question that `traversal` numbers. Asked again for lack of an answer, it keeps its number while it
    is the last one, and the stage answers from memory."""


class KeptSessions:
    """Sessions whose caches stages hold: those under way, and the last that have ended in whatever way. A
    text that begins as one of them does is sent from where the two part."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Of those that have ended; with 0 no text begins with another's caches."""
        self._caches: OrderedDict[int, dict[int, StageCache]] = OrderedDict()
        self._running: dict[int, dict[int, StageCache]] = {}
        self._beginnings: dict[int, tuple[int, ...]] = {}
        """The first LEAST_SHARED ids of each session that has so many."""
        self._alike: dict[tuple[int, ...], dict[int, None]] = {}
        """Sessions by that. Only these are compared: among 32 sessions all pairs took a gateway 2 ms for
        every text."""

    def begin(self, session: int, caches: dict[int, StageCache], ids: list[int]) -> None:
        """The session, which is asked for these ids, is under way from now on. Clients with one system prompt
        have it read once."""
        if self.most:
            self._running[session] = caches
            self._enter(session, ids)

    def end(self, session: int) -> None:
        """It is not under way any more."""
        self._running.pop(session, None)
        self._leave(session)

    def keep(self, session: int, caches: dict[int, StageCache]) -> dict[int, dict[int, StageCache]]:
        """Of a session that has ended. Gives those that make room: the least recently used of those that
        begin like one used later, before any other."""
        self._caches[session] = caches
        self._enter(session, max((cache.ids for cache in caches.values()), key=len, default=[]))
        freed: dict[int, dict[int, StageCache]] = {}
        while len(self._caches) > self.most:
            # Texts of eight clients with one prompt in turn pushed out the other fifteen prompts.
            used = {session: i for i, session in enumerate(self._caches)}
            out = next((old for old in used if self._is_there_twice(old, used)), next(iter(used)))
            freed[out] = self._caches.pop(out)
            self._leave(out)
        return freed

    def drop(self) -> dict[int, dict[int, StageCache]]:
        """Gives all of them, and keeps none."""
        dropped, self._caches = self._caches, OrderedDict()
        for session in dropped:
            self._leave(session)
        return dropped

    def like(
        self, legs: Mapping[int, tuple[int, ...]], ids: list[int], *, running: bool
    ) -> tuple[int, list[int]] | None:
        """The session that has most of `ids` cached on all of these links, with the blocks of each, and how
        much; None where it is little. Also among those under way where the stages copy them (`running`)."""
        best, shared = None, LEAST_SHARED - 1
        alike = self._alike.get(tuple(ids[:LEAST_SHARED]), {})
        for held in (self._caches, self._running if running else {}):
            for session in alike:
                if (caches := held.get(session)) is None:
                    continue
                known = [caches.get(link) for link in legs]
                lengths = [
                    shared_length(cache.ids, ids)
                    for cache, blocks in zip(known, legs.values(), strict=True)
                    if cache is not None and cache.blocks == blocks
                ]
                if len(lengths) == len(legs) and min(lengths) > shared:
                    best, shared = session, min(lengths)
        if best is None:
            return None
        if best in self._caches:
            self._caches.move_to_end(best)
        return best, ids[:shared]

    def _enter(self, session: int, ids: list[int]) -> None:
        beginning = tuple(ids[:LEAST_SHARED])
        if len(ids) >= LEAST_SHARED and self._beginnings.get(session) != beginning:
            self._forget(session)  # a draft at its beginning was wrong
            self._beginnings[session] = beginning
            self._alike.setdefault(beginning, {})[session] = None

    def _leave(self, session: int) -> None:
        if session not in self._caches and session not in self._running:
            self._forget(session)

    def _forget(self, session: int) -> None:
        beginning = self._beginnings.pop(session, None)
        if beginning is not None:
            del self._alike[beginning][session]
            if not self._alike[beginning]:
                del self._alike[beginning]

    def _is_there_twice(self, old: int, used: Mapping[int, int]) -> bool:
        """Whether a session that was used later begins like this one."""
        alike = self._alike.get(self._beginnings.get(old, ()), {})
        later = [new for new in alike if used.get(new, -1) > used[old]]
        return any(_begin_alike(self._caches[old], self._caches[new]) for new in later)


def _begin_alike(old: Mapping[int, StageCache], new: Mapping[int, StageCache]) -> bool:
    """Whether half of what the first one has on each stage, or more, is there from the second one too."""
    for link, cache in old.items():
        other = new.get(link)
        if other is None or other.blocks != cache.blocks:
            return False
        if 2 * shared_length(cache.ids, other.ids) < len(cache.ids):
            return False
    return True


@dataclass(eq=False, kw_only=True)
class TraverseQuestion(Question):
    """New ids for whatever each stage has cached of the session."""

    session: int
    caches: dict[int, StageCache]
    """The session's own, by link number: what one question leaves behind is what the next one continues."""
    traversal: Traversal
    kept: KeptSessions

    @property
    def is_void(self) -> bool:
        return self.traversal.void

    def asks_again(self) -> bool:
        # Only the first of those under way. They share a connection that one damaged frame ends, and with one
        # frame in four damaged eight of them never got through together.
        if not self.traversal.leads:
            self.traversal.void = True
        return not self.traversal.void

    def is_warm(self, link: StageLink) -> bool:
        return link.number in self.caches

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        # Given up before it was sent: its session may be gone.
        if self.is_void:
            raise LinkError(f"stage {link.address} was not asked: nobody waits for the answer")
        # The engine asks so where all stages know how; this one is an older program that came back since.
        if self.draw is not None and not link.best_tokens:
            raise LinkError(f"stage {link.address} sends whole rows alone; update it")
        cache = self.caches.get(link.number)
        if cache is None or cache.blocks != blocks:
            like = None
            if cache is None and link.knows_like:
                like = self.kept.like({link.number: blocks}, self.ids, running=link.knows_running)
            cache = self._new_epoch(link, blocks, like)
        frame = await self._traverse(link, cache)
        if frame.type == FrameType.RESEND and self.asks_again():
            # The stage evicted the session, or holds other ids than we think.
            self.stats.retries += 1
            frame = await self._traverse(link, self._new_epoch(link, blocks))
        if frame.type == FrameType.RESEND:
            raise LinkError(f"stage {link.address} keeps asking for ids it was sent; it is short of caches")
        return self.read(link, frame, blocks)

    def _new_epoch(
        self, link: StageLink, blocks: tuple[int, ...], like: tuple[int, list[int]] | None = None
    ) -> StageCache:
        """An epoch in which the stage has nothing cached but what another session has; what it may hold of
        older ones is stale there."""
        before, (session, ids) = self.caches.get(link.number), like or (None, [])
        epoch = before.epoch + 1 if before is not None else 0
        cache = StageCache(epoch, blocks, ids, like=session)
        self.caches[link.number] = cache
        return cache

    async def _traverse(self, link: StageLink, cache: StageCache) -> Frame:
        if cache.question is not self:
            cache.traversal, cache.question = cache.traversal + 1, self
        # Where the texts part, a draft was wrong. A row needs its own position in the pass.
        base = min(shared_length(cache.ids, self.ids), len(self.ids) - self.num_rows)
        # Mostly the text goes on where it ended.
        known, prefix = cache.checksum
        if known != base:
            prefix = frames.prefix_checksum(self.ids[:base])
        new = self.ids[base:]
        cache.checksum = len(self.ids), frames.prefix_checksum(new, prefix)
        cache.ids, like, cache.like = self.ids, cache.like if base else None, None
        loop = asyncio.get_running_loop()
        began = loop.time()
        frame = await self.send(
            link,
            Ask(list(cache.blocks), prefix, self.draw, like=like),
            frames.encode_ids(new, self.shape.vocabulary),
            session=self.session,
            epoch=cache.epoch,
            traversal=cache.traversal,
            base=base,
        )
        # Only these count as the link's usual time: a score or a sweep computes for longer.
        seconds, usual = loop.time() - began, link.latency_seconds
        link.latency_seconds = seconds if usual is None else usual + 0.2 * (seconds - usual)
        return frame


@dataclass(eq=False, kw_only=True)
class RefineQuestion(Question):
    """One hop of a sweep: asked for one block, a stage is given as many of the next ones as it holds."""

    task: Refinement
    rows: NDArray[np.float64] | None
    """The state so far; None before the first block."""

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        task, run = self.task, run_of_blocks(blocks[0], link.blocks)
        begun = self.rows is not None
        metadata = Refine(list(run), len(task.known), task.seed, task.position, task.passes, begun)
        payload = frames.encode_ids(self.ids, self.shape.vocabulary)
        if self.rows is not None:
            payload += frames.encode_rows(self.rows, self.codec)
        frame = await self.send(link, metadata, payload, session=secrets.randbits(64))
        expected = FrameType.LOG_PROBS if run[-1] == self.shape.num_blocks - 1 else FrameType.REFINED
        if frame.type != expected:
            raise LinkError(f"stage {link.address}: expected {expected.name}, found {frame.type.name}")
        return self.read(link, frame, run)


def run_of_blocks(first: int, held: frozenset[int]) -> tuple[int, ...]:
    """`first` and the blocks that follow it without a gap."""
    end = first + 1
    while end in held:
        end += 1
    return tuple(range(first, end))
