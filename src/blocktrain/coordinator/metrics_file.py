"""Calls a function with the state of the swarm whenever it changed: how metrics.jsonl is written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blocktrain.coordinator.service import Coordinator
from blocktrain.errors import StorageError
from blocktrain.threads import Threads
from blocktrain.wire.messages import StatusAnswer

log = logging.getLogger(__name__)

PAUSE_SECONDS = 2.0
"""A status of many workers costs some milliseconds; rounds and evaluations in it are not lost in between."""
LAST_WRITE_SECONDS = 5.0

Watch = Callable[[StatusAnswer], None]


@contextmanager
def watched(coordinator: Coordinator, watch: Watch | None) -> Iterator[None]:
    """Calls `watch` in a thread of its own, and once more at the end."""
    if watch is None:
        yield
        return
    stop, changes = threading.Event(), coordinator.resources.changes

    def write() -> bool:
        watch(coordinator.status())
        # `repeat` looks for changes since before the status, so one that comes in this pause is told next.
        stop.wait(PAUSE_SECONDS)
        return False

    threads = Threads(stop)
    threads.repeat("metrics", write, coordinator.metrics.failed, pause_seconds=PAUSE_SECONDS, changes=changes)
    try:
        yield
    finally:
        stop.set()
        changes.notify()
        threads.join(LAST_WRITE_SECONDS)
        try:
            watch(coordinator.status())  # the end of a run is told too
        except StorageError as error:
            log.error("cannot write metrics down: %s", error)
