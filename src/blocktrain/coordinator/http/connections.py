"""Connections to the coordinator: how long one may take over a request, and how many there may be.

uvicorn bounds the size of a request's head, not its time, and serves as many connections as the system gives
it. This protocol closes slow ones, and where connections run out it closes the one that has been idle
longest, so that a crowd of idle sockets cannot keep others out.

Covered: slow or unfinished heads (408), bytes that are not HTTP (400), bodies that go on after their answer,
readers that do not read, and more connections than the caps, from one network or in all. Not covered: slow
bodies before their answer (`signed_requests`), and floods that fill the line itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from blocktrain.coordinator.admission import network_name
from blocktrain.wire.messages import ErrorAnswer, ErrorBody, ErrorReason

HEAD_SECONDS = 10.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
LINGER_SECONDS = 5.0
"""How long a body may go on after its answer; cut at once, the client might not see the answer."""
STALL_SECONDS = 60.0
"""An answer that does not move for this long is given up; at the least rate of bodies 1 MB would."""
HEAD_PIECE_BYTES = 1024
"""h11 limits the length of a head only while it is incomplete, so a long one is fed to it in small pieces."""
MAX_PER_NETWORK = 256
"""Connections from one IPv4 address or IPv6 /64: four for each of the workers it may have."""

Connection = TypeVar("Connection")


class ConnectionTable(Generic[Connection]):
    """The open connections, their networks, and which of them are idle (have no request under way)."""

    def __init__(self, limit: int, limit_per_network: int) -> None:
        self._limit, self._limit_per_network = limit, limit_per_network
        self._network: dict[Connection, str] = {}
        self._count: Counter[str] = Counter()
        # A dict keeps the order in which connections became idle; the longest idle is its first key.
        self._idle: dict[Connection, str] = {}

    def enter(self, new: Connection, network: str) -> Connection | None:
        """Register a connection; returns the one to close to make room: the longest idle, or the new one if
        none is idle."""
        surplus: Connection | None = None
        if self._count[network] >= self._limit_per_network:
            # A network that is over its cap pays with its own connections. The search looks at no more than
            # the server's cap of 2000, far less work than accepting the connection was.
            surplus = next((one for one, home in self._idle.items() if home == network), new)
        elif len(self._network) >= self._limit:
            surplus = next(iter(self._idle), new)
        self._network[new] = self._idle[new] = network
        self._count[network] += 1
        return surplus

    def leave(self, connection: Connection) -> None:
        """Safe to repeat."""
        self._idle.pop(connection, None)
        network = self._network.pop(connection, None)
        if network is not None:
            self._count[network] -= 1
            # A Counter keeps zeros, and a stranger can come from any number of networks.
            if not self._count[network]:
                del self._count[network]

    def became_idle(self, connection: Connection) -> None:
        if connection in self._network:
            self._idle[connection] = self._network[connection]

    def became_active(self, connection: Connection) -> None:
        self._idle.pop(connection, None)


class LimitedConnection(H11Protocol):
    """One connection. A server has its own subclass, with the table of its connections."""

    table: ConnectionTable[LimitedConnection]
    _timer: asyncio.TimerHandle | None = None
    _limited = ""
    """What the running timer is for."""
    _stall: asyncio.TimerHandle | None = None

    # --- coming and going ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        surplus = self.table.enter(self, network_name(self.client[0]) if self.client else "")
        if surplus is not None:
            self.table.leave(surplus)
            surplus.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.leave(self)
        self._cancel_timer()
        self._cancel_stall()
        super().connection_lost(exc)

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            in_head = self.conn.their_state is h11.IDLE
            piece, data = (data[:HEAD_PIECE_BYTES], data[HEAD_PIECE_BYTES:]) if in_head else (data, b"")
            super().data_received(piece)
        self._set_time_limit()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        waits = self.conn.their_state is h11.IDLE
        if waits:
            self.table.became_idle(self)
        # Between two requests uvicorn's own keep-alive applies; a limit of ours begins with the first byte.
        if not waits or self.conn.trailing_data[0]:
            self._set_time_limit()

    def _set_time_limit(self) -> None:
        """Begin or end the limit that fits what the connection is doing."""
        if self.transport.is_closing():
            return
        theirs, ours = self.conn.their_state, self.conn.our_state
        if theirs is h11.IDLE:
            self._await_head()
        elif theirs is h11.SEND_BODY and ours in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._limit("linger", LINGER_SECONDS, self.transport.close)
        else:
            self.table.became_active(self)
            self._cancel_timer()

    def _await_head(self) -> None:
        def refuse() -> None:
            # Who has sent nothing at all needs no answer: browsers open connections before they need them.
            if self.conn.trailing_data[0]:
                message = f"expected the whole request head within {HEAD_SECONDS:g} s"
                self._refuse("408 Request Timeout", ErrorReason.TOO_SLOW, message)
            self.transport.close()

        self._limit("head", HEAD_SECONDS, refuse)

    def send_400_response(self, msg: str) -> None:
        """uvicorn would say it in plain text."""
        self._refuse("400 Bad Request", ErrorReason.INVALID_MESSAGE, f"this is no HTTP/1.1 request: {msg}")
        self.transport.close()

    def _refuse(self, status: str, reason: ErrorReason, message: str) -> None:
        body = ErrorAnswer(error=ErrorBody(reason=reason, message=message)).model_dump_json(exclude_none=True)
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode())

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
        super().pause_writing()
        self._cancel_stall()
        self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stall()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def limited_protocol(max_connections: int) -> type[LimitedConnection]:
    """The protocol of one server, for uvicorn's `http` setting."""
    table = ConnectionTable[LimitedConnection](max_connections, MAX_PER_NETWORK)
    return type("ServerConnection", (LimitedConnection,), {"table": table})
