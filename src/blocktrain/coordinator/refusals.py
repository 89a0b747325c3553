"""A request that is not carried out: one exception with a reason, two sentences and an HTTP status."""

from __future__ import annotations

from blocktrain.errors import WireError
from blocktrain.wire.messages import ErrorBody, ErrorReason
from blocktrain.wire.signing import Reason, SignatureError

STATUS: dict[str, int] = {
    ErrorReason.NOT_FOUND: 404,
    ErrorReason.METHOD_NOT_ALLOWED: 405,
    ErrorReason.INVALID_MESSAGE: 422,
    ErrorReason.TOO_LARGE: 413,
    ErrorReason.LENGTH_REQUIRED: 411,
    ErrorReason.WRONG_LENGTH: 400,
    ErrorReason.HASH_MISMATCH: 400,
    ErrorReason.TOO_SLOW: 408,
    ErrorReason.NOT_JOINED: 403,
    ErrorReason.CORPUS_MISMATCH: 409,
    ErrorReason.NOT_YOURS: 403,
    ErrorReason.ALREADY_COMMITTED: 409,
    ErrorReason.LEASE_RETURNED: 409,
    ErrorReason.UNKNOWN_BASE: 409,
    ErrorReason.ROUND_NOT_OPEN: 409,
    ErrorReason.NOT_COMMITTED: 409,
    ErrorReason.NOT_UPLOADED: 409,
    ErrorReason.RANGE_NOT_SATISFIABLE: 416,
    ErrorReason.STAMP_REQUIRED: 403,
    ErrorReason.INVITE_REQUIRED: 403,
    ErrorReason.NOT_LISTED: 403,
    ErrorReason.ADDRESS_FULL: 403,
    ErrorReason.BANNED: 403,
    ErrorReason.NOT_OPERATOR: 403,
    ErrorReason.NOT_JUDGE: 403,
    ErrorReason.LEASE_LOST: 409,
    ErrorReason.UNAVAILABLE: 503,
    Reason.UNSIGNED: 401,
    Reason.MALFORMED: 401,
    Reason.BAD_SIGNATURE: 401,
    Reason.EXPIRED: 401,
    Reason.CLOCK_SKEW: 401,
    Reason.REPLAYED: 401,
    Reason.DIGEST_MISMATCH: 400,
}


class Refusal(WireError):
    """Raised in the request path, answered as the one JSON error shape."""

    def __init__(
        self, reason: str, message: str, remedy: str | None = None, server_time: float | None = None
    ) -> None:
        super().__init__(message)
        self.body = ErrorBody(reason=str(reason), message=message, remedy=remedy, server_time=server_time)

    @property
    def status(self) -> int:
        return STATUS[self.body.reason]

    @classmethod
    def of_signature(cls, error: SignatureError, now: float) -> Refusal:
        # With the server's time a worker whose clock is wrong can say by how much.
        about_time = error.reason in (Reason.EXPIRED, Reason.CLOCK_SKEW)
        return cls(error.reason, error.sentence, server_time=now if about_time else None)
