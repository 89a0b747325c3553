"""Background threads of a worker: started together, stopped together, none fails unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blocktrain.client.coordinator import Stopped


class Crew:
    """Runs functions in threads; the first exception stops everybody and is raised by `check`."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
            self.stop.set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)
