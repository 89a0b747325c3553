"""A coordinator served by a thread of this process, on a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blocktrain.coordinator.main import Tls, make_server
from blocktrain.coordinator.service import Coordinator
from blocktrain.listening import open_port, url_of
from tests.waiting import PATIENCE_SECONDS


@contextmanager
def listening(coordinator: Coordinator, tls: Tls | None = None) -> Iterator[str]:
    """Its address, while it serves."""
    listener, ready = open_port("127.0.0.1", 0), threading.Event()
    server = make_server(coordinator, ready.set, tls)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_SECONDS)
    try:
        yield url_of(listener, "http" if tls is None else "https")
    finally:
        coordinator.drain()
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)
