"""A disk that is full for a while: everybody is told, the log stays short, and the run goes on afterwards."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from sqlalchemy import event

from blocktrain.cli.options import log_to_stderr
from blocktrain.connections import LOGGED_PER_MINUTE
from blocktrain.wire.messages import Outcome
from tests.coordinator.conftest import Running
from tests.coordinator.peer import Refused


@contextmanager
def logged_as_by_the_program() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level, stream = root.handlers[:], root.level, io.StringIO()
    root.handlers = []
    try:
        with redirect_stderr(stream):
            log_to_stderr()
        yield stream
    finally:
        root.handlers, root.level = before, level


@contextmanager
def full_disk(running: Running) -> Iterator[None]:
    """SQLite may use no page more than it has: what it says then is what it says on a full disk."""
    engine = running.coordinator.resources.store.engine

    def limit(connection: Any, *_: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1").close()  # it never goes below what is in use

    def lift(connection: Any, *_: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1073741823").close()

    event.listen(engine, "checkout", limit)
    try:
        yield
    finally:
        event.remove(engine, "checkout", limit)
        event.listen(engine, "checkout", lift)


def test_a_full_disk_is_told_to_workers_and_fills_no_log(running: Running) -> None:
    peer, stranger = running.peer(), running.peer(join=False)
    lease, first_minute = peer.lend(), time.monotonic() // 60
    with logged_as_by_the_program() as log, full_disk(running):
        told: list[str] = []
        for _ in range(20 * LOGGED_PER_MINUTE):  # the first ones still fit into its free pages
            try:
                stranger.join()
            except Refused as refusal:
                told.append(refusal.message)
    assert len(told) > 2 * LOGGED_PER_MINUTE
    assert set(told) == {"the coordinator's storage does not answer"}
    lines = [line for line in log.getvalue().splitlines() if "storage does not answer" in line]
    minutes = time.monotonic() // 60 - first_minute + 1
    assert 0 < len(lines) <= minutes * LOGGED_PER_MINUTE, log.getvalue()
    assert "disk is full" in lines[0]
    assert peer.deliver(lease).outcome == Outcome.ACCEPTED
    running.wait_for_version(lease.block, 1)
