"""A virtual clock: events in order of time, and of creation where times are equal. No threads, no waiting."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._created = 0
        self._events: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        """Call `action` at `time`; a time that has passed means as soon as possible."""
        # The number orders events of one moment, so a run repeats itself; actions cannot be compared.
        self._created += 1
        heapq.heappush(self._events, (max(time, self.now), self._created, action))

    def run(self, until: Callable[[], bool]) -> bool:
        """Let time pass until a condition holds; False if nothing is left that could happen."""
        while not until():
            if not self._events:
                return False
            self.now, _, action = heapq.heappop(self._events)
            action()
        return True
