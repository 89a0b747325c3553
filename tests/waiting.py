"""Waiting for a condition. Nothing in the tests sleeps for a time and hopes.

The deadline is there to end a test that hangs. It is far above what anything takes, because a machine that
does ten other things is no reason to fail: a condition that comes true is noticed within 10 ms, or a tenth of
what it took, whatever the deadline is. Asking costs: a signed request takes client and coordinator 9 ms of
processor time, so asking every 10 ms would slow down what is waited for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = float(os.environ.get("TEST_PATIENCE_SECONDS", "300"))
"""More where a machine may stand still for longer."""
POLL_SECONDS = 0.01
MAX_POLL_SECONDS = 0.25


def pause_after(waited_seconds: float) -> float:
    """How long to wait until the next look."""
    return min(MAX_POLL_SECONDS, POLL_SECONDS + waited_seconds / 10)


def until(what: str, condition: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
    """The first true value of `condition`."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < seconds:
        if value := condition():
            return value
        time.sleep(pause_after(waited))
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


async def until_async(condition: Callable[[], object]) -> None:
    """Until `condition` is true, while the event loop goes on."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(POLL_SECONDS)
