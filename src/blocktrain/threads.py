"""Background threads of a program: they start together, stop together, and none of them fails unseen."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from blocktrain.errors import BlocktrainError

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Pause after a failure of a repeated step: long enough not to fill the log, short enough to be missed."""
LOW_PRIORITY = 10


class Stopped(BlocktrainError):
    """A wait was cut short because the program is stopping; the end of a thread, not a failure."""


class Changes:
    """Wakes threads that wait for something to be written; a change between two waits is not missed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def notify(self) -> None:
        with self._condition:
            # A counter and not a flag: a waiter names what it has seen, so a change between its look and its
            # wait counts.
            self._count += 1
            self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Until there are more changes than were `seen`, or the time is over."""
        with self._condition:
            self._condition.wait_for(lambda: self._count > seen, seconds)


class Threads:
    """Runs functions in daemon threads; the first exception sets `stop` for all and `check` raises it.

    A thread that dies alone leaves a program that looks alive and does nothing, so every exception counts,
    also those that are not ours.
    """

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except Stopped:
                pass
            except BaseException as error:
                self._error = self._error or error  # the first one is the cause, later ones follow from it
                self.stop.set()

        # Daemons: one that hangs in a download must not keep a program from ending.
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads = [old for old in self._threads if old.is_alive()] + [thread]
        thread.start()
        return thread

    def repeat(
        self,
        name: str,
        step: Callable[[], bool],
        failed: Callable[[str], None],
        *,
        pause_seconds: float,
        changes: Changes | None = None,
        low_priority: bool = False,
    ) -> threading.Thread:
        """Call `step` until `stop` is set, with a pause after each that had nothing to do; a change ends it.

        No failure ends the thread, whatever it is (torch raises RuntimeError for anything, out of memory
        included): it is logged, `failed` counts it, and the step is tried again a little later. That it works
        again is logged too.
        """

        def work() -> None:
            failures = 0
            if low_priority:
                lower_priority()
            while not self.stop.is_set():
                # Before the step: what changes while it runs ends the pause after it.
                seen = 0 if changes is None else changes.count
                try:
                    busy = step()
                except BlocktrainError as error:  # the operator's or a service's, and says so in words
                    log.error("%s failed, tries again: %s", name, error)
                except Exception:
                    log.exception("%s failed, tries again", name)
                else:
                    if failures:
                        log.warning("%s works again after %d failures", name, failures)
                        failures = 0
                    if not busy and changes is not None:
                        changes.wait(seen, pause_seconds)
                    elif not busy:
                        self.stop.wait(pause_seconds)
                    continue
                failures += 1
                failed(name)
                self.stop.wait(RETRY_SECONDS)

        return self.start(name, work)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> None:
        """Wait for each thread at most this long; one that hangs is a daemon and dies with the process."""
        for thread in self._threads:
            thread.join(seconds)


def lower_priority() -> None:
    """Lower the priority of the calling thread, where the system can: requests and merges go first."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
    except (AttributeError, OSError):
        log.debug("this system has no priorities for threads")
