"""Bytes on this worker's sockets by kind and direction, and where its seconds went.

Counts in the network stream under the HTTP client, so request lines, headers and chunk framing are
included; TLS records are not (they wrap what is counted). A thread says what it is transferring with
`Traffic.sending(kind)`; the HTTP client is synchronous, so a request's bytes belong to its thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpcore2
import httpx2

from blocktrain.client.places import AllowedPlaces
from blocktrain.errors import WireError
from blocktrain.wire.messages import Account, ByteCounts

KEEPALIVE_SECONDS = 60.0
PACED_BYTES = 16 * 1024
"""Moved between two waits: a second at 128 kbit/s."""
SAVED_UP_SECONDS = 0.5


class Kind(StrEnum):
    PAYLOAD = "payload"
    SNAPSHOT = "snapshot"
    CONTROL = "control"
    TEXT = "text"
    """Of the run, once for each shard; not among the bytes that a round costs."""


class Spent(StrEnum):
    COMPUTING = "computing"
    TRANSFERRING = "transferring"
    WAITING = "waiting"


class Pace:
    """At most so many bytes per second over all connections; None has no limit.

    What was moved is paid for afterwards, by waiting: a reader that does not read slows its sender down,
    since TCP stops at a full window. Half a second of silence may be made up for.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._paid_until = 0.0
        self._lock = threading.Lock()

    def debt_seconds(self, num_bytes: int, now: float) -> float:
        """How long to wait after moving `num_bytes` at `now`."""
        if self.bytes_per_second is None:
            return 0.0
        with self._lock:
            begin = max(self._paid_until, now - SAVED_UP_SECONDS)
            self._paid_until = begin + num_bytes / self.bytes_per_second
            return max(0.0, self._paid_until - now)


class Traffic:
    """Running totals, and the pace its user allows; safe to add to from every thread."""

    def __init__(self, *, max_up: float | None = None, max_down: float | None = None) -> None:
        self.paces = {"up": Pace(max_up), "down": Pace(max_down)}
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._accounted = Counter(self._bytes), Counter(self._seconds)
        self._current = threading.local()

    @contextlib.contextmanager
    def sending(self, kind: Kind) -> Iterator[None]:
        """Everything this thread moves inside belongs to `kind`, and its time to transferring."""
        # Per thread: one uploads a payload while another sends heartbeats.
        before = getattr(self._current, "kind", Kind.CONTROL)
        self._current.kind = kind
        try:
            with self.spending(Spent.TRANSFERRING):
                yield
        finally:
            self._current.kind = before

    @contextlib.contextmanager
    def spending(self, spent: Spent) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_seconds(spent, time.monotonic() - start)

    def add_seconds(self, spent: Spent, seconds: float) -> None:
        with self._lock:
            self._seconds[spent] += seconds  # type: ignore[assignment]

    def moved(self, way: str, num_bytes: int) -> None:
        """Count what this thread has moved `up` or `down`, and wait where that was faster than allowed."""
        with self._lock:
            self._bytes[way, getattr(self._current, "kind", Kind.CONTROL)] += num_bytes
        if debt := self.paces[way].debt_seconds(num_bytes, time.monotonic()):
            time.sleep(debt)

    def bytes_of(self, way: str) -> dict[str, int]:
        """Moved `up` or `down` so far by kind, without the run's text."""
        with self._lock:
            return {kind.value: self._bytes[way, kind] for kind in Kind if kind is not Kind.TEXT}

    def account(self) -> Account:
        """What was spent since the last account."""
        with self._lock:
            spent, seconds = Counter(self._bytes), Counter(self._seconds)
            spent.subtract(self._accounted[0])
            seconds.subtract(self._accounted[1])
            self._accounted = Counter(self._bytes), Counter(self._seconds)
        up, down = (
            ByteCounts(**{kind.value: spent[way, kind] for kind in Kind if kind is not Kind.TEXT})
            for way in ("up", "down")
        )
        return Account(
            seconds_computing=seconds[Spent.COMPUTING],
            seconds_transferring=seconds[Spent.TRANSFERRING],
            seconds_waiting=seconds[Spent.WAITING],
            up=up,
            down=down,
        )

    @property
    def text_bytes(self) -> int:
        """Fetched of the run's text."""
        with self._lock:
            return self._bytes["down", Kind.TEXT]

    def seconds(self) -> dict[str, float]:
        with self._lock:
            return {spent.value: float(self._seconds[spent]) for spent in Spent}


class CertificateMismatch(WireError):
    """The certificate is not the one that the link pins: nothing was sent."""


@dataclass(frozen=True)
class Pin:
    """The one certificate that is believed at a place; elsewhere (object storage) authorities are asked."""

    host: str
    port: int
    sha256: str


class CountingStream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream, traffic: Traffic, pinned: str | None = None) -> None:
        self._stream, self._traffic, self._pinned = stream, traffic, pinned

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        paced = self._traffic.paces["down"].bytes_per_second is not None
        data = self._stream.read(min(max_bytes, PACED_BYTES) if paced else max_bytes, timeout)
        self._traffic.moved("down", len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        paced = self._traffic.paces["up"].bytes_per_second is not None
        size = PACED_BYTES if paced else max(1, len(buffer))
        for start in range(0, len(buffer), size):
            piece = buffer[start : start + size]
            self._stream.write(piece, timeout)
            # Counted after it went out: a write that fails moved nothing we know of.
            self._traffic.moved("up", len(piece))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        if self._pinned is None:
            encrypted = self._stream.start_tls(ssl_context, server_hostname, timeout)
            return CountingStream(encrypted, self._traffic)
        # The handshake proves that the peer has the certificate's key; which certificate it is, the pin says.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        encrypted = self._stream.start_tls(context, server_hostname, timeout)
        shown = encrypted.get_extra_info("ssl_object").getpeercert(True) or b""
        found = hashlib.sha256(shown).hexdigest()
        if found != self._pinned:
            encrypted.close()
            raise CertificateMismatch(
                f"expected the certificate {self._pinned[:16]}… that the link pins, found {found[:16]}…: the "
                "operator has a new one, or another machine answers; ask for a new link"
            )
        return CountingStream(encrypted, self._traffic)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class CountingBackend(httpcore2.SyncBackend):
    def __init__(self, traffic: Traffic, places: AllowedPlaces, pin: Pin | None) -> None:
        self._traffic, self._places, self._pin = traffic, places, pin

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        def connect(address: str) -> httpcore2.NetworkStream:
            return httpcore2.SyncBackend.connect_tcp(
                self, address, port, timeout, local_address, socket_options
            )

        stream = self._places.connected(host, port, connect)
        pin = self._pin
        pinned = pin.sha256 if pin is not None and (host, port) == (pin.host, pin.port) else None
        return CountingStream(stream, self._traffic, pinned)


class CountingTransport(httpx2.HTTPTransport):
    """httpx2's own transport over a pool whose sockets are counted, and lead only where they may."""

    def __init__(
        self, traffic: Traffic, max_connections: int, places: AllowedPlaces, pin: Pin | None = None
    ) -> None:
        context = httpx2.create_ssl_context()
        # httpx2 has no public way to count on the socket, or to choose its address, so the pool is replaced
        # and all the rest stays its own.
        super().__init__(verify=context)
        self._pool = httpcore2.ConnectionPool(
            ssl_context=context,
            max_connections=max_connections,
            keepalive_expiry=KEEPALIVE_SECONDS,
            network_backend=CountingBackend(traffic, places, pin),
        )
