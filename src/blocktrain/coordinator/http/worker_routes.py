"""Routes for workers: join, ask, train, promise an update and reveal it. A route checks and translates;
deciding and writing is the service's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from blocktrain.coordinator.http.message_routes import message_router
from blocktrain.coordinator.http.openapi import BINARY, HashPath, IdPath, refuses, signed_refusals, takes
from blocktrain.coordinator.http.signed_requests import (
    Service,
    Signed,
    SignedBody,
    SignedEmpty,
    checked_body,
    declared_length,
    received_body,
    verified,
)
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.coordinator.storage.blobs import part_lengths
from blocktrain.coordinator.updates import Expected
from blocktrain.wire import messages
from blocktrain.wire.identity import WorkerId
from blocktrain.wire.messages import ErrorReason

worker_routes = message_router()

MAX_BODIES_PER_WORKER = 4
"""One for each of two blocks, and one more try of each where a connection was lost."""
SMALL_BLOCK_VALUES = 1 << 21
"""8 MB where it is decoded whole: sixteen at a time need no place among the few for large ones."""
OWN_ASSIGNMENT = (ErrorReason.NOT_FOUND, ErrorReason.NOT_YOURS)


@worker_routes.get("/v1/challenge/{worker_id}", responses=refuses(ErrorReason.INVALID_MESSAGE))
def get_challenge(service: Service, worker_id: IdPath) -> messages.ChallengeAnswer:
    """What this worker must stamp before it joins, and how hard that is."""
    return service.admission.challenge(worker_id, service.resources.clock())


@worker_routes.post(
    "/v1/join",
    responses=signed_refusals(
        ErrorReason.CORPUS_MISMATCH,
        ErrorReason.STAMP_REQUIRED,
        ErrorReason.INVITE_REQUIRED,
        ErrorReason.NOT_LISTED,
        ErrorReason.ADDRESS_FULL,
    ),
    openapi_extra=takes(messages.JoinRequest),
)
def post_join(
    request: Request,
    service: Service,
    signed: Annotated[Signed[messages.JoinRequest], Depends(SignedBody(messages.JoinRequest))],
) -> messages.JoinAnswer:
    """Become a worker of this run; doing it again is safe."""
    address = None if request.client is None else request.client.host
    return service.assignments.join(signed.worker_id, signed.public_key, signed.message, address)


# --- assignments -------------------------------------------------------------------------------------


@worker_routes.post(
    "/v1/assignments",
    responses=signed_refusals(*OWN_ASSIGNMENT),
    openapi_extra=takes(messages.AssignmentRequest),
)
def post_assignments(
    service: Service,
    signed: Annotated[Signed[messages.AssignmentRequest], Depends(SignedBody(messages.AssignmentRequest))],
) -> messages.Assignment | messages.Wait | messages.Finished:
    """What to train next."""
    return service.assignments.ask(signed.worker_id, signed.message)


@worker_routes.post(
    "/v1/assignments/{assignment_id}/heartbeat",
    responses=signed_refusals(*OWN_ASSIGNMENT),
    openapi_extra=takes(messages.HeartbeatRequest),
)
def post_heartbeat(
    service: Service,
    assignment_id: IdPath,
    signed: Annotated[Signed[messages.HeartbeatRequest], Depends(SignedBody(messages.HeartbeatRequest))],
) -> messages.HeartbeatAnswer:
    """Keep the lease; learn of a new head, the deadline, or that the work can no longer count."""
    return service.assignments.heartbeat(signed.worker_id, assignment_id, signed.message)


@worker_routes.delete("/v1/assignments/{assignment_id}", responses=signed_refusals(*OWN_ASSIGNMENT))
def delete_assignment(service: Service, assignment_id: IdPath, signed: SignedEmpty) -> messages.ReturnAnswer:
    """Hand the lease back."""
    return service.assignments.hand_back(signed.worker_id, assignment_id)


# --- updates -----------------------------------------------------------------------------------------


@worker_routes.post(
    "/v1/assignments/{assignment_id}/commit",
    responses=signed_refusals(
        *OWN_ASSIGNMENT,
        ErrorReason.LEASE_RETURNED,
        ErrorReason.ALREADY_COMMITTED,
        ErrorReason.UNKNOWN_BASE,
        ErrorReason.ROUND_NOT_OPEN,
    ),
    openapi_extra=takes(messages.CommitRequest),
)
async def post_commit(
    request: Request,
    service: Service,
    assignment_id: IdPath,
    signed: Annotated[Signed[messages.CommitRequest], Depends(SignedBody(messages.CommitRequest))],
) -> messages.CommitAnswer:
    """Promise a payload by its hash; learn where to put it."""
    work = partial(service.updates.commit, signed.worker_id, assignment_id, signed.message)
    # Of a large payload the store is asked which parts it has.
    in_parts = service.resources.blobs.shared and part_lengths("", signed.message.payload_bytes)
    state = request.app.state
    threads: Executor = state.store_threads if in_parts else state.writing_threads
    return await asyncio.get_running_loop().run_in_executor(threads, work)


@worker_routes.put(
    "/v1/updates/{payload_hash}",
    responses=signed_refusals(ErrorReason.NOT_COMMITTED, ErrorReason.HASH_MISMATCH),
    openapi_extra={"requestBody": {"required": True, "content": BINARY}},
)
async def put_update(request: Request, service: Service, payload_hash: HashPath) -> messages.Verdict:
    """Reveal a committed payload; Content-Length must be exactly the committed one."""
    length = declared_length(request, service.resources.run.max_payload_bytes)
    signature = await verified(request)
    expected = await run_in_threadpool(service.updates.expect, signature.worker_id, payload_hash, length)
    if expected.verdict is not None:
        # A repeated upload: read it to its end, or the client would see a closed connection, not the answer.
        async for _ in checked_body(request, signature):
            pass
        return expected.verdict
    async with _body_place(request, signature.worker_id), received_body(request, signature) as (body, found):
        return await _in_receiving_thread(request, service, expected, service.updates.reveal, body, found)


@asynccontextmanager
async def _body_place(request: Request, worker_id: WorkerId) -> AsyncIterator[None]:
    """Each body on its way is a file of up to a whole payload: one worker has only so many at a time."""
    bodies: Counter[WorkerId] = request.app.state.bodies
    if bodies[worker_id] >= MAX_BODIES_PER_WORKER:
        raise Refusal(
            ErrorReason.UNAVAILABLE,
            f"{MAX_BODIES_PER_WORKER} payloads of this worker are on their way already",
            "let one of them arrive or end, then send it again",
        )
    bodies[worker_id] += 1
    try:
        yield
    finally:
        bodies[worker_id] -= 1
        if not bodies[worker_id]:
            del bodies[worker_id]


@worker_routes.post(
    "/v1/updates/{payload_hash}/uploaded",
    responses=signed_refusals(ErrorReason.NOT_COMMITTED, ErrorReason.NOT_UPLOADED, ErrorReason.HASH_MISMATCH),
)
async def post_uploaded(
    request: Request, service: Service, payload_hash: HashPath, signed: SignedEmpty
) -> messages.Verdict:
    """The payload lies at the presigned upload place: look at it."""
    expected = await run_in_threadpool(service.updates.expect, signed.worker_id, payload_hash, None)
    async with _body_place(request, signed.worker_id):
        return await _in_receiving_thread(request, service, expected, service.updates.uploaded)


async def _in_receiving_thread(
    request: Request,
    service: Coordinator,
    expected: Expected,
    receive: Callable[..., messages.Verdict],
    *arguments: Any,
) -> messages.Verdict:
    """Few at a time where the block is large: each may hold it whole, decoded."""
    if service.resources.run.schemas[expected.block].num_values > SMALL_BLOCK_VALUES:
        limiter: CapacityLimiter = request.app.state.decoding
        return await to_thread.run_sync(receive, expected, *arguments, limiter=limiter)
    # A small one waits for the disk longer than it is decoded. Two at a time, 1,000 workers' updates came
    # faster than they were taken, and one waited for 4 s in the median.
    work, state = partial(receive, expected, *arguments), request.app.state
    threads: Executor = state.store_threads if service.resources.blobs.shared else state.writing_threads
    return await asyncio.get_running_loop().run_in_executor(threads, work)


@worker_routes.get(
    "/v1/updates/{payload_hash}/verdict",
    responses=signed_refusals(ErrorReason.NOT_COMMITTED, ErrorReason.NOT_UPLOADED),
)
def get_verdict(service: Service, payload_hash: HashPath, signed: SignedEmpty) -> messages.Verdict:
    """The verdict on this worker's payload, as far as there is one."""
    return service.updates.verdict(signed.worker_id, payload_hash)
