"""Background threads of a program: they start together, stop together, and none of them fails unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blocktrain.errors import BlocktrainError


class Stopped(BlocktrainError):
    """A wait was cut short because the program is stopping; the end of a thread, not a failure."""


class Threads:
    """Runs functions in daemon threads; the first exception sets `stop` for all and `check` raises it.

    A thread that dies alone leaves a program that looks alive and does nothing, so every exception counts,
    also those that are not ours.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error  # the first one is the cause, later ones follow from it
                self.stop.set()

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> None:
        """Wait for each thread at most this long; one that hangs is a daemon and dies with the process."""
        for thread in self._threads:
            thread.join(seconds)
