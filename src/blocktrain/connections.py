"""Connections to a server of ours: how long one may take over a request, and how many there may be.

uvicorn bounds the size of a request's head, not its time, and serves as many connections as the system gives
it. This protocol closes slow ones. Where connections run out it closes the one that has kept us waiting for
longest, so that a crowd of silent or dribbling sockets cannot keep others out.

Covered: sockets that never begin TLS or a request, slow or unfinished heads (408), bytes that are not HTTP
(400), bodies that go on after their answer, readers that do not read, and more connections than the caps,
from one network or in all. Not covered: how long a body may take in all (the application's), and floods that
fill the line itself.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from blocktrain.errors import UserError
from blocktrain.listening import network_name

HEAD_SECONDS = 10.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
HANDSHAKE_SECONDS = 10.0
"""For TLS, from connecting. asyncio allows 60 s, in which 1,100 silent sockets held every descriptor."""
LINGER_SECONDS = 5.0
"""How long a body may go on after its answer; cut at once, the client might not see the answer."""
STALL_SECONDS = 60.0
"""An answer that does not move for this long is given up; at the least rate of bodies 1 MB would."""
MIN_BYTES_PER_SECOND = 16 * 1024
"""The slowest link a worker may have. Slower bodies only hold connections: with 500 slow sockets open an
honest round took 2.7 s (attack 14)."""
HEAD_PIECE_BYTES = 1024
"""h11 limits the length of a head only while it is incomplete, so a long one is fed to it in small pieces."""
MAX_PER_NETWORK = 256
"""Connections from one IPv4 address or IPv6 /64: four for each of the workers it may have."""
MAX_CONNECTIONS = 2000
OTHER_FILES = 200
"""Open files that are no connections: database, blobs, bodies being received."""
LOGGED_PER_MINUTE = 10
"""How often one message is logged. A server out of descriptors wrote 136 MB of asyncio's in a minute, a
coordinator on a full disk 5 to 10 lines a second of its own."""

Connection = TypeVar("Connection")
Explain = Callable[[int, str], str]
"""The server's own JSON for a status and a sentence."""


class ConnectionTable(Generic[Connection]):
    """The open connections, their networks, and since when those wait on their client that do."""

    def __init__(self, limit: int, limit_per_network: int) -> None:
        self._limit, self._limit_per_network = limit, limit_per_network
        self._network: dict[Connection, str] = {}
        self._count: Counter[str] = Counter()
        self._waiting: dict[Connection, float] = {}
        self.closing = False
        """The server stops. uvicorn tells open connections so once: one that it had just accepted stayed, and
        a coordinator took 20 s and an error to end after Ctrl-C."""

    def enter(self, new: Connection, network: str, now: float) -> Connection | None:
        """Register a connection; returns the one to close to make room: the one that has waited for its
        client for longest, or the new one if all are at work."""
        surplus: Connection | None = None
        # The search looks at no more than the server's 2000, far less work than accepting the connection was.
        if self._count[network] >= self._limit_per_network:
            # A network that is over its cap pays with its own connections.
            surplus = self._longest_waiting({network}) or new
        elif len(self._network) >= self._limit:
            # A full server takes from who has most: nine addresses with 2,000 slow bodies kept 28 of 40
            # newcomers out while any idle connection, the newcomer's own too, was the first to go.
            most = max(self._count.values())
            largest = {name for name, count in self._count.items() if count == most}
            surplus = self._longest_waiting(largest) or self._longest_waiting(None) or new
        self._network[new], self._waiting[new] = network, now
        self._count[network] += 1
        return surplus

    def _longest_waiting(self, networks: set[str] | None) -> Connection | None:
        found = [one for one in self._waiting if networks is None or self._network[one] in networks]
        return min(found, key=self._waiting.__getitem__, default=None)

    def leave(self, connection: Connection) -> None:
        """Safe to repeat."""
        self._waiting.pop(connection, None)
        network = self._network.pop(connection, None)
        if network is not None:
            self._count[network] -= 1
            # A Counter keeps zeros, and a stranger can come from any number of networks.
            if not self._count[network]:
                del self._count[network]

    def waits(self, connection: Connection, since: float) -> None:
        """It waits for its client: for a request, or for more of a body."""
        if connection in self._network:
            self._waiting[connection] = since

    def works(self, connection: Connection) -> None:
        """It has a whole request and owes the answer: nobody takes its place."""
        self._waiting.pop(connection, None)


class LimitedConnection(H11Protocol):
    """One connection. A server has its own subclass, with the table of its connections."""

    table: ConnectionTable[LimitedConnection]
    explain: Explain
    tls: ssl.SSLContext | None = None
    stall_seconds: float | None = None
    """STALL_SECONDS where None."""
    _opened = False
    """Past TLS, where there is TLS."""
    _early = b""
    """What came with the last bytes of the handshake."""
    _handshake: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _limited = ""
    """What the running timer is for."""
    _stall: asyncio.TimerHandle | None = None
    _body_began: float | None = None
    _body_bytes = 0

    # --- coming and going ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # Counted before the handshake: uvicorn's own TLS tells the protocol of a connection only after it.
        peer = transport.get_extra_info("peername")
        surplus = self.table.enter(self, network_name(peer[0]) if peer else "", self.loop.time())
        if surplus is not None:
            self.table.leave(surplus)
            surplus.transport.abort()
        if self.tls is None:
            self._open(transport)
        elif surplus is not self:
            self.connections.add(self)
            transport.pause_reading()  # what comes now is for the handshake
            self._handshake = self.loop.create_task(self._shake_hands(transport, self.tls))

    async def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError:  # a client that says nothing, no TLS, or goes away; an SSLError is one too
            secured = None
        if secured is None:
            self.table.leave(self)
            self.connections.discard(self)
            transport.abort()
            return
        self._open(secured)
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def _open(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._opened = True
        self._await_head()
        if self.table.closing:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.leave(self)
        self._cancel_timer()
        self._cancel_stall()
        if self._opened:
            super().connection_lost(exc)
        self.connections.discard(self)

    def shutdown(self) -> None:
        if self._opened:
            super().shutdown()
        else:
            self.transport.abort()

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        if not self._opened:
            self._early += data
            return
        while data and not self.transport.is_closing():
            in_head = self.conn.their_state is h11.IDLE
            piece, data = (data[:HEAD_PIECE_BYTES], data[HEAD_PIECE_BYTES:]) if in_head else (data, b"")
            super().data_received(piece)
            self._body_bytes += len(piece)
        self._set_time_limit()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        waits = self.conn.their_state is h11.IDLE
        if waits:
            self.table.waits(self, self.loop.time())
        # Between two requests uvicorn's own keep-alive applies; a limit of ours begins with the first byte.
        if not waits or self.conn.trailing_data[0]:
            self._set_time_limit()

    def _set_time_limit(self) -> None:
        """Begin or end the limit that fits what the connection is doing."""
        if self.transport.is_closing():
            return
        theirs, ours = self.conn.their_state, self.conn.our_state
        if theirs is not h11.SEND_BODY:
            self._body_began = None
        if theirs is h11.IDLE:
            self._await_head()
        elif theirs is h11.SEND_BODY and ours in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._limit("linger", LINGER_SECONDS, self.transport.close)
        elif theirs is h11.SEND_BODY:
            # What has come at the least rate or faster has kept nobody waiting: a long upload over a thin
            # line keeps its place, and a body that dribbles is the first to lose it.
            if self._body_began is None:
                self._body_began, self._body_bytes = self.loop.time(), 0
            self.table.waits(self, self._body_began + self._body_bytes / MIN_BYTES_PER_SECOND)
            self._cancel_timer()
        else:
            self.table.works(self)
            self._cancel_timer()

    def _await_head(self) -> None:
        self._limit("head", HEAD_SECONDS, self._refuse_slow_head)

    def _refuse_slow_head(self) -> None:
        # Who has sent nothing at all needs no answer: browsers open connections before they need them.
        if self.conn.trailing_data[0]:
            self._refuse(408, f"expected the whole request head within {HEAD_SECONDS:g} s")
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn would say it in plain text."""
        self._refuse(400, f"this is no HTTP/1.1 request: {msg}")
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        body = type(self).explain(status, message).encode()
        words = "Request Timeout" if status == 408 else "Bad Request"
        head = f"HTTP/1.1 {status} {words}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def _limit(self, what: str, seconds: float, end: Callable[[], None]) -> None:
        # A limit that runs already goes on: more bytes, one at a time, must not extend it.
        if self._limited != what:
            self._cancel_timer()
            self._limited, self._timer = what, self.loop.call_later(seconds, end)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._limited, self._timer = "", None

    # --- answers ---

    def pause_writing(self) -> None:
        if not self._opened:
            return
        super().pause_writing()
        self._cancel_stall()
        seconds = STALL_SECONDS if self.stall_seconds is None else self.stall_seconds
        self._stall = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if not self._opened:
            return
        super().resume_writing()
        self._cancel_stall()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


class LogRate(logging.Filter):
    """Lets a message of this level or above through LOGGED_PER_MINUTE times a minute, whatever its
    arguments; the last one says so."""

    def __init__(self, level: int = logging.NOTSET, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._level, self._clock = level, clock
        self._minute, self._seen = 0, Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < self._level:
            return True
        minute = int(self._clock() // 60)
        if minute != self._minute:
            self._minute, self._seen = minute, Counter()
        # Messages are few and fixed; the text before the first line break is the template.
        words = str(record.msg).partition("\n")[0][:80]
        self._seen[words] += 1
        if self._seen[words] == LOGGED_PER_MINUTE:
            record.msg = f"{record.msg} (more of these are left out until the next minute)"
        return self._seen[words] <= LOGGED_PER_MINUTE


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Of PEM files that a person named: the certificate with its chain, and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"cannot use --tls-cert {certificate} with --tls-key {key}: "
            f"{error.strerror or error}; expected PEM files that belong together"
        ) from None
    return context


def limited_protocol(
    max_connections: int,
    explain: Explain,
    *,
    per_network: int | None = None,
    tls: ssl.SSLContext | None = None,
    stall_seconds: float | None = None,
) -> type[LimitedConnection]:
    """The protocol of one server, for uvicorn's `http` setting."""
    table = ConnectionTable[LimitedConnection](max_connections, per_network or MAX_PER_NETWORK)
    own: dict[str, Any] = {"table": table, "tls": tls, "stall_seconds": stall_seconds}
    log = logging.getLogger("asyncio")
    if not any(isinstance(one, LogRate) for one in log.filters):
        log.addFilter(LogRate())
    return type("ServerConnection", (LimitedConnection,), {**own, "explain": staticmethod(explain)})


def max_connections() -> int:
    """As many as this process may have files open for, once it has asked the system for enough."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    if soft < wanted and soft != resource.RLIM_INFINITY:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - OTHER_FILES))
