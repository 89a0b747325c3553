"""The HTTP API: every route of docs/protocol.md, one JSON error shape, OpenAPI true to behaviour.

A route checks and translates; deciding and writing is the service's. Signatures and bodies are `bodies`'.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from blocktrain.coordinator.http.pages import NoSniffing, pages
from blocktrain.coordinator.http.signed_requests import (
    Signed,
    SignedBody,
    checked_body,
    coordinator_of,
    declared_length,
    invalid_message,
    received_file,
    signed_empty,
    verified,
)
from blocktrain.coordinator.http.traffic import CountTraffic
from blocktrain.coordinator.refusals import STATUS, Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.coordinator.storage.blobs import payload_key, snapshot_key
from blocktrain.errors import StorageError
from blocktrain.wire.messages import (
    MAX_BLOCKS,
    MAX_COUNT,
    Assignment,
    AssignmentRequest,
    BanRequest,
    BlockAnswer,
    ChallengeAnswer,
    CommitAnswer,
    CommitRequest,
    ContributionsAnswer,
    ErrorAnswer,
    ErrorReason,
    EvidenceReport,
    Finished,
    HealthAnswer,
    HeartbeatAnswer,
    HeartbeatRequest,
    JoinAnswer,
    JoinRequest,
    JudgeTask,
    JudgeWait,
    LedgerAnswer,
    MergesAnswer,
    OperatorAnswer,
    ReturnAnswer,
    RunAnswer,
    StatusAnswer,
    Verdict,
    VerdictsAnswer,
    Wait,
    WorkerAnswer,
    WorkersAnswer,
)
from blocktrain.wire.signing import Reason, VerifiedRequest

log = logging.getLogger(__name__)
router = APIRouter()

DECODING_THREADS = 2
MAX_EVENT_STREAMS = 200
EVENT_POLL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""For reverse proxies, which would hold events back until they have many."""

Service = Annotated[Coordinator, Depends(coordinator_of)]
BlockPath = Annotated[int, Path(ge=0, lt=MAX_BLOCKS)]
HashPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
AssignmentPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
WorkerPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
UpdatePath = HashPath
Since = Annotated[int, Query(ge=0, le=MAX_COUNT)]


# --- what the OpenAPI says ---------------------------------------------------------------------------

SIGNATURE_REASONS = tuple(Reason)
BODY_REASONS = (
    ErrorReason.LENGTH_REQUIRED,
    ErrorReason.TOO_LARGE,
    ErrorReason.TOO_SLOW,
    ErrorReason.WRONG_LENGTH,
    ErrorReason.INVALID_MESSAGE,
)


def refuses(*reasons: str) -> dict[int | str, dict[str, Any]]:
    """The documented error answers of a route: each status with the reasons that lead to it."""
    grouped: dict[int, list[str]] = {}
    for reason in (*reasons, ErrorReason.UNAVAILABLE):
        named = grouped.setdefault(STATUS[reason], [])
        if str(reason) not in named:
            named.append(str(reason))
    return {
        status: {"model": ErrorAnswer, "description": ", ".join(names)} for status, names in grouped.items()
    }


def signed_refusals(*reasons: str) -> dict[int | str, dict[str, Any]]:
    return refuses(*SIGNATURE_REASONS, *BODY_REASONS, ErrorReason.NOT_JOINED, ErrorReason.BANNED, *reasons)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The body is read by `SignedBody`, after the signature, so FastAPI must be told of it."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, definition in schema.pop("$defs", {}).items():
        schema = _inlined(schema, name, definition)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, name: str, definition: Any) -> Any:
    if isinstance(schema, dict):
        if schema.get("$ref") == f"#/components/schemas/{name}":
            return {**definition, **{key: value for key, value in schema.items() if key != "$ref"}}
        return {key: _inlined(value, name, definition) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inlined(value, name, definition) for value in schema]
    return schema


# --- joining and assignments -------------------------------------------------------------------------


@router.get("/v1/run", responses=refuses())
def get_run(service: Service) -> RunAnswer:
    """What every worker must agree on: recipe, text, schemas, codec; and the server's time."""
    return service.reports.run()


@router.post(
    "/v1/join",
    responses=signed_refusals(
        ErrorReason.CORPUS_MISMATCH,
        ErrorReason.STAMP_REQUIRED,
        ErrorReason.INVITE_REQUIRED,
        ErrorReason.NOT_LISTED,
        ErrorReason.ADDRESS_FULL,
    ),
    openapi_extra=takes(JoinRequest),
)
def post_join(
    request: Request,
    service: Service,
    signed: Annotated[Signed[JoinRequest], Depends(SignedBody(JoinRequest))],
) -> JoinAnswer:
    """Become a worker of this run; doing it again is safe."""
    address = None if request.client is None else request.client.host
    return service.assignments.join(signed.worker_id, signed.public_key, signed.message, address)


@router.get("/v1/challenge/{worker_id}", responses=refuses(ErrorReason.INVALID_MESSAGE))
def get_challenge(service: Service, worker_id: WorkerPath) -> ChallengeAnswer:
    """What this worker must stamp before it joins, and how hard that is."""
    return service.door.challenge(worker_id, service.context.clock())


@router.post(
    "/v1/assignments",
    responses=signed_refusals(ErrorReason.NOT_FOUND, ErrorReason.NOT_YOURS),
    openapi_extra=takes(AssignmentRequest),
)
def post_assignments(
    service: Service, signed: Annotated[Signed[AssignmentRequest], Depends(SignedBody(AssignmentRequest))]
) -> Assignment | Wait | Finished:
    """What to train next."""
    return service.assignments.ask(signed.worker_id, signed.message)


@router.post(
    "/v1/assignments/{assignment_id}/heartbeat",
    responses=signed_refusals(ErrorReason.NOT_FOUND, ErrorReason.NOT_YOURS),
    openapi_extra=takes(HeartbeatRequest),
)
def post_heartbeat(
    service: Service,
    assignment_id: AssignmentPath,
    signed: Annotated[Signed[HeartbeatRequest], Depends(SignedBody(HeartbeatRequest))],
) -> HeartbeatAnswer:
    """Keep the lease; learn of a new head, the deadline, or that the work can no longer count."""
    return service.assignments.heartbeat(signed.worker_id, assignment_id, signed.message)


@router.delete(
    "/v1/assignments/{assignment_id}",
    responses=signed_refusals(ErrorReason.NOT_FOUND, ErrorReason.NOT_YOURS),
)
def delete_assignment(
    service: Service,
    assignment_id: AssignmentPath,
    signed: Annotated[VerifiedRequest, Depends(signed_empty)],
) -> ReturnAnswer:
    """Hand the lease back."""
    return service.assignments.hand_back(signed.worker_id, assignment_id)


# --- updates -----------------------------------------------------------------------------------------


@router.post(
    "/v1/assignments/{assignment_id}/commit",
    responses=signed_refusals(
        ErrorReason.NOT_FOUND,
        ErrorReason.NOT_YOURS,
        ErrorReason.LEASE_RETURNED,
        ErrorReason.ALREADY_COMMITTED,
        ErrorReason.UNKNOWN_BASE,
        ErrorReason.ROUND_NOT_OPEN,
    ),
    openapi_extra=takes(CommitRequest),
)
def post_commit(
    service: Service,
    assignment_id: AssignmentPath,
    signed: Annotated[Signed[CommitRequest], Depends(SignedBody(CommitRequest))],
) -> CommitAnswer:
    """Promise a payload by its hash; learn where to put it."""
    return service.updates.commit(signed.worker_id, assignment_id, signed.message)


@router.put(
    "/v1/updates/{payload_hash}",
    responses=signed_refusals(ErrorReason.NOT_COMMITTED, ErrorReason.HASH_MISMATCH),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def put_update(request: Request, service: Service, payload_hash: HashPath) -> Verdict:
    """Reveal a committed payload; Content-Length must be exactly the committed one."""
    length = declared_length(request, service.context.run.max_payload_bytes)
    signature = await verified(request)
    expected = await run_in_threadpool(service.updates.expect, signature.worker_id, payload_hash, length)
    if expected.verdict is not None:
        async for _ in checked_body(request, signature):
            pass
        return expected.verdict
    async with received_file(request, signature) as received:
        verdict = await _decoding(
            request, service.updates.reveal, expected, received.file, received.content_hash
        )
    service.metrics.verdict(verdict)
    return verdict


@router.post(
    "/v1/updates/{payload_hash}/uploaded",
    responses=signed_refusals(ErrorReason.NOT_COMMITTED, ErrorReason.NOT_UPLOADED, ErrorReason.HASH_MISMATCH),
)
async def post_uploaded(
    request: Request,
    service: Service,
    payload_hash: HashPath,
    signed: Annotated[VerifiedRequest, Depends(signed_empty)],
) -> Verdict:
    """The payload lies at the presigned upload place: look at it."""
    verdict = await _decoding(request, service.updates.uploaded, signed.worker_id, payload_hash)
    service.metrics.verdict(verdict)
    return verdict


async def _decoding(request: Request, judge: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """In a thread, few at a time: each holds a whole decoded block in memory."""
    limiter: CapacityLimiter = request.app.state.decoding
    return await to_thread.run_sync(judge, *arguments, limiter=limiter)


@router.get(
    "/v1/updates/{payload_hash}/verdict",
    responses=signed_refusals(ErrorReason.NOT_COMMITTED, ErrorReason.NOT_UPLOADED),
)
def get_verdict(
    service: Service, payload_hash: HashPath, signed: Annotated[VerifiedRequest, Depends(signed_empty)]
) -> Verdict:
    """What has become of this worker's payload so far."""
    return service.updates.verdict(signed.worker_id, payload_hash)


# --- judges ------------------------------------------------------------------------------------------


def judge_of(service: Service, signed: Annotated[VerifiedRequest, Depends(signed_empty)]) -> str:
    _refuse_non_judge(service, signed.worker_id, signed.public_key)
    return signed.worker_id


def _is_operator(service: Coordinator, public_key: bytes) -> bool:
    return public_key.hex() == service.context.run.coordinator_key


def _refuse_non_judge(service: Coordinator, worker_id: str, public_key: bytes) -> None:
    if not _is_operator(service, public_key) and not service.door.is_judge(worker_id):
        raise Refusal(
            ErrorReason.NOT_JUDGE,
            f"key {worker_id} may not judge this run",
            "ask the operator to add the id to judges.txt in the coordinator's data folder",
        )


@router.post("/v1/judge/lease", responses=signed_refusals(ErrorReason.NOT_JUDGE))
def post_judge_lease(service: Service, judge: Annotated[str, Depends(judge_of)]) -> JudgeTask | JudgeWait:
    """The update that has waited longest for a verdict."""
    return service.judging.lease(judge)


@router.get(
    "/v1/judge/tasks/{update_id}/payload",
    response_class=Response,
    responses={
        200: {"description": "the payload", "content": {"application/octet-stream": {}}},
        **signed_refusals(ErrorReason.NOT_JUDGE, ErrorReason.NOT_FOUND, ErrorReason.LEASE_LOST),
    },
)
def get_judge_payload(
    service: Service, update_id: UpdatePath, judge: Annotated[str, Depends(judge_of)]
) -> Response:
    """The payload of an update lent to this judge; nobody else sees it before it is merged."""
    key = payload_key(service.judging.lent_payload(judge, update_id))
    return Response(service.context.blobs.get(key), media_type="application/octet-stream")


@router.post(
    "/v1/judge/tasks/{update_id}",
    responses=signed_refusals(ErrorReason.NOT_JUDGE, ErrorReason.NOT_FOUND, ErrorReason.LEASE_LOST),
    openapi_extra=takes(EvidenceReport),
)
def post_judge_report(
    service: Service,
    update_id: UpdatePath,
    signed: Annotated[Signed[EvidenceReport], Depends(SignedBody(EvidenceReport))],
) -> OperatorAnswer:
    """What this judge found; the verdict follows from it."""
    _refuse_non_judge(service, signed.worker_id, signed.public_key)
    return service.judging.report(signed.worker_id, update_id, signed.message)


# --- the operator ------------------------------------------------------------------------------------


def _refuse_non_operator(service: Coordinator, public_key: bytes) -> None:
    if not _is_operator(service, public_key):
        raise Refusal(
            ErrorReason.NOT_OPERATOR,
            "this is for the run's operator",
            "sign with coordinator.key of the coordinator's data folder",
        )


@router.post(
    "/v1/workers/{worker_id}/ban",
    responses=signed_refusals(ErrorReason.NOT_OPERATOR),
    openapi_extra=takes(BanRequest),
)
def post_ban(
    service: Service,
    worker_id: WorkerPath,
    signed: Annotated[Signed[BanRequest], Depends(SignedBody(BanRequest))],
) -> OperatorAnswer:
    """Ban a worker for some time; 0 seconds lift a ban."""
    _refuse_non_operator(service, signed.public_key)
    return service.people.ban(worker_id, signed.message)


@router.delete(
    "/v1/workers/{worker_id}", responses=signed_refusals(ErrorReason.NOT_OPERATOR, ErrorReason.NOT_FOUND)
)
def delete_worker(
    service: Service, worker_id: WorkerPath, signed: Annotated[VerifiedRequest, Depends(signed_empty)]
) -> OperatorAnswer:
    """Forget a worker; it may join again as a newcomer."""
    _refuse_non_operator(service, signed.public_key)
    return service.people.remove(worker_id)


# --- blobs -------------------------------------------------------------------------------------------

BLOB_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "the whole object", "content": {"application/octet-stream": {}}},
    206: {"description": "the range asked for", "content": {"application/octet-stream": {}}},
    304: {"description": "the client has it (If-None-Match)"},
    307: {
        "description": "it lies in shared storage: follow the presigned Location, without signature headers"
    },
    **refuses(ErrorReason.NOT_FOUND, ErrorReason.INVALID_MESSAGE, ErrorReason.RANGE_NOT_SATISFIABLE),
}


@router.get("/v1/updates/{payload_hash}", response_class=Response, responses=BLOB_ANSWERS)
def get_update(request: Request, service: Service, payload_hash: HashPath) -> Response:
    """Payload of a merged update."""
    service.reports.find_merged_payload(payload_hash)
    return blob_response(request, service, payload_key(payload_hash), payload_hash)


@router.get("/v1/snapshots/{snapshot_hash}", response_class=Response, responses=BLOB_ANSWERS)
def get_snapshot(request: Request, service: Service, snapshot_hash: HashPath) -> Response:
    """A snapshot as safetensors."""
    service.reports.find_snapshot(snapshot_hash)
    return blob_response(request, service, snapshot_key(snapshot_hash), snapshot_hash)


def blob_response(request: Request, service: Coordinator, key: str, digest: str) -> Response:
    blobs = service.context.blobs
    if blobs.shared:
        return RedirectResponse(blobs.presigned_get(key), status_code=307)
    headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes", "Cache-Control": "public, immutable"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    size = blobs.size(key)
    if size is None:
        raise Refusal(ErrorReason.NOT_FOUND, f"{key} is no longer in the blob store", "ask for a newer one")
    wanted = _range_header(request, headers["ETag"])
    start, end = byte_range(wanted, size)
    headers["Content-Length"] = str(end - start)
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return StreamingResponse(
        blobs.stream(key, start, end),
        status_code=206 if wanted else 200,
        headers=headers,
        media_type="application/octet-stream",
    )


def _range_header(request: Request, etag: str) -> str:
    """Empty where the client wants the range only of an object it no longer has right."""
    condition = request.headers.get("if-range", etag)
    return request.headers.get("range", "") if condition == etag else ""


def byte_range(header: str, size: int) -> tuple[int, int]:
    """First byte and end of `bytes=a-b`, `bytes=a-` or `bytes=-n`; the whole for an empty header."""
    if not header:
        return 0, size
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header)
    if match is None or not (match[1] or match[2]):
        raise _bad_range(size)
    if not match[1]:
        start, end = max(0, size - int(match[2])), size
    else:
        start, end = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
    if start >= end:
        raise _bad_range(size)
    return start, end


def _bad_range(size: int) -> Refusal:
    return Refusal(
        ErrorReason.RANGE_NOT_SATISFIABLE, f"expected one range within {size} bytes, as bytes=0-99"
    )


# --- what anybody may read ---------------------------------------------------------------------------


@router.get("/v1/blocks/{block}", responses=refuses(ErrorReason.NOT_FOUND, ErrorReason.INVALID_MESSAGE))
def get_block(service: Service, block: BlockPath) -> BlockAnswer:
    """Head and open round of a block."""
    return service.reports.block(block)


@router.get(
    "/v1/blocks/{block}/merges", responses=refuses(ErrorReason.NOT_FOUND, ErrorReason.INVALID_MESSAGE)
)
def get_merges(service: Service, block: BlockPath, since: Since = 0) -> MergesAnswer:
    """How the versions after `since` came about: enough to rebuild them from payloads."""
    return service.reports.merges(block, since)


@router.get("/v1/workers", responses=refuses())
def get_workers(service: Service) -> WorkersAnswer:
    """Standing and contribution of every worker, the most useful first."""
    return service.people.workers()


@router.get("/v1/workers/{worker_id}", responses=refuses(ErrorReason.NOT_FOUND, ErrorReason.INVALID_MESSAGE))
def get_worker(service: Service, worker_id: WorkerPath) -> WorkerAnswer:
    """One worker's standing and its latest verdicts, each with its reason."""
    return service.people.worker(worker_id)


@router.get("/v1/verdicts", responses=refuses())
def get_verdicts(service: Service) -> VerdictsAnswer:
    """The latest verdicts on anybody's updates, each with its reason."""
    return service.people.verdicts()


@router.get("/v1/contributions", responses=refuses())
def get_contributions(service: Service) -> ContributionsAnswer:
    """Who trained what of the current snapshots, signed by the coordinator."""
    return service.people.contributions()


@router.get("/v1/ledger", responses=refuses(ErrorReason.INVALID_MESSAGE))
def get_ledger(service: Service, since: Since = 0) -> LedgerAnswer:
    """Ledger entries from number `since` on, a page at a time."""
    return service.reports.ledger(since)


@router.get("/v1/status", responses=refuses())
def get_status(service: Service) -> StatusAnswer:
    """The state of the whole swarm."""
    return service.status()


@router.get("/healthz", responses=refuses())
def get_health(service: Service) -> HealthAnswer:
    """Whether the coordinator and its database answer."""
    service.reports.ledger_length()
    return HealthAnswer(status="draining" if service.draining else "ok")


@router.get("/metrics", response_class=PlainTextResponse, responses=refuses())
def get_metrics(service: Service) -> PlainTextResponse:
    """Prometheus metrics."""
    return PlainTextResponse(
        service.metrics.text(service.status(), service.judging.cost.share),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@router.get(
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
    streams: asyncio.Semaphore = request.app.state.event_streams
    if streams.locked():
        raise Refusal(
            ErrorReason.UNAVAILABLE, f"{MAX_EVENT_STREAMS} event streams are open", "try again later"
        )
    start = since if since is not None else _after_last_event(request)
    if start is None:
        start = await run_in_threadpool(service.reports.ledger_length)
    return StreamingResponse(
        _events(service, streams, start), headers=UNBUFFERED, media_type="text/event-stream"
    )


def _after_last_event(request: Request) -> int | None:
    text = request.headers.get("last-event-id", "")
    return int(text) + 1 if re.fullmatch(r"[0-9]{1,15}", text) else None


async def _events(service: Coordinator, streams: asyncio.Semaphore, since: int) -> AsyncIterator[str]:
    async with streams:
        quiet = 0.0
        while not service.draining:
            page = await run_in_threadpool(service.reports.ledger, since)
            for entry in page.entries:
                yield f"id: {entry.sequence}\nevent: {entry.kind}\ndata: {entry.model_dump_json()}\n\n"
                since = entry.sequence + 1
            if not page.entries:
                await asyncio.sleep(EVENT_POLL_SECONDS)
                quiet += EVENT_POLL_SECONDS
            if page.entries or quiet >= KEEP_ALIVE_SECONDS:
                quiet = 0.0
                yield ": still here\n\n"


# --- the application ---------------------------------------------------------------------------------


def create_app(coordinator: Coordinator) -> FastAPI:
    app = FastAPI(
        title="BlockTrain coordinator", version="1", docs_url=None, redoc_url=None, lifespan=_lifespan
    )
    app.state.coordinator = coordinator
    app.include_router(router)
    app.include_router(pages)
    app.add_middleware(CountTraffic, metrics=coordinator.metrics)
    app.add_middleware(NoSniffing)
    app.add_exception_handler(Refusal, _answer_refusal)
    app.add_exception_handler(StorageError, _answer_storage)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_bug)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.event_streams = asyncio.Semaphore(MAX_EVENT_STREAMS)
    app.state.decoding = CapacityLimiter(DECODING_THREADS)
    yield


def _json(refusal: Refusal, headers: Mapping[str, str] | None = None) -> JSONResponse:
    answer = ErrorAnswer(error=refusal.body)
    return JSONResponse(answer.model_dump(mode="json", exclude_none=True), refusal.status, headers)


def _answer_refusal(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return _json(error)


def _answer_storage(_request: Request, error: Exception) -> JSONResponse:
    log.error("storage does not answer: %s", error)
    return _json(
        Refusal(ErrorReason.UNAVAILABLE, "the coordinator's storage does not answer", "try again"),
        {"Retry-After": "5"},
    )


def _answer_invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _json(invalid_message(list(error.errors())))


def _answer_http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        refusal = Refusal(ErrorReason.METHOD_NOT_ALLOWED, "this route has other methods", "see /openapi.json")
        return _json(refusal, error.headers)
    return _json(Refusal(ErrorReason.NOT_FOUND, "no such route", "see /openapi.json"), error.headers)


def _answer_bug(request: Request, error: Exception) -> JSONResponse:
    log.exception("failed on %s", request.url.path, exc_info=error)
    body = {"error": {"reason": "internal", "message": "the coordinator has a fault; see its log"}}
    return JSONResponse(body, 500)
