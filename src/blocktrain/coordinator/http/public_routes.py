"""Routes that anybody may read: the run, blocks, workers, the ledger and its events, health and metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from blocktrain.coordinator.http.message_routes import message_router
from blocktrain.coordinator.http.openapi import BlockPath, IdPath, Since, refuses
from blocktrain.coordinator.http.signed_requests import Service
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.coordinator.storage.store import Store
from blocktrain.wire import messages
from blocktrain.wire.messages import MAX_COUNT, ErrorReason

public_routes = message_router()

MAX_EVENT_STREAMS = 200
EVENT_PAUSE_SECONDS = 0.1
"""Between two looks of a stream: a busy run writes a hundred entries a second, and 200 streams may read."""
LOOK_SECONDS = 5.0
"""How long a stream trusts that it will be woken: a process may have lost its line to the database."""
QUIET_SECONDS = 15.0
"""After this long without an event a comment goes out, so that proxies do not take the stream for dead."""
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""For reverse proxies, which would hold events back until they have many."""

NAMED_THING = refuses(ErrorReason.NOT_FOUND, ErrorReason.INVALID_MESSAGE)


@public_routes.get("/v1/run", responses=refuses())
def get_run(service: Service) -> messages.RunAnswer:
    """What every worker must agree on: recipe, text, schemas, codec; and the server's time."""
    return service.reports.run()


@public_routes.get("/v1/blocks/{block}", responses=NAMED_THING)
def get_block(service: Service, block: BlockPath) -> messages.BlockAnswer:
    """Head and open round of a block."""
    return service.reports.block(block)


@public_routes.get("/v1/blocks/{block}/merges", responses=NAMED_THING)
def get_merges(service: Service, block: BlockPath, since: Since = 0) -> messages.MergesAnswer:
    """How the versions after `since` came about: enough to rebuild them from payloads."""
    return service.reports.merges(block, since)


@public_routes.get("/v1/workers", responses=refuses())
def get_workers(service: Service) -> messages.WorkersAnswer:
    """Standing and contribution of every worker, the most useful first."""
    return service.workers.workers()


@public_routes.get("/v1/workers/{worker_id}", responses=NAMED_THING)
def get_worker(service: Service, worker_id: IdPath) -> messages.WorkerAnswer:
    """One worker's standing and its latest verdicts, each with its reason."""
    return service.workers.worker(worker_id)


@public_routes.get("/v1/verdicts", responses=refuses())
def get_verdicts(service: Service) -> messages.VerdictsAnswer:
    """The latest verdicts on anybody's updates, each with its reason."""
    return service.workers.verdicts()


@public_routes.get("/v1/contributions", responses=refuses())
def get_contributions(service: Service) -> messages.ContributionsAnswer:
    """Who trained what of the current snapshots, signed by the coordinator."""
    return service.workers.contributions()


@public_routes.get("/v1/ledger", responses=refuses(ErrorReason.INVALID_MESSAGE))
def get_ledger(service: Service, since: Since = 0) -> messages.LedgerAnswer:
    """Ledger entries from number `since` on, a page at a time."""
    return service.reports.ledger(since)


@public_routes.get("/v1/status", responses=refuses())
def get_status(service: Service) -> messages.StatusAnswer:
    """The state of the whole swarm."""
    return service.status()


@public_routes.get("/healthz", responses=refuses())
def get_health(service: Service) -> messages.HealthAnswer:
    """Whether the coordinator and its database answer."""
    service.reports.ledger_length()  # a read that fails answers 503
    return messages.HealthAnswer(status="draining" if service.draining else "ok")


@public_routes.get("/metrics", response_class=PlainTextResponse, responses=refuses())
def get_metrics(service: Service) -> PlainTextResponse:
    """Prometheus metrics."""
    return PlainTextResponse(
        service.metrics.text(service.status(), service.judging.cost.share),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@public_routes.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses={
        200: {"description": "server-sent events", "content": {"text/event-stream": {}}},
        **refuses(ErrorReason.INVALID_MESSAGE),
    },
)
async def get_events(
    request: Request, service: Service, since: Annotated[int | None, Query(ge=0, le=MAX_COUNT)] = None
) -> StreamingResponse:
    """Ledger entries as they are written: id is the sequence number, event the kind, data the entry.

    Starts at `since`, after the `Last-Event-ID` header, or with what happens next.
    """
    # A stream holds a connection for hours, so they have a cap of their own, well below that of connections.
    streams: asyncio.Semaphore = request.app.state.event_streams
    if streams.locked():
        raise Refusal(
            ErrorReason.UNAVAILABLE, f"{MAX_EVENT_STREAMS} event streams are open", "try again later"
        )
    last = request.headers.get("last-event-id", "")
    if since is None and re.fullmatch(r"[0-9]{1,15}", last):
        since = int(last) + 1
    if since is None:
        since = await run_in_threadpool(service.reports.ledger_length)
    return StreamingResponse(
        _events(service, request.app.state.news, streams, since),
        headers=UNBUFFERED,
        media_type="text/event-stream",
    )


class News:
    """Wakes coroutines when something was acknowledged, here or by another process."""

    def __init__(self, store: Store) -> None:
        self._loop, self._told, self._event = asyncio.get_running_loop(), False, asyncio.Event()
        self._watchers = store.watchers

    def __enter__(self) -> News:
        self._watchers.append(self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        self._watchers.remove(self._tell)

    @property
    def next(self) -> asyncio.Event:
        """Set at the next change."""
        return self._event

    def _tell(self) -> None:
        # Once for all that is written before the loop comes to it.
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the server has ended meanwhile
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._told = False
        woken, self._event = self._event, asyncio.Event()
        woken.set()


async def _events(
    service: Coordinator, news: News, streams: asyncio.Semaphore, since: int
) -> AsyncIterator[str]:
    async with streams:
        quiet_since = monotonic()
        while not service.draining:
            change = news.next  # before the look: what is written meanwhile ends the wait after it
            page = await run_in_threadpool(service.reports.ledger, since)
            for entry in page.entries:
                yield f"id: {entry.sequence}\nevent: {entry.kind}\ndata: {entry.model_dump_json()}\n\n"
                since = entry.sequence + 1
            if not page.entries:
                with suppress(TimeoutError):
                    await asyncio.wait_for(change.wait(), LOOK_SECONDS)
            if page.entries or monotonic() - quiet_since >= QUIET_SECONDS:
                quiet_since = monotonic()
                yield ": still here\n\n"
            await asyncio.sleep(EVENT_PAUSE_SECONDS)
