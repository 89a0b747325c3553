"""The outermost part of the gateway: it checks the key and the rate before a byte of the body is read,
stops reading bodies that are too large, gives every answer an id and counts it.

Plain ASGI, because what wraps responses in other ways hides a client that goes away.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.listening import network_name
from blocktrain.serving.gateway.api_errors import ApiError, as_api_error
from blocktrain.serving.gateway.limits import ANYONE, GatewayLimits, Keys, Rates, TooManyRequestsError
from blocktrain.serving.gateway.metrics import GatewayMetrics

KEYED_PATHS = ("/v1/", "/tokenize", "/detokenize")
CALLER = "blocktrain.caller"
"""Where the scope of a request says whose it is."""
BODY_SECONDS = 60.0
"""How long a request's body may take; 2 MB come in that time over a line of 35 kB a second."""
REASONS = {401: "key", 413: "size", 429: "rate"}


class AccessCheck:
    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys | None,
        limits: GatewayLimits,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app, self.keys, self.limits, self.metrics, self.clock = app, keys, limits, metrics, clock
        self.rates = Rates(limits.requests_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Answered as GET; the server leaves the body out, by the scope that it keeps itself.
            scope = {**scope, "method": "GET"}
        begun, status, read, reading = self.clock(), 500, 0, True

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Of an answer it is the answer's own id, by which its line in the log can be found.
                MutableHeaders(scope=message).setdefault("x-request-id", f"req-{secrets.token_hex(12)}")
            await send(message)

        async def limited() -> Message:
            nonlocal read, reading
            try:
                # Only up to the body's end: what follows is the wait for a client that goes away.
                async with asyncio.timeout(BODY_SECONDS - self.clock() + begun if reading else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"expected the whole body within {BODY_SECONDS:g} s") from None
            reading = reading and bool(message.get("more_body"))
            read += len(message.get("body", b""))
            if read > self.limits.max_body_bytes:
                # An HTTPException, because that is what FastAPI lets through while it reads a body.
                raise HTTPException(413, str(self._too_large()))
            return message

        try:
            self._admit(scope)
        except (ApiError, TooManyRequestsError) as refusal:
            answered = as_api_error(refusal)
            self.metrics.refusals.labels(REASONS[answered.status]).inc()
            await answered.response()(scope, receive, named)
        else:
            await self.app(scope, limited, named)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.duration.observe(self.clock() - begun)

    def _admit(self, scope: Scope) -> None:
        """Raise where the key, the rate or the declared size is wrong, in that order."""
        headers = Headers(scope=scope)
        if scope["path"].startswith(KEYED_PATHS):
            client = scope.get("client")
            caller = network_name(client[0]) if client else ANYONE
            if self.keys is not None:
                scheme, _, key = headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer" or not key.strip():
                    raise _unauthorized("no API key; send the header `Authorization: Bearer KEY`")
                owner = self.keys.owner(key.strip())
                if owner is None:
                    raise _unauthorized("incorrect API key")
                caller = owner or caller
            scope[CALLER] = caller
            # By owner where there are keys: a key is used from many addresses, and an address by many.
            self.rates.check(caller, self.clock())
        declared = headers.get("content-length", "0")
        # 19 digits at most: Python refuses to parse endless ones, and that refusal would be a 500.
        if declared.isdecimal() and int(declared[:19]) > self.limits.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        limit = self.limits.max_body_bytes
        return ApiError(413, f"the request is larger than {limit} bytes", code="request_too_large")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
