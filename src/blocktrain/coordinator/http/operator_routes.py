"""Routes for the operator, who signs with coordinator.key, and for the judges it has listed."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response

from blocktrain.coordinator.http.downloads import text_response
from blocktrain.coordinator.http.message_routes import message_router
from blocktrain.coordinator.http.openapi import HashPath, IdPath, signed_refusals, takes
from blocktrain.coordinator.http.signed_requests import Service, Signed, SignedBody, SignedEmpty
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.coordinator.storage.blobs import payload_key
from blocktrain.wire import messages
from blocktrain.wire.messages import ErrorReason

operator_routes = message_router()

LENT_TASK = (ErrorReason.NOT_JUDGE, ErrorReason.NOT_FOUND, ErrorReason.LEASE_LOST)


def require_judge(service: Coordinator, worker_id: str, public_key: bytes) -> None:
    if public_key.hex() != service.resources.run.coordinator_key and not service.admission.is_judge(
        worker_id
    ):
        raise Refusal(
            ErrorReason.NOT_JUDGE,
            f"key {worker_id} may not judge this run",
            "ask the operator to add the id to judges.txt in the coordinator's data folder",
        )


def require_operator(service: Coordinator, public_key: bytes) -> None:
    if public_key.hex() != service.resources.run.coordinator_key:
        raise Refusal(
            ErrorReason.NOT_OPERATOR,
            "this is for the run's operator",
            "sign with coordinator.key of the coordinator's data folder",
        )


# --- judges ------------------------------------------------------------------------------------------


@operator_routes.post("/v1/judge/lease", responses=signed_refusals(ErrorReason.NOT_JUDGE))
def post_judge_lease(service: Service, signed: SignedEmpty) -> messages.JudgeTask | messages.JudgeWait:
    """The update that has waited longest for a verdict."""
    require_judge(service, signed.worker_id, signed.public_key)
    return service.judging.lease(signed.worker_id)


@operator_routes.get(
    "/v1/judge/tasks/{update_id}/payload",
    response_class=Response,
    responses={
        200: {"description": "the payload", "content": {"application/octet-stream": {}}},
        **signed_refusals(*LENT_TASK),
    },
)
def get_judge_payload(service: Service, update_id: HashPath, signed: SignedEmpty) -> Response:
    """The payload of an update lent to this judge; nobody else sees it before it is merged."""
    require_judge(service, signed.worker_id, signed.public_key)
    key = payload_key(service.judging.lent_payload(signed.worker_id, update_id))
    return Response(service.resources.blobs.get(key), media_type="application/octet-stream")


@operator_routes.get(
    "/v1/judge/data/{sha256}",
    response_class=Response,
    responses={
        200: {"description": "the whole file", "content": {"application/octet-stream": {}}},
        206: {"description": "the range asked for", "content": {"application/octet-stream": {}}},
        304: {"description": "the judge has it (If-None-Match)"},
        **signed_refusals(ErrorReason.NOT_JUDGE, ErrorReason.NOT_FOUND, ErrorReason.RANGE_NOT_SATISFIABLE),
    },
)
def get_judge_data(request: Request, service: Service, sha256: HashPath, signed: SignedEmpty) -> Response:
    """A file of the run's text, held-out and pooling shards too."""
    require_judge(service, signed.worker_id, signed.public_key)
    return text_response(request, service, sha256, judge=True)


@operator_routes.post(
    "/v1/judge/tasks/{update_id}",
    responses=signed_refusals(*LENT_TASK),
    openapi_extra=takes(messages.EvidenceReport),
)
def post_judge_report(
    service: Service,
    update_id: HashPath,
    signed: Annotated[Signed[messages.EvidenceReport], Depends(SignedBody(messages.EvidenceReport))],
) -> messages.OperatorAnswer:
    """What this judge found; the verdict follows from it."""
    require_judge(service, signed.worker_id, signed.public_key)
    return service.judging.report(signed.worker_id, update_id, signed.message)


# --- the run -----------------------------------------------------------------------------------------


@operator_routes.post(
    "/v1/finish", responses=signed_refusals(ErrorReason.NOT_OPERATOR, ErrorReason.ROUND_NOT_OPEN)
)
def post_finish(service: Service, signed: SignedEmpty) -> messages.OperatorAnswer:
    """End the run here; workers are told that it is finished."""
    require_operator(service, signed.public_key)
    return service.finish()


# --- workers -----------------------------------------------------------------------------------------


@operator_routes.post(
    "/v1/workers/{worker_id}/ban",
    responses=signed_refusals(ErrorReason.NOT_OPERATOR),
    openapi_extra=takes(messages.BanRequest),
)
def post_ban(
    service: Service,
    worker_id: IdPath,
    signed: Annotated[Signed[messages.BanRequest], Depends(SignedBody(messages.BanRequest))],
) -> messages.OperatorAnswer:
    """Ban a worker for some time; 0 seconds lift a ban."""
    require_operator(service, signed.public_key)
    return service.workers.ban(worker_id, signed.message)


@operator_routes.delete(
    "/v1/workers/{worker_id}", responses=signed_refusals(ErrorReason.NOT_OPERATOR, ErrorReason.NOT_FOUND)
)
def delete_worker(service: Service, worker_id: IdPath, signed: SignedEmpty) -> messages.OperatorAnswer:
    """Forget a worker; it may join again as a newcomer."""
    require_operator(service, signed.public_key)
    return service.workers.remove(worker_id)
