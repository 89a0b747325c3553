"""Ctrl-C and SIGTERM as an event that long work looks at between steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


def stop_on_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set; the second signal ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop
