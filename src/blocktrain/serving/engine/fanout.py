"""One traversal over the stages: every block asked at once, spares when one fails or lags, fewer if need be.

The time it takes is the slowest leg's round trip, not the sum. A leg that breaks is asked of another
stage at once; a leg that lags is asked of a spare as well, and the first answer counts; blocks that
nobody serves any more are left out once they have been gone for `degrade_seconds`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.serving.engine.api import StagesUnavailableError
from blocktrain.serving.engine.link import LinkError, StageLink
from blocktrain.serving.engine.routing import Candidate, Route, cheapest_route

POLL_SECONDS = 0.05
"""How often a waiting leg looks at its link's health."""


@dataclass(frozen=True, kw_only=True)
class FanoutConfig:
    degrade_seconds: float = 2.0
    """How long a block may be out of reach before answers are given without it."""
    hedge_seconds: float = 0.5
    """A leg slower than this, and than four times the link's usual time, is asked of a spare too."""
    slow_seconds: float = 5.0
    """How long a stage that lost to its spare is asked last."""


@dataclass(frozen=True)
class Part:
    """What some blocks said: weighted log-probs [R, V] and how far each may be from the exact value."""

    blocks: tuple[int, ...]
    rows: NDArray[np.float64]
    tolerance: NDArray[np.float64]


class Call(Protocol):
    """One question, put to any stage."""

    deadline: float
    """On the event loop's clock."""
    retries: int
    spread: int

    @property
    def patience_seconds(self) -> float:
        """Time for computing before a leg counts as lagging."""

    def is_warm(self, link: StageLink) -> bool: ...

    async def ask(self, link: StageLink, blocks: tuple[int, ...]) -> Part:
        """The stage's answer, or LinkError."""


class Fanout:
    def __init__(self, links: Sequence[StageLink], num_blocks: int, config: FanoutConfig) -> None:
        self.links, self.config = list(links), config
        self.blocks = tuple(range(num_blocks))
        self._changed = asyncio.Event()
        for link in self.links:
            link.changed = self._changed.set

    # ---- what is known of the fleet ----

    def covered(self) -> frozenset[int]:
        """Blocks that some stage has announced, reachable now or not."""
        return frozenset().union(*(link.blocks for link in self.links))

    def lost_at(self, block: int, now: float) -> float | None:
        """Since when no usable stage serves the block; None while one does."""
        times = [link.lost_at(now) for link in self.links if block in link.blocks]
        if any(time is None for time in times):
            return None
        return max((time for time in times if time is not None), default=0.0)

    def candidates(self, avoid: Iterable[int], call: Call) -> list[Candidate]:
        now = asyncio.get_running_loop().time()
        return [
            Candidate(link.number, link.blocks, link.slow_until > now, call.is_warm(link))
            for link in self.links
            if link.number not in avoid and link.usable(now)
        ]

    async def wait_for_change(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def missing(self, parts: Iterable[Part]) -> set[int]:
        """Blocks that answers do not cover."""
        return set(self.blocks) - {block for part in parts for block in part.blocks}

    # ---- one traversal ----

    async def collect(self, call: Call, blocks: tuple[int, ...] | None = None) -> list[Part]:
        """Answers that cover every block (or these) once, or fewer where some are out of reach."""
        parts = await self._fetch(blocks or self.blocks, frozenset(), call)
        if not parts:
            problems = "; ".join(link.problem for link in self.links if link.problem) or "none answers"
            raise StagesUnavailableError(f"no stage can be reached: {problems}")
        return parts

    async def _fetch(self, blocks: tuple[int, ...], avoid: frozenset[int], call: Call) -> list[Part]:
        route: Route = cheapest_route(blocks, self.candidates(avoid, call), call.spread)
        legs = [self._leg(self.links[link], part, avoid, call) for link, part in route.legs]
        if route.missing:
            legs.append(self._await_return(route.missing, call))
        return [part for parts in await _all(legs) for part in parts]

    async def _await_return(self, missing: tuple[int, ...], call: Call) -> list[Part]:
        """Ask again when a stage comes back in time; give the blocks up when none does."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            now = loop.time()
            lost = max(self.lost_at(block, now) or began for block in missing)
            if now >= min(lost + self.config.degrade_seconds, call.deadline):
                return []
            await self.wait_for_change(POLL_SECONDS)
            now = loop.time()
            back = [block for block in missing if self.lost_at(block, now) is None]
            if back:
                rest = tuple(block for block in missing if block not in back)
                legs = [self._fetch(tuple(back), frozenset(), call)]
                legs += [self._await_return(rest, call)] if rest else []
                return [part for parts in await _all(legs) for part in parts]

    async def _leg(
        self, link: StageLink, blocks: tuple[int, ...], avoid: frozenset[int], call: Call
    ) -> list[Part]:
        asked = asyncio.get_running_loop().create_task(call.ask(link, blocks))
        try:
            if await self._answered_in_time(asked, link, call):
                return await self._result(asked, link, blocks, avoid, call)
            return await self._overtake(asked, link, blocks, avoid | {link.number}, call)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _answered_in_time(self, asked: asyncio.Task[Part], link: StageLink, call: Call) -> bool:
        usual = link.latency_seconds or 0.0
        patience = max(self.config.hedge_seconds, 4 * usual) + call.patience_seconds
        done, _ = await asyncio.wait({asked}, timeout=patience)
        return bool(done)

    async def _result(
        self,
        asked: asyncio.Task[Part],
        link: StageLink,
        blocks: tuple[int, ...],
        avoid: frozenset[int],
        call: Call,
    ) -> list[Part]:
        """The answer of a finished leg, or what others answer instead."""
        try:
            return [asked.result()]
        except LinkError:
            call.retries += 1
            return await self._fetch(blocks, avoid | {link.number}, call)

    async def _overtake(
        self,
        asked: asyncio.Task[Part],
        link: StageLink,
        blocks: tuple[int, ...],
        avoid: frozenset[int],
        call: Call,
    ) -> list[Part]:
        """A leg that lags: the spare's answer or its own, whichever comes first."""
        loop = asyncio.get_running_loop()
        while not asked.done():
            now = loop.time()
            if not cheapest_route(blocks, self.candidates(avoid, call)).missing:
                return await self._race(asked, link, blocks, avoid, call)
            lost = link.lost_at(now)
            if lost is not None and now >= lost + self.config.degrade_seconds:
                return await self._fetch(blocks, avoid, call)
            await asyncio.wait({asked}, timeout=POLL_SECONDS)
        return await self._result(asked, link, blocks, avoid, call)

    async def _race(
        self,
        asked: asyncio.Task[Part],
        link: StageLink,
        blocks: tuple[int, ...],
        avoid: frozenset[int],
        call: Call,
    ) -> list[Part]:
        call.retries += 1
        loop = asyncio.get_running_loop()
        spare = loop.create_task(self._fetch(blocks, avoid, call))
        try:
            await asyncio.wait({asked, spare}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and asked.exception() is None:
                return [asked.result()]
            link.slow_until = loop.time() + self.config.slow_seconds
            return await spare
        finally:
            spare.cancel()
            await asyncio.gather(spare, return_exceptions=True)


async def _all(legs: Sequence[Coroutine[Any, Any, list[Part]]]) -> list[list[Part]]:
    """All results; when one fails the others are cancelled and waited for."""
    if len(legs) == 1:
        return [await legs[0]]
    tasks = [asyncio.get_running_loop().create_task(leg) for leg in legs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
