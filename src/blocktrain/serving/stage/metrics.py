"""What a stage counts, in Prometheus' words. One registry per stage, so that tests can run several."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blocktrain.wire.frames import FrameType

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class StageMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by type and outcome", "type", "outcome")
        self._requests: dict[tuple[FrameType, str], Counter] = {}
        self.rows = self._counter("rows", "Rows of log-probs sent")
        self.tokens = self._counter("tokens", "Tokens run through the blocks")
        self.bytes_received = self._counter("received_bytes", "Bytes of frames in")
        self.bytes_sent = self._counter("sent_bytes", "Bytes of frames out")
        self.refused = self._counter("refused_connections", "Connections refused or broken", "reason")
        self.evicted = self._gauge("evicted_sessions", "Sessions evicted since the start")
        self.connections = self._gauge("connections", "Open connections")
        self.sessions = self._gauge("sessions", "Sessions with caches")
        self.positions = self._gauge("cached_positions", "Positions in all caches")
        self.waiting = self._gauge("waiting_requests", "Requests not yet computing")
        self.forward_seconds = self._histogram("forward_seconds", "Time of one forward pass", _SECONDS)
        self.batch_sessions = self._histogram("batch_sessions", "Sessions in one forward pass", _SIZES)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"blocktrain_stage_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"blocktrain_stage_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"blocktrain_stage_{name}", text, buckets=buckets, registry=self.registry)

    def count_request(self, kind: FrameType, outcome: str) -> None:
        # Kept: to find a counter by its labels takes as long as to decode a frame.
        counter = self._requests.get((kind, outcome))
        if counter is None:
            counter = self.requests.labels(type=kind.name.lower(), outcome=outcome)
            self._requests[kind, outcome] = counter
        counter.inc()

    def observe_forward(self, works: int, tokens: int, seconds: float) -> None:
        self.batch_sessions.observe(works)
        self.forward_seconds.observe(seconds)
        self.tokens.inc(tokens)
