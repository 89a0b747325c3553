"""What lets a worker join: proof-of-work stamps on the coordinator's challenge, and signed invitations.

A challenge is a keyed hash of the worker's id and the hour, so the coordinator remembers nothing and checks a
stamp with two hashes. An invitation is an id and an end, signed with the coordinator's key; that it is used
once is for the coordinator's database to remember. Knows nothing of databases or HTTP; time is an argument.

Covered: stamps for another worker, run or hour; forged, expired and damaged invitations, of any length. Not
covered: someone who rents a thousand cores can stamp a thousand names (caps per address and probation
remain).
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from blocktrain.errors import StoppedError
from blocktrain.wire.hashing import canonical_json
from blocktrain.wire.identity import Identity, verify

CHALLENGE_SECONDS = 3600
"""A challenge is accepted for at least this long and less than twice as long."""
STAMP_BYTES = 8
HASHES_BETWEEN_LOOKS = 1 << 14
MAX_TOKEN_CHARACTERS = 512
_INVITE_CONTEXT = b"blocktrain invite 1\n"
_SECRET_CONTEXT = b"blocktrain coordinator secret 1\n"


def secret_of(identity: Identity, purpose: str) -> bytes:
    """32 bytes that only the holder of the key can compute; Ed25519 signatures are deterministic."""
    return blake3(identity.sign(_SECRET_CONTEXT + purpose.encode())).digest()


def challenge(secret: bytes, run_id: str, worker_id: str, now: float, *, periods_ago: int = 0) -> str:
    period = int(now // CHALLENGE_SECONDS) - periods_ago
    return blake3(f"challenge/{run_id}/{worker_id}/{period}".encode(), key=secret).hexdigest()


def is_challenge(secret: bytes, run_id: str, worker_id: str, found: str, now: float) -> bool:
    # This hour or the last one: a stamp begun at 10:59 is still good at 11:01.
    return any(challenge(secret, run_id, worker_id, now, periods_ago=ago) == found for ago in (0, 1))


def is_stamp(challenge: str, stamp: str, bits: int) -> bool:
    digest = blake3(bytes.fromhex(challenge) + bytes.fromhex(stamp)).digest(length=8)
    return int.from_bytes(digest, "big") >> (64 - bits) == 0


def find_stamp(challenge: str, bits: int, stopped: Callable[[], bool] = lambda: False) -> str:
    """About 2^bits hashes; 0.6 to 0.7 microseconds each in Python, so `stopped` is asked now and then."""
    prefix, limit = bytes.fromhex(challenge), 1 << (64 - bits)
    # From a random place, so that a second search does not repeat the first.
    number = secrets.randbits(63)
    while True:
        stamp = number.to_bytes(STAMP_BYTES, "big")
        if int.from_bytes(blake3(prefix + stamp).digest(length=8), "big") < limit:
            return stamp.hex()
        number = (number + 1) % (1 << 64)
        if number % HASHES_BETWEEN_LOOKS == 0 and stopped():
            raise StoppedError("stopped before the stamp was found")


@dataclass(frozen=True)
class Invitation:
    invite_id: str
    expires: float


def make_invite(identity: Identity, expires: float) -> str:
    """A token for one worker, valid until `expires`."""
    body = canonical_json({"id": secrets.token_hex(16), "expires": expires})
    return f"{_encoded(body)}.{_encoded(identity.sign(_INVITE_CONTEXT + body))}"


def read_invite(public_key: bytes, token: str, now: float) -> Invitation | None:
    """The invitation in a token; None where it is not the coordinator's, damaged or over."""
    # Before anything is decoded: the token is the first thing a stranger sends.
    if len(token) > MAX_TOKEN_CHARACTERS or token.count(".") != 1:
        return None
    try:
        body, signature = map(_decoded, token.split("."))
        # The signature before the JSON: only our own words are parsed.
        if not verify(public_key, _INVITE_CONTEXT + body, signature):
            return None
        values = json.loads(body)
        found = Invitation(str(values["id"]), float(values["expires"]))
    except (ValueError, KeyError, TypeError, binascii.Error):
        return None
    return found if now < found.expires else None


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
