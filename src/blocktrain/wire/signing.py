"""Signed HTTP requests (RFC 9421, Ed25519), with the time passed in and every refusal a typed reason.

Knows headers as plain text, so any client or server framework will do; knows nothing of admission or
bans. The body is checked while it streams, by `DigestCheck`; replays by `NonceWindow` or, across
processes, by a database row unique on `VerifiedRequest.replay_key` and dropped after `forget_after`.

Covered: method, path and query, body digest (RFC 9530 sha-256), body length, time, nonce, key, and the
audience where one is given. Not covered: host and scheme, which proxies change: a coordinator could pass
a request on to another one, unless the path or the audience names the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from blocktrain.errors import WireError
from blocktrain.wire.identity import Identity, WorkerId

DEFAULT_WINDOW_SECONDS = 120
"""How far a request's time may be from the server's, in either direction."""

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
"""Header fields as any framework gives them; a name may repeat."""


class Reason(StrEnum):
    """Why a signed request is refused."""

    UNSIGNED = "unsigned"
    MALFORMED = "malformed"
    BAD_SIGNATURE = "bad_signature"
    EXPIRED = "expired"
    CLOCK_SKEW = "clock_skew"
    DIGEST_MISMATCH = "digest_mismatch"
    REPLAYED = "replayed"
    BUSY = "busy"


class SignatureError(WireError):
    """A refused request: `reason` for programs, `sentence` (expected, found, remedy) for people."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


@dataclass(frozen=True, kw_only=True)
class VerifiedRequest:
    """What the signature proves about a request whose body has not been read yet."""

    worker_id: WorkerId
    public_key: bytes
    nonce: str
    created: int
    """Seconds since the epoch by the client's clock, within the window of the server's."""
    content_digest: bytes
    """sha-256 that the body must have; that of no bytes for a request without body."""
    content_length: int
    """Bytes the body must have."""
    forget_after: int
    """Server time after which the nonce need not be remembered: the request is too old by then."""

    @property
    def replay_key(self) -> str:
        raise NotImplementedError

    def digest_check(self) -> DigestCheck:
        raise NotImplementedError


def fresh_nonce() -> str:
    raise NotImplementedError


def body_digest(body: bytes | memoryview) -> bytes:
    """sha-256 of a whole body; feed `hashlib.sha256` by hand for one that does not fit in memory."""
    return hashlib.sha256(body).digest()


def sign_request(
    identity: Identity,
    method: str,
    path_and_query: str,
    *,
    now: float,
    nonce: str,
    content_digest: bytes = hashlib.sha256(b"").digest(),
    content_length: int = 0,
    expires_seconds: int | None = None,
    audience: str | None = None,
) -> dict[str, str]:
    """The headers to add: Content-Digest, Signature-Input, Signature, and Content-Length with a body."""
    raise NotImplementedError


def verify_request(
    method: str,
    path_and_query: str,
    headers: Headers,
    *,
    now: float,
    window_seconds: int = DEFAULT_WINDOW_SECONDS,
    audience: str | None = None,
) -> VerifiedRequest:
    """What the signature proves, or a SignatureError; `path_and_query` as it came, still encoded."""
    raise NotImplementedError


class DigestCheck:
    """Checks a body while it streams: `update` with each piece, `finish` at the end."""

    def __init__(self, content_digest: bytes, content_length: int) -> None:
        raise NotImplementedError

    def update(self, piece: bytes | memoryview) -> None:
        """Refuses as soon as the body is longer than signed."""
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class NonceWindow:
    """Replay memory of one process, bounded; a forgotten nonce is refused, never accepted twice."""

    def __init__(self, *, max_workers: int = 10_000, max_nonces_per_worker: int = 1_000) -> None:
        raise NotImplementedError

    def accept(self, request: VerifiedRequest, *, now: float) -> None:
        """Remember the request's nonce; SignatureError REPLAYED if it was used, BUSY when full."""
        raise NotImplementedError
