"""Request bodies and signatures, checked before and while a byte is read.

The order is that of protocol.md: length declared, length allowed, signature, replay, then the body piece by
piece against the signed length and digest, within a time that follows from the minimum transfer rate.

Covered: unsigned, wrongly signed, replayed, expired and skewed requests; endless, oversized, short, slow
and damaged bodies; a client that goes away. Not covered: slow headers and how many connections there are
(`connections`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from blake3 import blake3
from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from blocktrain.connections import MIN_BYTES_PER_SECOND
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.wire.byte_source import SMALL_BYTES, ByteSource, FileBytes
from blocktrain.wire.identity import WorkerId
from blocktrain.wire.messages import MAX_BODY_BYTES, ErrorReason
from blocktrain.wire.signing import Reason, SignatureError, VerifiedRequest, verify_request

BODY_GRACE_SECONDS = 30.0
"""A body may take this long, plus its length at the minimum rate."""

Message = TypeVar("Message", bound=BaseModel)


@dataclass(frozen=True)
class Signed(Generic[Message]):
    worker_id: WorkerId
    public_key: bytes
    message: Message


def coordinator_of(request: Request) -> Coordinator:
    coordinator = request.app.state.coordinator
    assert isinstance(coordinator, Coordinator)
    return coordinator


async def verified(request: Request) -> VerifiedRequest:
    """Who signed this request, before its body is read; refuses one that is unsigned or was seen before."""
    coordinator = coordinator_of(request)
    now = coordinator.resources.clock()
    # Path and query as they came, still encoded: that is what the client signed.
    query = request.scope["query_string"].decode("latin-1")
    path: str = request.scope.get("raw_path", request.scope["path"].encode()).decode("latin-1")
    try:
        signature = verify_request(
            request.method,
            f"{path}?{query}" if query else path,
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw],
            now=now,
            audience=coordinator.resources.run.run_id,
        )
    except SignatureError as error:
        raise Refusal.of_signature(error, now) from None
    if coordinator.nonces.in_memory:
        is_new = coordinator.nonces.is_new(signature)
    else:
        is_new = await run_in_threadpool(coordinator.nonces.is_new, signature)
    if not is_new:
        raise Refusal(
            Reason.REPLAYED,
            f"the request was already received: its nonce {signature.nonce} is used",
            "sign every attempt again, with a fresh nonce",
        )
    return signature


class SignedBody(Generic[Message]):
    """A dependency: the signed JSON message of a request."""

    def __init__(self, model: type[Message]) -> None:
        self._model = model

    async def __call__(self, request: Request) -> Signed[Message]:
        # Cheapest first: a length is a header, a signature some arithmetic, the look for a replay perhaps a
        # transaction.
        declared_length(request, MAX_BODY_BYTES)
        signature = await verified(request)
        body = b"".join([piece async for piece in checked_body(request, signature)])
        try:
            message = self._model.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise invalid_message(error.errors(include_url=False, include_input=False)) from None
        return Signed(signature.worker_id, signature.public_key, message)


async def signed_empty(request: Request) -> VerifiedRequest:
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        raise Refusal(ErrorReason.TOO_LARGE, "this route takes no body", "send the request without one")
    return await verified(request)


async def _service(request: Request) -> Coordinator:
    # Async though it waits for nothing: FastAPI would send a plain function to another thread, 0.3 ms each.
    return coordinator_of(request)


Service = Annotated[Coordinator, Depends(_service)]
SignedEmpty = Annotated[VerifiedRequest, Depends(signed_empty)]
"""A signed request that has no body."""


def declared_length(request: Request, limit: int) -> int:
    """Content-Length, which every body must declare, refused above the limit before a byte is read."""
    text = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers or not text.isascii() or not text.isdigit():
        raise Refusal(
            ErrorReason.LENGTH_REQUIRED,
            "expected a Content-Length",
            "send the body in one piece, not chunked",
        )
    # Python takes seconds to read a number of a million digits; 20 are more than any limit has.
    length = int(text[:20])
    if length > limit:
        raise Refusal(ErrorReason.TOO_LARGE, f"expected at most {limit} bytes, found {length}")
    return length


async def checked_body(request: Request, signature: VerifiedRequest) -> AsyncIterator[bytes]:
    """The body in pieces; ends in a refusal where it is slow, cut, longer than signed or damaged."""
    check = signature.digest_check()
    seconds = BODY_GRACE_SECONDS + signature.content_length / MIN_BYTES_PER_SECOND
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                check.update(piece)
                yield piece
        check.finish()
    except SignatureError as error:
        raise Refusal.of_signature(error, 0.0) from None
    except TimeoutError:
        raise Refusal(
            ErrorReason.TOO_SLOW,
            f"expected {signature.content_length} bytes within {seconds:.0f} s",
            f"the link must carry {MIN_BYTES_PER_SECOND} bytes a second; a smaller codec needs less",
        ) from None
    except ClientDisconnect:
        raise Refusal(ErrorReason.WRONG_LENGTH, "the connection was closed inside the body") from None


@asynccontextmanager
async def received_body(
    request: Request, signature: VerifiedRequest
) -> AsyncIterator[tuple[ByteSource, str]]:
    """The body and its blake3, computed as it came; a file of it is gone afterwards, whatever happens."""
    hasher = blake3()
    if signature.content_length <= SMALL_BYTES:
        content = b"".join([piece async for piece in checked_body(request, signature)])
        hasher.update(content)
        yield np.frombuffer(content, np.uint8), hasher.hexdigest()
        return
    # On disk, not in memory: a dense payload of a large block is as long as the block.
    with tempfile.TemporaryFile() as file:
        async for piece in checked_body(request, signature):
            hasher.update(piece)
            file.write(piece)
        yield FileBytes(file), hasher.hexdigest()


def invalid_message(errors: Sequence[Any]) -> Refusal:
    """Pydantic's findings in one sentence, without repeating what the peer wrote."""
    # A peer's own words in an answer end in somebody's log or page (attack 19, injection).
    shown = []
    for error in errors[:3]:
        place = error.get("loc")
        parts = place if isinstance(place, tuple) else ()
        # The last part of the place of an unknown key is the key itself, which the peer made up.
        parts = (*parts[:-1], "unknown key") if error.get("type") == "extra_forbidden" else parts
        shown.append(f"{'.'.join(map(str, parts))}: {error.get('msg')}")
    more = f" and {len(errors) - 3} more" if len(errors) > 3 else ""
    return Refusal(ErrorReason.INVALID_MESSAGE, f"{'; '.join(shown)}{more}"[:500], "see /openapi.json")
