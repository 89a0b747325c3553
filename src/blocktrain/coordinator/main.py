"""The program behind `blocktrain coordinator`: opens the run, serves it, drains on SIGTERM."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from blocktrain.client.address import RunLink, checked_url
from blocktrain.config import load_recipe
from blocktrain.connections import (
    ConnectionTable,
    LimitedConnection,
    limited_protocol,
    max_connections,
    tls_context,
)
from blocktrain.coordinator.http.app import create_app
from blocktrain.coordinator.notices import notified
from blocktrain.coordinator.operator_notes import keep_address, make_display, opening_lines
from blocktrain.coordinator.service import LOCK_FILE, Coordinator, in_use, opened
from blocktrain.data.corpora import open_text
from blocktrain.errors import StorageError, UserError
from blocktrain.files import is_locked
from blocktrain.listening import open_port, url_for_others, url_of
from blocktrain.threads import Threads
from blocktrain.training.checkpoint import starting_blocks
from blocktrain.training.setup import Setup
from blocktrain.wire.messages import ErrorAnswer, ErrorBody, ErrorReason, StatusAnswer

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 * 1024
DRAIN_SECONDS = 20
KEEP_ALIVE_SECONDS = 75
WATCH_PAUSE_SECONDS = 2.0
"""A status of many workers costs some milliseconds; rounds and evaluations in it are not lost in between."""
LAST_WATCH_SECONDS = 5.0
SWITCH_SECONDS = 0.0005
"""How long a thread of Python waits for another that computes. A request changes threads a dozen times, and
with Python's 5 ms each a reveal took 10 s while the blocks of 1,000 workers were merged."""

Watch = Callable[[StatusAnswer], None]
"""Called with the state of the swarm whenever it changed: how metrics.jsonl is written."""


@dataclass(frozen=True)
class Tls:
    """PEM files: the certificate with its chain, and its key."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Tells what is wrong with the files, so it is made before a run is opened for them."""
        return tls_context(self.certificate, self.key)

    def pin(self) -> str | None:
        """What a link must carry for clients to believe the certificate: its SHA-256 where it signed itself.

        One that an authority signed needs none, and its renewal would break the links.
        """
        certificate = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        if certificate.issuer != certificate.subject:
            return None
        return certificate.fingerprint(SHA256()).hex()


class CoordinatorServer(uvicorn.Server):
    """Says when it is ready, and tells the coordinator to drain as soon as it is asked to stop."""

    def __init__(
        self,
        config: uvicorn.Config,
        coordinator: Coordinator,
        ready: Callable[[], None],
        connections: ConnectionTable[LimitedConnection],
    ) -> None:
        super().__init__(config)
        self._coordinator, self._ready, self.connections = coordinator, ready, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not the inherited one, which raises the signal again before a merge under way is finished."""
        # Event streams end when they see the flag; without it they would hold the server for DRAIN_SECONDS.
        self._coordinator.drain()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = self.connections.closing = True


def run_coordinator(
    recipe_path: Path,
    overrides: Sequence[str] = (),
    *,
    data_dir: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    database_url: str | None = None,
    blobs_url: str | None = None,
    gateway: str | None = None,
    reference: str | None = None,
    tls: Tls | None = None,
    watch: Watch | None = None,
    start: Path | None = None,
    webhook: str | None = None,
) -> None:
    """Serve the run of a recipe until SIGTERM or Ctrl-C; port 0 takes a free one and prints it. A new run
    begins from the checkpoint `start`, where one is given."""
    recipe = load_recipe(recipe_path, overrides)
    # What an operator can get wrong (files, port) comes before loading text and opening the run: that can
    # take minutes.
    if tls is not None:
        tls.context()
    if webhook is not None:
        checked_url(webhook, "a webhook")
    # Before the port, which the other one has as well: told to take another, its host would come back here.
    lock = data_dir / LOCK_FILE
    if database_url is None and is_locked(lock):
        raise UserError(in_use(data_dir))
    sys.setswitchinterval(SWITCH_SECONDS)
    with open_port(host, port) as listener:
        text = open_text(recipe)
        setup = Setup.of_swarm(recipe, text.manifest.vocabulary)
        first = None if start is None else starting_blocks(start, setup)[0]
        display = make_display(gateway, reference, text.sha256)
        with opened(
            recipe,
            text,
            data_dir,
            database_url=database_url,
            blobs_url=blobs_url,
            display=display,
            start=first,
        ) as coordinator:
            scheme = "http" if tls is None else "https"
            url, pin = url_of(listener, scheme), None if tls is None else tls.pin()
            display.pin = pin
            shared = url_for_others(listener, scheme)

            def ready() -> None:
                keep_address(data_dir, shared, pin)
                admission = coordinator.resources.run.recipe.trust.admission
                link = str(RunLink(shared, pin=pin))
                for line in opening_lines(coordinator.status(), admission, data_dir, link):
                    print(line, file=sys.stderr)
                print(f"coordinator ready url={url}", flush=True)

            server = make_server(coordinator, ready, tls)
            with watched(coordinator, watch), notified(coordinator, webhook):
                server.run(sockets=[listener])
    print("stopped; the same command goes on from here", file=sys.stderr)


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
        stop.wait(WATCH_PAUSE_SECONDS)
        return False

    threads = Threads(stop)
    threads.repeat(
        "metrics", write, coordinator.metrics.failed, pause_seconds=WATCH_PAUSE_SECONDS, changes=changes
    )
    try:
        yield
    finally:
        stop.set()
        changes.notify()
        threads.join(LAST_WATCH_SECONDS)
        try:
            watch(coordinator.status())  # the end of a run is told too
        except StorageError as error:
            log.error("cannot write metrics down: %s", error)


def make_server(
    coordinator: Coordinator, ready: Callable[[], None], tls: Tls | None = None
) -> CoordinatorServer:
    protocol = limited_protocol(max_connections(), _explain, tls=None if tls is None else tls.context())
    config = uvicorn.Config(
        create_app(coordinator),
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return CoordinatorServer(config, coordinator, ready, protocol.table)


def _explain(status: int, message: str) -> str:
    """What a connection is told that never became a request."""
    reason = ErrorReason.TOO_SLOW if status == 408 else ErrorReason.INVALID_MESSAGE
    return ErrorAnswer(error=ErrorBody(reason=reason, message=message)).model_dump_json(exclude_none=True)


def main(arguments: Sequence[str]) -> None:
    """For tests and benchmarks, which start this program without the command line's extras."""
    recipe, data_dir, port, database, blobs, *overrides = arguments
    run_coordinator(
        Path(recipe),
        overrides,
        data_dir=Path(data_dir),
        port=int(port),
        database_url=database or None,
        blobs_url=blobs or None,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    main(sys.argv[1:])
