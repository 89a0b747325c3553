"""Ctrl-C and SIGTERM as an event that long work looks at between steps.

A handler runs in the main thread, perhaps while that thread holds the event's own lock in `wait`: setting
the event there would wait for itself for ever (seen once, under load). So a thread sets it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set; the second signal ends the process at once."""

    def end(number: int) -> None:
        os._exit(128 + number)

    stop = threading.Event()
    for number in STOPPING_SIGNALS:
        signal.signal(number, _handler(stop, end))
    return stop


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """The same for a while; the second signal interrupts, so that what was started can be ended."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    stop = threading.Event()
    handler = _handler(stop, interrupt)
    before = {number: signal.signal(number, handler) for number in STOPPING_SIGNALS}
    try:
        yield stop
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _handler(stop: threading.Event, second: Callable[[int], None]) -> Callable[[int, FrameType | None], None]:
    asked = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal asked
        if asked:
            second(number)
        asked = True
        threading.Thread(target=stop.set, daemon=True).start()

    return on_signal
