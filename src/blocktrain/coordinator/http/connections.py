"""The front of the coordinator: how long a connection may take over a request, and how many there may be.

uvicorn bounds the size of a request's head, not its time, and serves as many connections as the system gives
it. This protocol closes what is slow, and where connections run out it closes the one that has waited longest
for a request, so that a crowd of silent sockets cannot keep out who speaks.

Covered: slow or unfinished heads (408), what is no HTTP (400), bodies that go on after their answer, readers
that do not read, and more connections than the caps, from one network or in all. Not covered: slow bodies
before their answer (`bodies`), and floods that fill the line itself.
"""

from __future__ import annotations

import asyncio
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


class Crowd(Generic[Connection]):
    """Who is connected, from where, and who of them is silent: has no request under way. Silent ones are kept
    in the order in which they fell silent, so finding the one to close costs the same in any crowd."""

    def __init__(self, limit: int, limit_per_network: int = MAX_PER_NETWORK) -> None:
        self._limit, self._limit_per_network = limit, limit_per_network
        self._network: dict[Connection, str] = {}
        self._counts: dict[str, int] = {}
        self._silent: dict[Connection, None] = {}
        self._silent_near: dict[str, dict[Connection, None]] = {}

    def enter(self, one: Connection, network: str) -> Connection | None:
        """Let it in, silent as it is; whom to close for it, which is itself where nobody else is silent."""
        near = self._silent_near.get(network, {})
        surplus: Connection | None = None
        if self._counts.get(network, 0) >= self._limit_per_network:
            surplus = next(iter(near), one)
        elif len(self._network) >= self._limit:
            surplus = next(iter(self._silent), one)
        self._network[one] = network
        self._counts[network] = self._counts.get(network, 0) + 1
        self.fell_silent(one)
        return surplus

    def leave(self, one: Connection) -> None:
        """Safe to repeat."""
        self.spoke(one)
        network = self._network.pop(one, None)
        if network is not None:
            self._counts[network] -= 1
            if not self._counts[network]:
                del self._counts[network]

    def fell_silent(self, one: Connection) -> None:
        if one in self._network:
            self._silent[one] = None
            self._silent_near.setdefault(self._network[one], {})[one] = None

    def spoke(self, one: Connection) -> None:
        if one in self._silent:
            del self._silent[one]
            near = self._silent_near[self._network[one]]
            del near[one]
            if not near:
                del self._silent_near[self._network[one]]


class Front(H11Protocol):
    """One connection. A server has its own subclass, with the crowd its connections are in."""

    crowd: Crowd[Front]
    _timer: asyncio.TimerHandle | None = None
    _limited = ""
    """What the running timer is for."""
    _stall: asyncio.TimerHandle | None = None

    # --- coming and going ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        surplus = self.crowd.enter(self, network_name(self.client[0]) if self.client else "")
        if surplus is not None:
            self.crowd.leave(surplus)
            surplus.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._cancel_timer()
        self._cancel_stall()
        super().connection_lost(exc)

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            in_head = self.conn.their_state is h11.IDLE
            piece, data = (data[:HEAD_PIECE_BYTES], data[HEAD_PIECE_BYTES:]) if in_head else (data, b"")
            super().data_received(piece)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        waits = self.conn.their_state is h11.IDLE
        if waits:
            self.crowd.fell_silent(self)
        if not waits or self.conn.trailing_data[0]:
            self._look()

    def _look(self) -> None:
        """Begin or end the time limit that fits what the connection is doing."""
        if self.transport.is_closing():
            return
        theirs, ours = self.conn.their_state, self.conn.our_state
        if theirs is h11.IDLE:
            self._await_head()
        elif theirs is h11.SEND_BODY and ours in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._limit("linger", LINGER_SECONDS, self.transport.close)
        else:
            self.crowd.spoke(self)
            self._cancel_timer()

    def _await_head(self) -> None:
        self._limit("head", HEAD_SECONDS, self._refuse_slow_head)

    def _refuse_slow_head(self) -> None:
        if self.conn.trailing_data[0]:
            message = f"expected the whole request head within {HEAD_SECONDS:g} s"
            self.transport.write(_refusal("408 Request Timeout", ErrorReason.TOO_SLOW, message))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn would say it in plain text."""
        message = f"this is no HTTP/1.1 request: {msg}"
        self.transport.write(_refusal("400 Bad Request", ErrorReason.INVALID_MESSAGE, message))
        self.transport.close()

    def _limit(self, what: str, seconds: float, end: Callable[[], None]) -> None:
        """More bytes do not begin a limit anew."""
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


def front_of(max_connections: int) -> type[Front]:
    """The protocol of one server."""
    return type("ServerFront", (Front,), {"crowd": Crowd[Front](max_connections, MAX_PER_NETWORK)})


def _refusal(status: str, reason: ErrorReason, message: str) -> bytes:
    body = ErrorAnswer(error=ErrorBody(reason=reason, message=message)).model_dump_json(exclude_none=True)
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()
