"""The engine that new requests for a model get, and older ones whose answers are not complete yet.

An answer is written by one engine from its first token to its last, so a newer model changes no text under
way. An engine that was replaced is closed once nobody has used it for a while.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from blocktrain.errors import UserError
from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.requests import ServingError, StagesUnavailableError

RETIRE_SECONDS = 2.0
"""An old engine without answers is looked at again after this long before it is closed: a request may have
been given it and not have begun."""


class Engines:
    def __init__(self, *engines: TextEngine) -> None:
        """One for each model that is served, the first for requests that name none."""
        self.newest = {engine.model.name: engine for engine in engines}
        """By the name of the model."""
        if len(self.newest) < len(engines):
            names = ", ".join(engine.model.name for engine in engines)
            raise UserError(f"requests name a model, and two of these have one name: {names}")
        self._answers: Counter[int] = Counter()
        self._retiring: set[asyncio.Task[None]] = set()

    @contextmanager
    def used(self, engine: TextEngine) -> Iterator[None]:
        """While an answer is written by it."""
        self._answers[id(engine)] += 1
        try:
            yield
        finally:
            self._answers[id(engine)] -= 1

    async def replace(self, engine: TextEngine) -> None:
        """Give new requests for its model this engine, if every block is there for it; ServingError
        otherwise."""
        name = engine.model.name
        try:
            if name not in self.newest:
                raise ServingError(f"expected a new version of {', '.join(self.newest)}, found {name!r}")
            await engine.start()
            ready, reason = engine.ready
            if not ready or reason != "ready":
                raise StagesUnavailableError(f"the stages do not serve the new model yet: {reason}")
        except BaseException:
            await engine.close()
            raise
        old, self.newest[name] = self.newest[name], engine
        task = asyncio.create_task(self._retire(old))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, engine: TextEngine) -> None:
        idle = 0
        while idle < 2:
            await asyncio.sleep(RETIRE_SECONDS)
            idle = 0 if self._answers[id(engine)] else idle + 1
        del self._answers[id(engine)]
        await engine.close()

    async def close(self) -> None:
        for task in list(self._retiring):
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.newest.values()))
