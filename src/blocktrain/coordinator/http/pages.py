"""The dashboard: static files at the coordinator's address, and the headers that keep strangers' text inert.

The page reads the public API like anybody else; nothing here knows what it shows. Its scripts and styles
come from this process alone: the policy forbids inline code, frames, other origins (but the gateway's, to
chat with) and, through trusted types, every way of turning a string into markup.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.coordinator.http.signed_requests import coordinator_of
from blocktrain.coordinator.refusals import Refusal
from blocktrain.wire.messages import ErrorReason

FOLDER = Path(__file__).parent / "dashboard"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

pages = APIRouter(include_in_schema=False)


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """Content and ETag of every file of the dashboard, by name: a request can name no other."""
    contents = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
    return {
        name: (content, f'"{hashlib.sha256(content).hexdigest()[:32]}"') for name, content in contents.items()
    }


@pages.get("/")
def get_dashboard(request: Request) -> Response:
    return get_dashboard_file(request, "index.html")


@pages.get("/dashboard/{name}")
def get_dashboard_file(request: Request, name: str) -> Response:
    if name not in files():
        raise Refusal(ErrorReason.NOT_FOUND, "no such file of the dashboard", "open / in a browser")
    content, etag = files()[name]
    headers = {
        # Asked for again each time, and answered with 304: a new version of the coordinator has a new page.
        "Cache-Control": "no-cache",
        "ETag": etag,
        "Content-Security-Policy": content_security_policy(coordinator_of(request).display.gateway_origin),
        "Referrer-Policy": "no-referrer",
    }
    if request.url.scheme == "https":  # a browser ignores it elsewhere, and notes that in its console
        headers["Cross-Origin-Opener-Policy"] = "same-origin"
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[Path(name).suffix])


def content_security_policy(gateway: str | None) -> str:
    # Labels and sentences on the page come from strangers. It builds nodes, never
    # markup, and this policy holds it to that.
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'" if gateway is None else f"'self' {gateway}",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


class NoSniffing:
    """Every answer is what it says it is: an uploaded payload can never be taken for a script."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self._app(scope, receive, marked)
