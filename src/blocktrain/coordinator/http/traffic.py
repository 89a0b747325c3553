"""Counts what crosses the socket by kind, headers included: payload, snapshot and control bytes."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.coordinator.metrics import Metrics

LINE_BYTES = 4
"""Colon, space and line end of one header."""


class CountTraffic:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        kind = kind_of(scope["method"], scope["path"])
        self._metrics.moved("up", kind, _head_bytes(scope["headers"]) + len(scope["path"]) + 16)

        async def counted_receive() -> Message:
            message = await receive()
            self._metrics.moved("up", kind, len(message.get("body", b"")))
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.moved("down", kind, _head_bytes(message.get("headers", ())) + 16)
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.request(scope["method"], route, message["status"])
            self._metrics.moved("down", kind, len(message.get("body", b"")))
            await send(message)

        await self._app(scope, counted_receive, counted_send)


def kind_of(method: str, path: str) -> str:
    if path.startswith("/v1/snapshots/"):
        return "snapshot"
    if path.startswith("/v1/updates/") and method in ("GET", "PUT"):
        return "payload"
    return "control"


def _head_bytes(headers: object) -> int:
    assert isinstance(headers, list | tuple)
    return sum(len(name) + len(value) + LINE_BYTES for name, value in headers)
