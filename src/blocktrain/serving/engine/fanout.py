"""One traversal over the stages: every block asked at once, spares when one fails or lags, fewer if need be.

The time it takes is the slowest leg's round trip, not the sum: five stages took 1.02 times as long as one
at a round trip of 100 ms (docs/experiments.md). A leg that breaks is asked of another stage at once; a leg
that lags is asked of a spare as well, and the first answer counts; blocks that nobody serves any more are
left out once they have been gone for `degrade_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from blocktrain.errors import UserError
from blocktrain.serving.engine.link import LinkError, StageLink
from blocktrain.serving.engine.questions import Question
from blocktrain.serving.engine.requests import StagesUnavailableError
from blocktrain.serving.engine.rows import Part

FAR_TIMES, FAR_SECONDS = 1.5, 0.02
"""A stage is far where a ping takes so much longer than to the nearest: a busy one answers 20 ms late too."""
HEALTH_POLL_SECONDS = 0.05
"""How often a waiting leg looks at its link's health."""


@dataclass(frozen=True, kw_only=True)
class FanoutConfig:
    degrade_seconds: float = 2.0
    """How long a block may be out of reach before answers are given without it, or fail."""
    may_degrade: bool = True
    """Whether an answer may do without a block that nobody serves any more; its text is then another."""
    hedge_seconds: float = 0.5
    """A leg slower than this, and than four times the link's usual time, is asked of a spare too."""
    slow_seconds: float = 5.0
    """How long a stage that lost to its spare is asked last."""


class Candidate(NamedTuple):
    """A stage that could be asked now."""

    link: int
    blocks: frozenset[int]
    slow: bool = False
    """It was beaten by a spare a moment ago."""
    warm: bool = False
    """It holds this session's caches."""
    round_trip_seconds: float = 0.0


class StageRoute(NamedTuple):
    legs: list[tuple[int, tuple[int, ...]]]
    """Links and the blocks asked of each; no block twice."""
    missing: tuple[int, ...]
    """Blocks that no candidate serves."""


def when_blocks_are_lost(text: str) -> FanoutConfig:
    """What the option `--lost-blocks` names."""
    found = {
        "degrade": FanoutConfig(),
        "fail": FanoutConfig(may_degrade=False),
        "wait": FanoutConfig(may_degrade=False, degrade_seconds=math.inf),
    }.get(text)
    if found is None:
        raise UserError(f"--lost-blocks must be degrade, fail or wait, found {text!r}")
    return found


def stage_route(blocks: Collection[int], candidates: Sequence[Candidate], spread: int = 0) -> StageRoute:
    """Every block from one link: quick ones first, then those with warm caches, then near ones, then those
    with most blocks.

    A traversal waits for its slowest leg, so one far stage with all blocks loses to near ones that share
    them. `spread` (a session's number) turns the order of equals, so that sessions share out equal stages.
    """

    nearest = min((candidate.round_trip_seconds for candidate in candidates), default=0.0)

    def cost(candidate: Candidate) -> tuple[bool, bool, bool, int, int]:
        turn = (candidate.link + spread) % max(1, len(candidates))
        far = candidate.round_trip_seconds > FAR_TIMES * nearest + FAR_SECONDS
        return candidate.slow, not candidate.warm, far, -len(candidate.blocks), turn

    left = set(blocks)
    legs: list[tuple[int, tuple[int, ...]]] = []
    for candidate in sorted(candidates, key=cost):
        part = tuple(sorted(left & candidate.blocks))
        if part:
            legs.append((candidate.link, part))
            left -= candidate.blocks
    return StageRoute(legs, tuple(sorted(left)))


class Fanout:
    needs_all = False
    """Whether no answer can do without a block."""

    def __init__(self, links: Sequence[StageLink], num_blocks: int, config: FanoutConfig) -> None:
        self.links, self.config = list(links), config
        self.blocks = tuple(range(num_blocks))
        self._changed = asyncio.Event()
        for link in self.links:
            link.changed = self._changed.set

    # ---- what is known of the fleet ----

    def never_served(self) -> list[int]:
        """Blocks that no stage has announced, reachable now or not."""
        return sorted(set(self.blocks).difference(*(link.blocks for link in self.links)))

    def within_reach(self, block: int, now: float) -> bool:
        """Whether a connected stage holds the block; one that drains does, but is asked nothing new."""
        return any(block in link.blocks and link.lost_at(now) is None for link in self.links)

    def candidates(self, question: Question, avoid: Collection[int]) -> list[Candidate]:
        """The stages that could be asked now."""
        now = asyncio.get_running_loop().time()
        return [
            Candidate(
                link.number,
                link.blocks,
                link.slow_until > now,
                question.is_warm(link),
                link.round_trip_seconds or 0.0,
            )
            for link in self.links
            if link.number not in avoid and link.usable(now)
        ]

    def route(self, question: Question, blocks: Collection[int], avoid: frozenset[int]) -> StageRoute:
        return stage_route(blocks, self.candidates(question, avoid), question.spread)

    async def wait_for_change(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # ---- one traversal ----

    async def collect(self, question: Question, blocks: tuple[int, ...] | None = None) -> list[Part]:
        """Answers that cover every block (or these) once, or fewer where some are out of reach."""
        wanted, began = blocks or self.blocks, asyncio.get_running_loop().time()
        parts = await self._fetch(question, wanted, frozenset(), began)
        if not parts:
            raise StagesUnavailableError("no stage can be reached")
        lost = set(wanted).difference(*(part.blocks for part in parts))
        if lost and not self.config.may_degrade and not question.is_void:
            raise StagesUnavailableError(
                f"no stage serves blocks {sorted(lost)} now, and every block is needed"
            )
        if lost and not question.is_void:
            question.stats.degraded_blocks = sorted(lost.union(question.stats.degraded_blocks))
        return parts

    async def _fetch(
        self, question: Question, blocks: tuple[int, ...], avoid: frozenset[int], began: float
    ) -> list[Part]:
        """`began` is when the traversal did, however often its blocks were asked for since."""
        route = self.route(question, blocks, avoid)
        legs = [self._leg(question, self.links[link], part, avoid, began) for link, part in route.legs]
        if route.missing:
            legs.append(self._await_return(question, route.missing, began))
        return await _all(legs)

    async def _await_return(self, question: Question, missing: tuple[int, ...], began: float) -> list[Part]:
        """Ask again when a stage comes back in time; give the blocks up when none does."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            since = max(self._missing_since(block, now, began) for block in missing)
            if question.is_void or now >= min(since + self.config.degrade_seconds, question.deadline):
                return []
            await self.wait_for_change(HEALTH_POLL_SECONDS)
            # Only where a stage can be asked: one that drains is within reach and is no answer, and asking
            # for its blocks again would end here again, one call deeper at every look.
            if self.route(question, missing, frozenset()).legs:
                return await self._fetch(question, missing, frozenset(), began)

    def _missing_since(self, block: int, now: float, began: float) -> float:
        """When the block's last stage went away; `began` where one is within reach (it drains, or fails
        whatever it is asked), or none ever held it."""
        # From when the stage went away, not from when we asked: a block that is known to be gone costs no
        # request its two seconds again. And from when the traversal began, not from this look: a stage that
        # failed every question was asked again every 50 ms, one call deeper, until Python's stack was full.
        times = [link.lost_at(now) for link in self.links if block in link.blocks]
        lost = [time for time in times if time is not None]
        return max(lost) if lost and len(lost) == len(times) else began

    async def _leg(
        self,
        question: Question,
        link: StageLink,
        blocks: tuple[int, ...],
        avoid: frozenset[int],
        began: float,
    ) -> list[Part]:
        """One stage's share of the question: its own answer, or others' where it fails or lags."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        avoid |= {link.number}
        cancelled, asking, racing, beaten = me.cancelling(), True, False, False
        others: list[asyncio.Task[list[Part]]] = []

        async def instead() -> list[Part]:
            nonlocal racing
            # Of a void question the answer itself is waited for: until then the stage counts it as under way.
            while True:
                now = loop.time()
                lost = link.lost_at(now)
                if question.is_void:
                    pass
                elif not self.route(question, blocks, avoid).missing:
                    # It lags, and spares could answer for all its blocks: the first answer counts.
                    question.stats.retries += 1
                    racing = True
                    parts = await self._fetch(question, blocks, avoid, began)
                    # It lost: for some seconds it is asked last, so that the next traversals do not wait for
                    # a hedge.
                    link.slow_until = loop.time() + self.config.slow_seconds
                    return parts
                # No spare. A link that is lost for long enough is not waited for; one that is only slow is.
                elif lost is not None and now >= lost + self.config.degrade_seconds:
                    racing = True
                    return await self._fetch(question, blocks, avoid, began)
                await asyncio.sleep(HEALTH_POLL_SECONDS)

        def look_for_others() -> None:
            others.append(loop.create_task(instead()))
            others[0].add_done_callback(stop_asking)

        def stop_asking(task: asyncio.Task[list[Part]]) -> None:
            nonlocal beaten
            if asking:
                beaten = me.cancel()

        # Four times: a link's own jitter should not make every leg two legs.
        usual = link.latency_seconds or 0.0
        patience = max(self.config.hedge_seconds, 4 * usual) + question.patience_seconds
        # A timer, and the stage asked right here: a task for it, and waiting for that, took some 15 of the
        # 190 us that a token takes a gateway with 64 clients, and hardly a leg lags.
        timer = loop.call_later(patience, look_for_others)
        try:
            try:
                return [await question.ask(link, blocks)]
            finally:
                asking = False
                timer.cancel()
        except LinkError:
            if racing:
                return await others[0]
            # Nobody else may ask in its place from now on: two that ask one stage wait for one answer.
            for other in others:
                other.cancel()
            if not question.asks_again():
                return []
            question.stats.retries += 1
            return await self._fetch(question, blocks, avoid, began)
        except asyncio.CancelledError:
            # Either the others were first, or nobody waits for the leg any more.
            if not beaten or me.uncancel() > cancelled:
                raise
            return others[0].result()
        finally:
            if others:
                others[0].cancel()
                await asyncio.gather(*others, return_exceptions=True)


async def _all(legs: Sequence[Coroutine[Any, Any, list[Part]]]) -> list[Part]:
    """The parts of all legs; when one fails the others are cancelled and waited for."""
    if len(legs) == 1:
        return await legs[0]
    tasks = [asyncio.get_running_loop().create_task(leg) for leg in legs]
    try:
        return [part for parts in await asyncio.gather(*tasks) for part in parts]
    finally:
        # No leg outlives its traversal: a late answer would change a cache that the next one relies on.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
