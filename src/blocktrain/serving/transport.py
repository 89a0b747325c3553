"""Sockets for frames: options, TLS with pinned keys, one frame in or out at a time.

Covered: nothing is allocated beyond the receiver's limits; a body that stops half way ends the
connection; a peer whose key is not the pinned one is refused before a byte of ours is sent. Not covered:
who may connect to a stage beyond the shared token of HELLO (there are no client certificates).
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from blocktrain.errors import UserError, WireError
from blocktrain.wire.frames import HEADER_BYTES, Frame, FrameLimits, decode_body, decode_header
from blocktrain.wire.identity import Identity, worker_id_of

BODY_SECONDS = 30.0
"""A header may be long in coming; the body it announces may not."""
POST_SECONDS = 0.02
"""What is in no hurry waits so long for something that is."""
WRITE_SECONDS = 30.0
CHUNK_BYTES = 1 << 16
"""What is read at a time, and what is sent without looking whether the peer reads it."""
USER_TIMEOUT_MS = 10_000
"""Unacknowledged bytes for this long mean the peer is gone (TCP_USER_TIMEOUT)."""


class ConnectionLostError(WireError):
    """The peer closed the connection, or it broke."""


class PinError(WireError):
    """The peer's key is not the one the operator pinned."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    pin: str | None = None
    """Id of the key the peer must prove over TLS (`blocktrain identity` prints it); None for plain TCP."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """`HOST:PORT` or `HOST:PORT#PIN`."""
        place, _, pin = text.strip().partition("#")
        host, colon, port = place.rpartition(":")
        if not colon or not port.isdigit() or not 0 <= int(port) < 65536:
            raise UserError(f"expected an address HOST:PORT or HOST:PORT#PIN, found {text!r}")
        return cls(host.strip("[]") or "127.0.0.1", int(port), pin or None)

    @property
    def text(self) -> str:
        """What `parse` reads, the pin included."""
        return f"{self}#{self.pin}" if self.pin is not None else str(self)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class FrameStream:
    """One connection. One task reads; any task may write whole frames.

    Frames that are written in one turn of the event loop, or in the next, leave together: the answers of a
    pass for 64 texts are one call of the system and not 64, which took a tenth of a stage's time.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.bytes_received = self.bytes_sent = 0
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._leaves = False
        """Whether it leaves soon."""
        tune(writer.get_extra_info("socket"))

    @property
    def peer(self) -> str:
        name = self._writer.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "unknown"

    @property
    def has_more(self) -> bool:
        """Whether some of the next frame is here."""
        return bool(self._received)

    async def read(self, limits: FrameLimits) -> Frame:
        """The next frame, or ConnectionLostError, or ServingFrameError for bytes that are none."""
        try:
            # The header may take as long as it likes: between requests a connection is silent.
            await self._receive(HEADER_BYTES)
            header = decode_header(self._taken(HEADER_BYTES), limits)
            # Mostly there already, and a timer would cost as much as the rest.
            if len(self._received) < header.body_bytes:
                async with asyncio.timeout(BODY_SECONDS):
                    await self._receive(header.body_bytes)
            body = self._taken(header.body_bytes)
        except (asyncio.IncompleteReadError, OSError, TimeoutError) as error:
            raise ConnectionLostError(f"{self.peer}: {_reason(error)}") from None
        self.bytes_received += HEADER_BYTES + len(body)
        return decode_body(header, body)

    async def _receive(self, count: int) -> None:
        while len(self._received) < count:
            chunk = await self._reader.read(CHUNK_BYTES)
            if not chunk:
                raise asyncio.IncompleteReadError(bytes(self._received), count)
            self._received += chunk

    def _taken(self, count: int) -> bytes:
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    async def write(self, raw: bytes) -> None:
        # Where a client goes away, all who compute for it come here with an answer.
        if self._writer.is_closing():
            raise ConnectionLostError(f"{self.peer}: the connection was closed")
        self._add(raw)
        if not self._leaves:
            self._leaves = True
            # Of what many requests ask at once some takes a task more, and comes a turn later.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._send)
        if len(raw) < CHUNK_BYTES and not self._writer.transport.get_write_buffer_size():
            return
        try:
            self._send()
            async with asyncio.timeout(WRITE_SECONDS):
                await self._writer.drain()
        except (OSError, TimeoutError, RuntimeError) as error:
            self.abort()
            raise ConnectionLostError(f"{self.peer}: {_reason(error)}") from None

    def post(self, raw: bytes) -> None:
        """Send with what is written next, or in a moment: without waiting and without a promise that it
        arrives."""
        # Where it left at once, what others wrote in the same turn went in two parts, and a stage had a pass
        # for each.
        if not self._unsent:
            asyncio.get_running_loop().call_later(POST_SECONDS, self._send)
        self._add(raw)

    def _add(self, raw: bytes) -> None:
        # Whole frames: two tasks that write at once cannot mix their bytes.
        self._unsent.append(raw)
        self.bytes_sent += len(raw)

    def _send(self) -> None:
        unsent, self._unsent, self._leaves = b"".join(self._unsent), [], False
        if unsent and not self._writer.is_closing():
            self._writer.write(unsent)

    def abort(self) -> None:
        """Close at once; what the system does not take is dropped."""
        self._send()
        self._writer.transport.abort()

    async def close(self) -> None:
        self._send()
        self._writer.close()
        try:
            async with asyncio.timeout(1):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.abort()


def _reason(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed" + (" inside a frame" if error.partial else "")
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def tune(connection: socket.socket | None) -> None:
    """Small frames at once, dead peers noticed in seconds."""
    if connection is None:
        return
    # Nagle's algorithm would hold a TRAVERSE of some bytes back until the last reply was acknowledged.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect(address: Address, seconds: float) -> FrameStream:
    """An open connection whose peer holds the pinned key, or ConnectionLostError or PinError."""
    context = None
    if address.pin is not None:
        # TLS 1.3 without authorities: the pin is checked after the handshake has proved the key.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except (OSError, TimeoutError) as error:
        raise ConnectionLostError(f"cannot connect to {address}: {_reason(error)}") from None
    stream = FrameStream(reader, writer)
    if address.pin is not None:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        found = pin_of(certificate or b"")
        if found != address.pin:
            stream.abort()
            raise PinError(
                f"{address}: expected the key {address.pin}, found {found}; another machine answers"
            )
    return stream


def pin_of(certificate: bytes) -> str:
    """The id of an Ed25519 certificate's key; the id of another kind of key is `none`."""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except ValueError:
        return "none"
    return worker_id_of(key.public_bytes_raw()) if isinstance(key, Ed25519PublicKey) else "none"


def server_context(identity: Identity) -> ssl.SSLContext:
    """TLS 1.3 with a self-signed certificate of the identity's key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.worker_id)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(identity.private_key, algorithm=None)
    )
    key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # The ssl module reads keys from files only; the folder is private and gone a moment later.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stage.pem"
        path.touch(mode=0o600)
        path.write_bytes(key + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(path)
    return context


def read_token(path: Path | None) -> str | None:
    """The secret in a file, without the line's end; None without a file."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the token file {path}: {error}") from None
    # 16 characters: a stage is open to the network, and a short secret can be tried out.
    if not 16 <= len(token) <= 256:
        raise UserError(f"{path}: expected a secret of 16 to 256 characters, found {len(token)}")
    return token
