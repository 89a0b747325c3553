"""What a stage counts, in Prometheus' words. One registry per stage, so that tests can run several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class StageMetrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        prefix = "blocktrain_stage"
        self.requests = Counter(
            f"{prefix}_requests", "Requests by type and outcome", ["type", "outcome"], registry=registry
        )
        self.rows = Counter(f"{prefix}_rows", "Rows of log-probs sent", registry=registry)
        self.tokens = Counter(f"{prefix}_tokens", "Tokens run through the blocks", registry=registry)
        self.bytes_received = Counter(f"{prefix}_received_bytes", "Bytes of frames in", registry=registry)
        self.bytes_sent = Counter(f"{prefix}_sent_bytes", "Bytes of frames out", registry=registry)
        self.refused = Counter(
            f"{prefix}_refused_connections", "Connections refused or broken", ["reason"], registry=registry
        )
        self.evicted = Gauge(
            f"{prefix}_evicted_sessions", "Sessions evicted since the start", registry=registry
        )
        self.connections = Gauge(f"{prefix}_connections", "Open connections", registry=registry)
        self.sessions = Gauge(f"{prefix}_sessions", "Sessions with caches", registry=registry)
        self.positions = Gauge(f"{prefix}_cached_positions", "Positions in all caches", registry=registry)
        self.waiting = Gauge(f"{prefix}_waiting_requests", "Requests not yet computing", registry=registry)
        self.forward_seconds = Histogram(
            f"{prefix}_forward_seconds", "Time of one forward pass", buckets=_SECONDS, registry=registry
        )
        self.batch_sessions = Histogram(
            f"{prefix}_batch_sessions", "Sessions in one forward pass", buckets=_SIZES, registry=registry
        )

    def observe_forward(self, works: int, tokens: int, seconds: float) -> None:
        self.batch_sessions.observe(works)
        self.forward_seconds.observe(seconds)
        self.tokens.inc(tokens)
