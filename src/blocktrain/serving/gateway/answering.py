"""Answers on their way to a client: whole, or as server-sent events with an event for each traversal.

A client that goes away ends its generations at once; nothing here outlives the request.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from blocktrain.serving.engine.engine import TextEngine
from blocktrain.serving.engine.requests import DeadlineError, Mode, ServingError
from blocktrain.serving.gateway.api_errors import as_api_error
from blocktrain.serving.gateway.choices import Choice, Emit, Piece, Totals, joined, write_choices
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.formats import AnswerFormat
from blocktrain.serving.gateway.limits import (
    ANYONE,
    ChoiceTurns,
    GatewayLimits,
    Keys,
    Places,
    Quotas,
    TooManyRequestsError,
)
from blocktrain.serving.gateway.metrics import GatewayMetrics
from blocktrain.serving.gateway.openai_messages import TraversalUsage, Usage

log = logging.getLogger(__name__)
T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


class GatewayStoppingError(ServingError):
    """The gateway was told to stop, and the answer took longer than it waits."""


@dataclass(frozen=True)
class Job:
    """A checked request: what to write and how the client wants to see it."""

    engine: TextEngine
    """The one that writes all of it."""
    choices: Sequence[Choice]
    format: AnswerFormat
    mode: Mode
    seed: int
    prompt_tokens: int
    ignored: Sequence[str] = ()
    """Fields of the request that nobody read."""
    client: str = ANYONE
    """Whose share of the places it takes: a key's owner, or a network."""
    totals: Totals = field(default_factory=Totals)

    @property
    def usage(self) -> Usage:
        totals = self.totals
        traversals, tokens = totals.sum("traversals"), totals.completion_tokens
        cost = TraversalUsage(
            mode=self.mode,
            traversals=traversals,
            scoring_traversals=totals.sum("scoring_traversals"),
            text_bytes=totals.text_bytes,
            bytes_per_traversal=round(totals.text_bytes / traversals, 3) if traversals else 0.0,
            drafted_tokens=totals.sum("drafted"),
            accepted_tokens=totals.sum("accepted"),
            wire_bytes_sent=totals.sum("wire_bytes_sent"),
            wire_bytes_received=totals.sum("wire_bytes_received"),
            degraded_blocks=totals.degraded_blocks,
            versions=list(self.engine.model.versions),
        )
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=tokens,
            total_tokens=self.prompt_tokens + tokens,
            blocktrain=cost,
        )

    def early_headers(self) -> dict[str, str]:
        """What is known when the first piece is."""
        headers = {
            "x-request-id": self.format.id,
            "x-blocktrain-mode": self.mode,
            "x-blocktrain-seed": str(self.seed),
        }
        if self.engine.model.versions:
            headers["x-blocktrain-versions"] = ",".join(map(str, self.engine.model.versions))
        if self.ignored:
            headers["x-blocktrain-ignored"] = ",".join(self.ignored)
        degraded = self.totals.degraded_blocks
        if degraded:
            headers["x-blocktrain-degraded"] = "without blocks " + ",".join(map(str, degraded))
        return headers

    def late_headers(self) -> dict[str, str]:
        """What is known at the end."""
        cost = self.usage.blocktrain
        return {
            **self.early_headers(),
            "x-blocktrain-traversals": str(cost.traversals),
            "x-blocktrain-bytes-per-traversal": str(cost.bytes_per_traversal),
            "x-blocktrain-wire-bytes-sent": str(cost.wire_bytes_sent),
            "x-blocktrain-wire-bytes-received": str(cost.wire_bytes_received),
        }


class Answerer:
    def __init__(
        self, engines: Engines, limits: GatewayLimits, metrics: GatewayMetrics, keys: Keys | None
    ) -> None:
        """Where callers have keys, what they use is counted by key."""
        self.engines, self.limits, self.metrics, self.keyed = engines, limits, metrics, keys is not None
        self.places = Places(limits)
        self.quotas = Quotas({}) if keys is None else Quotas(keys.quotas, keys.usage_file)

    async def write(self, job: Job, emit: Emit) -> None:
        """Waits for places, then writes every choice. Raises what ended it early."""
        begun = time.monotonic()
        try:
            self.quotas.check(job.client, time.time())
        except TooManyRequestsError:
            self.metrics.refusals.labels("quota").inc()
            raise

        async def timed(piece: Piece) -> None:
            if piece.first:
                self.metrics.first_piece.observe(time.monotonic() - begun)
            await emit(piece)

        try:
            with self.engines.used(job.engine):
                async with (
                    self.places.taken(len(job.choices), job.client),
                    asyncio.timeout(self.limits.request_seconds),
                ):
                    turns = ChoiceTurns(lambda: self.places.requests == 1)
                    await write_choices(job.engine, job.choices, timed, job.totals, turns)
        except TooManyRequestsError:
            self.metrics.refusals.labels("places").inc()
            raise
        except TimeoutError:
            raise DeadlineError(
                f"the answer was not complete by its deadline of {self.limits.request_seconds:g} s"
            ) from None
        except ExceptionGroup as several:
            # Choices fail together, mostly for one reason; the client gets one error object.
            raise several.exceptions[0] from None
        finally:
            # Also when the client went away: what was computed for it was spent.
            usage = job.usage
            self.metrics.count_usage(usage, job.client if self.keyed else None)
            self.quotas.count(job.client, usage.total_tokens, time.time())
            ended = sys.exception()
            log.info(
                "answered id=%s caller=%s model=%s mode=%s prompt_tokens=%d completion_tokens=%d "
                "seconds=%.3f end=%s",
                job.format.id,
                job.client,
                job.engine.model.name,
                job.mode,
                usage.prompt_tokens,
                usage.completion_tokens,
                time.monotonic() - begun,
                "complete" if ended is None else type(ended).__name__,
            )

    async def whole(self, job: Job, receive: Receive) -> Response:
        pieces: list[list[Piece]] = [[] for _ in job.choices]

        async def keep(piece: Piece) -> None:
            pieces[piece.index].append(piece)

        try:
            await unless_gone(receive, self.write(job, keep))
        except ClientGoneError:
            self.metrics.cancelled.inc()
            return Response(status_code=499)
        job.format.do_without(job.totals.degraded_blocks)
        answer = job.format.whole([joined(choice) for choice in pieces], job.usage)
        return Response(answer.model_dump_json(), headers=job.late_headers(), media_type="application/json")


class EventStream(Response):
    """Server-sent events. Nothing is sent before the first piece, so that an early failure still gets its
    status; a later one is an event with an error object."""

    media_type = "text/event-stream"

    def __init__(self, answerer: Answerer, job: Job) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # Response sets it to 0, and nobody knows the length yet
        self.answerer, self.job = answerer, job
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._events(send))
        except ClientGoneError:
            self.answerer.metrics.cancelled.inc()
        except GatewayStoppingError as error:
            if not self._started:
                raise
            body = self.job.format.broken_off(as_api_error(error).body).encode()
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _events(self, send: Send) -> None:
        turn = asyncio.Lock()

        async def write(events: Iterator[str]) -> None:
            async with turn:  # choices are written side by side, and events must not interleave
                for event in events:
                    if not self._started:
                        self._started = True
                        self.headers.update(self.job.early_headers())
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

        async def emit(piece: Piece) -> None:
            self.job.format.do_without(self.job.totals.degraded_blocks)
            await write(self.job.format.events(piece, lambda: self.job.usage))

        try:
            await self.answerer.write(self.job, emit)
            await write(self.job.format.ending(self.job.usage))
        except Exception as error:
            if not self._started:
                raise
            log.warning("broke off stream error=%r", error)
            await write(iter([self.job.format.broken_off(as_api_error(error).body)]))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first or the gateway stops."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    # Starlette tells nobody that a client left; one must read its messages.
    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    except asyncio.CancelledError:  # by the server alone, when its time to stop is over
        raise GatewayStoppingError("the gateway is stopping; ask again for the rest") from None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
