"""The gateway's numbers for Prometheus, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from blocktrain.serving.gateway.openai_messages import Usage

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class GatewayMetrics:
    def __init__(self) -> None:
        # A registry of its own: two gateways in one process, as tests have them, would clash in the global
        # one.
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests", "route", "status")
        self.refusals = self._counter("refusals", "Requests turned away at the door", "reason")
        self.cancelled = self._counter("cancelled", "Requests whose client went away")
        self.degraded = self._counter("degraded", "Answers that had to do without some block")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read")
        self.completion_tokens = self._counter("completion_tokens", "Tokens given to clients", "mode")
        self.text_bytes = self._counter("text_bytes", "Bytes of generated text given to clients", "mode")
        self.traversals = self._counter("traversals", "Traversals of the stages", "mode")
        self.key_answers = self._counter("key_answers", "Answers begun, by the name of the key", "key")
        self.key_tokens = self._counter("key_tokens", "Tokens read and given, by key", "key", "kind")
        self.wire_sent = self._counter("wire_bytes_sent", "Bytes sent to stages")
        self.wire_received = self._counter("wire_bytes_received", "Bytes received from stages")
        self.active = self._gauge("active_generations", "Generations in progress")
        self.waiting = self._gauge("waiting_requests", "Requests waiting for a place")
        self.ready = self._gauge("ready", "1 where requests can be answered")
        self.first_piece = self._histogram("first_piece_seconds", "From the request to its first text")
        self.duration = self._histogram("request_seconds", "From the request to the end of its answer")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"blocktrain_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"blocktrain_gateway_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"blocktrain_gateway_{name}", text, buckets=SECONDS, registry=self.registry)

    def count_usage(self, usage: Usage, key: str | None) -> None:
        """`key` is the name of the caller's key, where there are keys: addresses would be endless labels."""
        cost, mode = usage.blocktrain, usage.blocktrain.mode
        if key is not None:
            self.key_answers.labels(key).inc()
            self.key_tokens.labels(key, "prompt").inc(usage.prompt_tokens)
            self.key_tokens.labels(key, "completion").inc(usage.completion_tokens)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.completion_tokens.labels(mode).inc(usage.completion_tokens)
        self.text_bytes.labels(mode).inc(cost.text_bytes)
        self.traversals.labels(mode).inc(cost.traversals)
        self.wire_sent.inc(cost.wire_bytes_sent)
        self.wire_received.inc(cost.wire_bytes_received)
        if cost.degraded_blocks:
            self.degraded.inc()
