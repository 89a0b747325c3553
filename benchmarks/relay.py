"""A wide-area network in front of one address: what passes in either direction comes `delay` seconds later.

    python benchmarks/relay.py 127.0.0.1:9000 0.06

Prints `ready HOST:PORT` and serves until it is ended. Threads that sleep, which are late by a tenth of a
millisecond: an event loop rounds its timers up to a whole one, and in the four hops of a traversal that would
be counted as the product's. No rate limit and no loss. Imports no torch, so that it starts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from queue import SimpleQueue

CHUNK_BYTES = 1 << 16

_Held = SimpleQueue[tuple[float, bytes]]
"""What is under way, and when each piece of it is due. The last one is empty."""


def receive(source: socket.socket, held: _Held, delay: float) -> None:
    data = b"begun"
    while data:
        try:
            data = source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        held.put((time.monotonic() + delay, data))


def send(target: socket.socket, held: _Held) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, data = held.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)


def relay(server: socket.socket, target: tuple[str, int], delay: float) -> None:
    """Without end: every connection to `server` is one to the target."""
    while True:
        client, _ = server.accept()
        stage = socket.create_connection(target)
        for one, other in ((client, stage), (stage, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held: _Held = SimpleQueue()
            threading.Thread(target=receive, args=(one, held, delay), daemon=True).start()
            threading.Thread(target=send, args=(other, held), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("delay", type=float)
    arguments = parser.parse_args()
    host, _, port = arguments.target.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"ready 127.0.0.1:{server.getsockname()[1]}", flush=True)
        relay(server, (host, int(port)), arguments.delay)


if __name__ == "__main__":
    main()
