"""What `/metrics` shows, in one registry per coordinator; each name is listed in docs/protocol.md."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from blocktrain.wire.messages import StatusAnswer, Traffic

KINDS = ("payload", "snapshot", "control")


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "blocktrain_requests", "Requests answered", ["method", "route", "status"], registry=self._registry
        )
        self._bytes = Counter(
            "blocktrain_bytes", "Bytes of requests (up) and answers (down), headers included",
            ["direction", "kind"], registry=self._registry,
        )  # fmt: skip
        self._verdicts = Counter(
            "blocktrain_verdicts", "Verdicts on updates", ["outcome", "reason"], registry=self._registry
        )
        self._failures = Counter(
            "blocktrain_loop_failures", "Failures of background loops, each tried again", ["loop"],
            registry=self._registry,
        )  # fmt: skip
        self._merge_seconds = Histogram(
            "blocktrain_merge_seconds", "Seconds from the decision to close a round to its new snapshot",
            registry=self._registry,
        )  # fmt: skip
        self._version = Gauge(
            "blocktrain_block_version", "Head version of a block", ["block"], registry=self._registry
        )
        self._workers = Gauge("blocktrain_workers", "Live workers", registry=self._registry)
        self._participation = Gauge(
            "blocktrain_participation", "Share of assigned work that arrived on time", registry=self._registry
        )
        self._loss = Gauge(
            "blocktrain_consensus_ce",
            "Held-out cross entropy of the assembled model",
            registry=self._registry,
        )
        self._judging = Gauge(
            "blocktrain_judging_share",
            "Compute of judges and guard as a share of the compute they judged, since the start",
            registry=self._registry,
        )
        self._traffic = {(way, kind): 0 for way in ("up", "down") for kind in KINDS}

    def request(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, str(status)).inc()

    def moved(self, direction: str, kind: str, num_bytes: int) -> None:
        self._bytes.labels(direction, kind).inc(num_bytes)
        self._traffic[direction, kind] += num_bytes

    def verdict(self, outcome: str, reason: str) -> None:
        self._verdicts.labels(str(outcome), str(reason)).inc()

    def merged(self, seconds: float) -> None:
        self._merge_seconds.observe(seconds)

    def failed(self, loop: str) -> None:
        self._failures.labels(loop).inc()

    def traffic(self, direction: str) -> Traffic:
        return Traffic(**{kind: self._traffic[direction, kind] for kind in KINDS})

    def text(self, status: StatusAnswer, judging_share: float) -> bytes:
        self._judging.set(judging_share)
        for block in status.blocks:
            self._version.labels(str(block.block)).set(block.head_version)
        self._workers.set(sum(worker.live for worker in status.workers))
        if status.participation is not None:
            self._participation.set(status.participation)
        if status.evaluations:
            self._loss.set(status.evaluations[-1].consensus_ce)
        return generate_latest(self._registry)
