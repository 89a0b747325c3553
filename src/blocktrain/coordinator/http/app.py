"""The HTTP API: every route of docs/protocol.md, one JSON error shape, OpenAPI true to behaviour.

The routes are sorted by who may use them: `worker_routes`, `operator_routes` (judges too), `public_routes`,
`downloads`, and `pages` for browsers. Signatures and bodies are checked in `signed_requests`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blocktrain.coordinator.http.downloads import downloads
from blocktrain.coordinator.http.message_routes import ShortWay
from blocktrain.coordinator.http.operator_routes import operator_routes
from blocktrain.coordinator.http.pages import NoSniffing, pages
from blocktrain.coordinator.http.public_routes import MAX_EVENT_STREAMS, News, public_routes
from blocktrain.coordinator.http.signed_requests import invalid_message
from blocktrain.coordinator.http.worker_routes import worker_routes
from blocktrain.coordinator.metrics import CountTraffic
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.errors import StorageError
from blocktrain.wire.identity import WorkerId
from blocktrain.wire.messages import ErrorAnswer, ErrorReason

log = logging.getLogger(__name__)

WRITING_THREADS = 16
"""For requests that may wait for the disk; those that wait for it together share one call of it."""
READING_THREADS = 4
"""For GET, so that a worker that looks for a new head does not wait behind others' writing. More would only
wait for the interpreter."""
STORE_THREADS = 8
"""For what a store of blobs is asked for, in either direction: it may be far away or silent for a minute, and
heartbeats must not wait for it."""
ARCHIVE_THREADS = 2
"""For the model as one file, which anybody may ask for and which takes a while to begin."""
DECODING_THREADS = 2
"""For payloads of blocks that are not small. Each may hold a whole decoded block; two keep both cores of a
small host busy."""

API = (worker_routes, operator_routes, downloads, public_routes)


def create_app(coordinator: Coordinator) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Not at import: both belong to the event loop that serves.
        app.state.event_streams = asyncio.Semaphore(MAX_EVENT_STREAMS)
        app.state.decoding = CapacityLimiter(DECODING_THREADS)
        app.state.archives = CapacityLimiter(ARCHIVE_THREADS)
        app.state.bodies = Counter[WorkerId]()
        with (
            ThreadPoolExecutor(WRITING_THREADS, thread_name_prefix="writing") as app.state.writing_threads,
            ThreadPoolExecutor(READING_THREADS, thread_name_prefix="reading") as app.state.reading_threads,
            ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store") as app.state.store_threads,
            News(coordinator.resources.store) as app.state.news,
        ):
            yield

    # No /docs: its page would load scripts from another origin. /openapi.json is served.
    app = FastAPI(
        title="BlockTrain coordinator", version="1", docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.state.coordinator = coordinator
    for routes in (*API, pages):
        app.include_router(routes)
    app.add_middleware(ShortWay, routers=API, answer_error=_answer_error)
    app.add_middleware(CountTraffic, metrics=coordinator.metrics)
    app.add_middleware(NoSniffing)
    for kind in (Refusal, StorageError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    return app


def _answer_error(request: Request, error: Exception) -> JSONResponse:
    """Every error, ours or the framework's, in the one shape."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, Refusal):
        refusal = error
    elif isinstance(error, RequestValidationError):
        refusal = invalid_message(list(error.errors()))
    elif isinstance(error, HTTPException):
        headers = error.headers
        if error.status_code == 405:
            refusal = Refusal(
                ErrorReason.METHOD_NOT_ALLOWED, "this route has other methods", "see /openapi.json"
            )
        else:
            refusal = Refusal(ErrorReason.NOT_FOUND, "no such route", "see /openapi.json")
    elif isinstance(error, StorageError):
        # The cause may hold a path or an address of the operator's: it goes to the log only.
        log.error("storage does not answer: %s", error)
        headers = {"Retry-After": "5"}
        refusal = Refusal(ErrorReason.UNAVAILABLE, "the coordinator's storage does not answer", "try again")
    else:
        log.exception("failed on %s", request.url.path, exc_info=error)
        body = {"error": {"reason": "internal", "message": "the coordinator has a fault; see its log"}}
        return JSONResponse(body, 500)
    answer = ErrorAnswer(error=refusal.body)
    return JSONResponse(answer.model_dump(mode="json", exclude_none=True), refusal.status, headers)
