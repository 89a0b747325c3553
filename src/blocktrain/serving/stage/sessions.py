"""What a stage remembers between traversals: caches by session, bounded, least recently used out first.

Pure state with the clock passed in. (session, epoch, traversal) names one traversal and no other: the same
again is answered from memory, an older one is stale, and a newer one must continue what is cached or be
sent from the start.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from blocktrain.serving.blocks import BlockCache, WeighedRows
from blocktrain.wire.frames import prefix_checksum

SessionKey = tuple[str, int]
"""The client's name from HELLO and the number it gave the session."""


class Step(Enum):
    """What to do with a TRAVERSE."""

    RUN = "new ids continue the cache"
    REPLAY = "the same traversal again: answer as before"
    RESEND = "the cache is gone or differs: ask for all ids"
    STALE = "older than what was already asked: a duplicate or a straggler"


@dataclass
class Session:
    epoch: int
    blocks: tuple[int, ...]
    caches: dict[int, BlockCache]
    ids: list[int] = field(default_factory=list)
    checksum: int = 0
    """`prefix_checksum` of the ids."""
    traversal: int = 0
    outcome: asyncio.Future[WeighedRows] | None = None
    """The rows of the latest traversal, done or not."""
    waiting: list[tuple[int, asyncio.Future[WeighedRows]]] = field(default_factory=list)
    """Bases and rows of traversals that were not done when the latest came."""
    used: float = 0.0
    counted: int = 0
    """Positions of it in the store's sum."""

    @property
    def may_be_copied(self) -> bool:
        """Whether another session may begin with its caches, as its ids say, once what is under way of it has
        run."""
        if self.outcome is None or not self.outcome.done():
            return self.outcome is not None
        return not self.outcome.cancelled() and self.outcome.exception() is None

    def supersede(self, base: int) -> None:
        """A traversal goes on from here: those behind this place were sent on drafts that did not hold, and
        their client waits for no rows of them."""
        for start, rows in self.waiting:
            if start >= base:
                rows.cancel()
        self.waiting = [one for one in self.waiting if not one[1].done()]


class Asked(NamedTuple):
    """A TRAVERSE as far as its session is concerned."""

    epoch: int
    traversal: int
    base: int
    blocks: tuple[int, ...]
    prefix: int


def next_step(session: Session | None, asked: Asked) -> Step:
    # A new epoch starts from nothing, so it can only begin with the first id.
    if session is None or asked.epoch > session.epoch:
        return Step.RUN if asked.base == 0 else Step.RESEND
    if asked.epoch < session.epoch or asked.traversal < session.traversal:
        return Step.STALE
    # A client that lost the connection asks again; computing again would move the caches a second time.
    if asked.traversal == session.traversal:
        return Step.REPLAY
    # The checksum guards against a mistake of either side; a wrong prefix would give a wrong text silently.
    continues = asked.base <= len(session.ids) and asked.blocks == session.blocks
    if not continues:
        return Step.RESEND
    # Mostly the text goes on where it ended; where a draft was wrong, before that.
    is_end = asked.base == len(session.ids)
    found = session.checksum if is_end else prefix_checksum(session.ids[: asked.base])
    return Step.RUN if found == asked.prefix else Step.RESEND


class SessionStore:
    def __init__(self, *, max_sessions: int, max_positions: int, idle_seconds: float) -> None:
        self.max_sessions, self.max_positions, self.idle_seconds = max_sessions, max_positions, idle_seconds
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self.num_evicted = 0
        # Kept and not added up: with 64 clients the sum over all sessions took a tenth of a stage's time.
        self.num_positions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def put(self, key: SessionKey, session: Session, now: float) -> None:
        """Keep the session as the most recently used, and evict others until the bounds hold."""
        # Most recently used last: an OrderedDict is the queue of evictions.
        session.used = now
        if self._sessions.get(key) is not session:
            self.release(key)
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        self.num_positions += len(session.ids) - session.counted
        session.counted = len(session.ids)
        # Evicting loses no text: the client is told RESEND and sends its ids again.
        while len(self._sessions) > 1:
            oldest = next(iter(self._sessions.values()))
            too_many = len(self._sessions) > self.max_sessions or self.num_positions > self.max_positions
            if not too_many and now - oldest.used <= self.idle_seconds:
                break
            self.release(next(iter(self._sessions)))
            self.num_evicted += 1

    def release(self, key: SessionKey) -> Session | None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.num_positions -= session.counted
            session.counted = 0
        return session

    def expire(self, now: float) -> int:
        """Drop sessions nobody used for `idle_seconds`; returns how many."""
        idle = [key for key, session in self._sessions.items() if now - session.used > self.idle_seconds]
        for key in idle:
            self.release(key)
        self.num_evicted += len(idle)
        return len(idle)
