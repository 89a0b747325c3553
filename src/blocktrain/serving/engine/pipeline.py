"""One traversal of a serial model: through stages that hand on to one another, the last of which answers.

Unlike a fan-out it takes the sum of the hops, and no part can be left out. The gateway chooses the chain and
names it in its question. It hears of a failure from whichever stage it is at, over its own connection to that
one, and asks again through another chain; what the stages have cached of the session counts only while the
chain stays the same, so a new chain gets all ids. Knows nothing of sampling or text.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from blocktrain.model.generation import shared_length
from blocktrain.serving.engine.fanout import HEALTH_POLL_SECONDS, Candidate, Fanout, FanoutConfig
from blocktrain.serving.engine.link import LinkError, StageLink
from blocktrain.serving.engine.questions import Question, StageCache, TraverseQuestion
from blocktrain.serving.engine.requests import StagesUnavailableError
from blocktrain.serving.engine.rows import Part
from blocktrain.wire import frames
from blocktrain.wire.frame_metadata import MAX_HOPS, Ask, FailureCode, Hop, encode_metadata
from blocktrain.wire.frames import ActivationCodec, Frame, FrameType

log = logging.getLogger(__name__)

AGAIN_HEDGES = 20
"""A chain that is silent for so many `hedge_seconds` is asked again, then after twice as long."""

MAX_CHAIN_BYTES = frames.MAX_METADATA_BYTES - 128
"""Of a question; what the first stage hands on has one address less, and up to 128 bytes of who asked."""

Legs = list[tuple[StageLink, tuple[int, ...]]]
"""Stages in order, and the neighbouring parts that each runs."""


@dataclass(frozen=True)
class Chain:
    legs: list[tuple[int, tuple[int, ...]]]
    """Links in order with the parts of each; none where a part has no candidate."""
    missing: tuple[int, ...] = ()
    """Parts that no candidate serves."""


def cheapest_chain(num_blocks: int, candidates: Sequence[Candidate], spread: int = 0) -> Chain:
    """The stages that run all parts in order: as few slow ones as possible, then with warm caches, then in
    few hops, then near. `spread` (a session's number) turns the order of equals.

    No stage comes twice, since each holds neighbouring parts: going on there is cheaper than coming back.
    """
    served = set().union(*(candidate.blocks for candidate in candidates))
    missing = tuple(block for block in range(num_blocks) if block not in served)
    if missing:
        return Chain([], missing)
    # From the last part to the first: the best way from `block` to the end.
    cost = tuple[int, int, int, float, int]
    best: dict[int, tuple[cost, list[tuple[int, tuple[int, ...]]]]] = {num_blocks: ((0, 0, 0, 0.0, 0), [])}
    for block in reversed(range(num_blocks)):
        ways = []
        for candidate in candidates:
            end, turn = block, (candidate.link + spread) % len(candidates)
            while end in candidate.blocks and end < num_blocks:
                end += 1
                slow, cold, hops, seconds, turns = best[end][0]
                total = (
                    slow + candidate.slow,
                    cold + (not candidate.warm),
                    hops + 1,
                    seconds + candidate.round_trip_seconds,
                    turns + turn,
                )
                ways.append((total, [(candidate.link, tuple(range(block, end))), *best[end][1]]))
        best[block] = min(ways, key=lambda way: way[0])
    return Chain(best[0][1])


class Pipeline(Fanout):
    needs_all = True

    def __init__(
        self, links: Sequence[StageLink], num_blocks: int, config: FanoutConfig, activations: ActivationCodec
    ) -> None:
        super().__init__(links, num_blocks, config)
        self.activations = activations

    def chain(self, question: Question, avoid: Collection[int]) -> Chain:
        return cheapest_chain(len(self.blocks), self.candidates(question, avoid), question.spread)

    async def collect(self, question: Question, blocks: tuple[int, ...] | None = None) -> list[Part]:
        """The last part's answer; StagesUnavailableError where a part stays out of reach."""
        loop = asyncio.get_running_loop()
        began, avoid, problem = loop.time(), set[int](), "none answers"
        patience = AGAIN_HEDGES * self.config.hedge_seconds
        while True:
            chain = self.chain(question, avoid)
            if not chain.missing:
                legs = [(self.links[link], parts) for link, parts in chain.legs]
                try:
                    async with asyncio.timeout(patience + question.patience_seconds):
                        return [await self._healthy(question, legs, avoid)]
                except TimeoutError:
                    # What was handed on may be lost between two stages that the gateway both reaches. Those
                    # that have computed it answer from memory.
                    question.stats.retries += 1
                    patience *= 2
                    continue
                except LinkError as error:
                    problem = str(error)
                    question.stats.retries += 1
                    avoid.add(self._culprit(error, legs))
                    continue
            now = loop.time()
            since = max(self._missing_since(block, now, began) for block in chain.missing)
            if now >= min(since + self.config.degrade_seconds, question.deadline):
                log.warning("gave up part=%d reason=%s", chain.missing[0], problem)
                raise StagesUnavailableError(
                    f"a serial model needs every part, and no stage serves part {chain.missing[0]} now"
                )
            await self.wait_for_change(HEALTH_POLL_SECONDS)
            # One that failed may have come back, or be less busy.
            avoid.clear()

    def _culprit(self, error: LinkError, legs: Legs) -> int:
        """The stage to go around: the one that failed, or the one behind it that it could not reach."""
        numbers = [link.number for link, _ in legs]
        # Without a name it is an answer that makes no sense, and the last one answers.
        failed = numbers[-1] if error.link is None else error.link
        at = numbers.index(failed)
        if error.code is not FailureCode.ONWARD or at + 1 == len(numbers):
            return failed
        # For some seconds it is asked last: the gateway reaches it, and every traversal would try it again.
        behind = self.links[numbers[at + 1]]
        behind.slow_until = asyncio.get_running_loop().time() + self.config.slow_seconds
        return behind.number

    async def _healthy(self, question: Question, legs: Legs, avoid: set[int]) -> Part:
        """The answer through these stages; LinkError as soon as one of them is silent and another chain could
        do without it."""
        loop = asyncio.get_running_loop()
        answer = loop.create_task(self._ask(question, legs))
        try:
            while True:
                await asyncio.wait({answer}, timeout=HEALTH_POLL_SECONDS)
                if answer.done():
                    return answer.result()
                now = loop.time()
                silent = [(since, link) for link, _ in legs if (since := link.lost_at(now)) is not None]
                if not silent:
                    continue
                since, link = min(silent, key=lambda pair: pair[0])
                spared = not self.chain(question, {*avoid, link.number}).missing
                if spared or now >= since + self.config.degrade_seconds:
                    error = LinkError(f"stage {link.address} is silent")
                    error.link = link.number
                    raise error
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _ask(self, question: Question, legs: Legs) -> Part:
        last, _ = legs[-1]
        if isinstance(question, TraverseQuestion):
            frame = await self._traverse(question, legs)
        else:
            payload = frames.encode_ids(question.ids, question.shape.vocabulary)
            metadata = self._metadata(question, legs)
            behind = [link for link, _ in legs[1:]]
            frame = await question.send(
                legs[0][0], metadata, payload, behind=behind, session=secrets.randbits(64)
            )
        return question.read(last, frame, self.blocks)

    def _metadata(self, question: Question, legs: Legs, prefix: int = 0, like: int | None = None) -> Ask:
        if len(legs) > MAX_HOPS + 1:
            raise StagesUnavailableError(
                f"a chain of {len(legs)} stages is too long; expected at most {MAX_HOPS + 1}: give stages "
                "more parts each"
            )
        onward = [Hop(link.address.text, list(parts)) for link, parts in legs[1:]]
        ask = Ask(list(legs[0][1]), prefix, question.draw, onward, self.activations, like)
        taken = len(encode_metadata(ask))
        if taken > MAX_CHAIN_BYTES:
            raise StagesUnavailableError(
                f"the addresses of a chain of {len(legs)} stages take {taken} bytes; expected at most "
                f"{MAX_CHAIN_BYTES}: name stages by shorter addresses, or give them more parts each"
            )
        return ask

    async def _traverse(self, question: TraverseQuestion, legs: Legs) -> Frame:
        """New ids for whatever the chain has cached of the session."""
        for tries in range(2):
            caches = self._caches(question, legs, start_over=tries > 0)
            first = caches[0]
            if first.question is not question:
                traversal = first.traversal + 1
                for cache in caches:
                    cache.traversal, cache.question = traversal, question
            base = min(shared_length(first.ids, question.ids), len(question.ids) - question.num_rows)
            prefix = frames.prefix_checksum(question.ids[:base])
            frame = await question.send(
                legs[0][0],
                self._metadata(question, legs, prefix, first.like if base else None),
                frames.encode_ids(question.ids[base:], question.shape.vocabulary),
                behind=[link for link, _ in legs[1:]],
                session=question.session,
                epoch=first.epoch,
                traversal=first.traversal,
                base=base,
            )
            if frame.type != FrameType.RESEND:
                for cache in caches:
                    # Not before: asked again, each stage must find what it found, or not, the first time.
                    cache.ids, cache.like = question.ids, None
                return frame
            question.stats.retries += 1
        raise LinkError("a stage keeps asking for ids it was sent; it is short of caches")

    def _caches(self, question: TraverseQuestion, legs: Legs, *, start_over: bool) -> list[StageCache]:
        """What each stage of the chain has cached: the same for all, or in a new epoch what all of them have
        of another session, or nothing."""
        known = [question.caches.get(link.number) for link, _ in legs]
        first = known[0]
        same = first is not None and all(
            cache is not None
            and (cache.epoch, cache.blocks) == (first.epoch, parts)
            and cache.traversal == first.traversal
            for cache, (_, parts) in zip(known, legs, strict=True)
        )
        if not same or start_over:
            # Above every epoch that any stage has seen, so that none takes it for an old one.
            epoch = max((cache.epoch for cache in question.caches.values()), default=-1) + 1
            # A stage that knows the session by another chain gives it no other's caches.
            new_to_all = not any(known) and all(link.knows_like for link, _ in legs)
            kept = None
            if new_to_all:
                running = all(link.knows_running for link, _ in legs)
                parts_of = {link.number: parts for link, parts in legs}
                kept = question.kept.like(parts_of, question.ids, running=running)
            like, ids = kept or (None, [])
            for link, parts in legs:
                question.caches[link.number] = StageCache(epoch, parts, ids, like=like)
        return [question.caches[link.number] for link, _ in legs]
