"""Calls a function with the state of the swarm whenever it changed: how metrics.jsonl is written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blocktrain.coordinator.service import Coordinator
from blocktrain.errors import StorageError
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
    stop = threading.Event()
    thread = threading.Thread(target=_loop, args=(coordinator, watch, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        coordinator.resources.changes.notify()
        thread.join(LAST_WRITE_SECONDS)


def _loop(coordinator: Coordinator, watch: Watch, stop: threading.Event) -> None:
    changes = coordinator.resources.changes
    while True:
        # Read before the status: what changes meanwhile is told in the next turn, and the end is told too.
        ending, seen = stop.is_set(), changes.count
        try:
            watch(coordinator.status())
        except StorageError as error:
            log.error("cannot write metrics down: %s", error)
        if ending:
            return
        changes.wait(seen, PAUSE_SECONDS)
        stop.wait(PAUSE_SECONDS)
