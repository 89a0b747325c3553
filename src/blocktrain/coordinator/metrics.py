"""What `/metrics` shows, in one registry per coordinator, and the middleware that counts requests and bytes.

Each name is listed in docs/protocol.md; tests/docs/test_grafana.py holds the dashboards to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.wire.messages import ByteCounts, StatusAnswer

KINDS = ("payload", "snapshot", "control")
TEXT = "text"
"""Bytes of the run's text, which is fetched once: counted, and no part of what rounds cost."""
HEADER_LINE_BYTES = 4
"""Colon, space and line end of one header."""
FIRST_LINE_BYTES = 16
"""Method, version and line end of a request, or the status line of an answer: about as much, and it saves
asking the server for the exact bytes."""


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        about = "Requests answered"
        self._requests = counter("blocktrain_requests", about, ["method", "route", "status"])
        about = "Bytes of requests (up) and answers (down), headers included"
        self._bytes = counter("blocktrain_bytes", about, ["direction", "kind"])
        self._verdicts = counter("blocktrain_verdicts", "Verdicts on updates", ["outcome", "reason"])
        about = "Failures of background loops, each tried again"
        self._failures = counter("blocktrain_loop_failures", about, ["loop"])
        about = "Seconds from the decision to close a round to its new snapshot"
        self._merge_seconds = Histogram("blocktrain_merge_seconds", about, registry=registry)
        self._version = gauge("blocktrain_block_version", "Head version of a block", ["block"])
        self._workers = gauge("blocktrain_workers", "Live workers")
        about = "Share of assigned work that arrived on time"
        self._participation = gauge("blocktrain_participation", about)
        about = "Held-out cross entropy of the assembled model, nats per byte"
        self._loss = gauge("blocktrain_consensus_ce", about)
        self._token_loss = gauge("blocktrain_consensus_ce_per_token", "The same, nats per token")
        about = "Compute of judges and guard as a share of the compute they judged, since the start"
        self._judging = gauge("blocktrain_judging_share", about)
        # Plain sums: the status answer needs them, and the registry's counters, each with a lock, would be
        # raised five times in a request. They are brought up to date when somebody asks.
        self._traffic = {(way, kind): 0 for way in ("up", "down") for kind in (*KINDS, TEXT)}
        self._shown, self._showing = dict(self._traffic), Lock()

    def request(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, str(status)).inc()

    def moved(self, direction: str, kind: str, num_bytes: int) -> None:
        self._traffic[direction, kind] += num_bytes

    def verdict(self, outcome: str, reason: str) -> None:
        self._verdicts.labels(str(outcome), str(reason)).inc()

    def merged(self, seconds: float) -> None:
        self._merge_seconds.observe(seconds)

    def failed(self, loop: str) -> None:
        self._failures.labels(loop).inc()

    def traffic(self, direction: str) -> ByteCounts:
        return ByteCounts(**{kind: self._traffic[direction, kind] for kind in KINDS})

    def text(self, status: StatusAnswer, judging_share: float) -> bytes:
        self._judging.set(judging_share)
        with self._showing:
            for (way, kind), moved in list(self._traffic.items()):
                self._bytes.labels(way, kind).inc(moved - self._shown[way, kind])
                self._shown[way, kind] = moved
        for block in status.blocks:
            self._version.labels(str(block.block)).set(block.head_version)
        self._workers.set(sum(worker.live for worker in status.workers))
        if status.participation is not None:
            self._participation.set(status.participation)
        if status.evaluations:
            newest = status.evaluations[-1]
            self._loss.set(newest.consensus_ce / newest.bytes_per_token)
            self._token_loss.set(newest.consensus_ce)
        return generate_latest(self._registry)


class CountTraffic:
    """Middleware: counts every request, and what crosses the socket by kind, headers included."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # By what travels, not by route: docs/experiments.md compares payloads with whole checkpoints.
        method, path = scope["method"], scope["path"]
        kind = "control"
        if path.startswith(("/v1/snapshots/", "/v1/checkpoint")):
            kind = "snapshot"
        elif path.startswith(("/v1/data/", "/v1/judge/data/")):
            kind = TEXT
        elif path.startswith("/v1/updates/") and method in ("GET", "PUT"):
            kind = "payload"
        self._metrics.moved("up", kind, _head_bytes(scope["headers"]) + len(path))

        async def counted_receive() -> Message:
            message = await receive()
            self._metrics.moved("up", kind, len(message.get("body", b"")))
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.moved("down", kind, _head_bytes(message.get("headers", ())))
                # The route's pattern, not the path: a stranger must not be able to make up label values.
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.request(method, route, message["status"])
            self._metrics.moved("down", kind, len(message.get("body", b"")))
            await send(message)

        await self._app(scope, counted_receive, counted_send)


def _head_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return FIRST_LINE_BYTES + sum(len(name) + len(value) + HEADER_LINE_BYTES for name, value in headers)
