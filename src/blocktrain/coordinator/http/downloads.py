"""Snapshots, merged payloads and the run's text: whole, one range, "you have it", or a redirect to shared
storage."""

from __future__ import annotations

import re

from anyio import to_thread
from fastapi import Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from blocktrain.coordinator.http.message_routes import message_router
from blocktrain.coordinator.http.openapi import Answers, HashPath, refuses
from blocktrain.coordinator.http.signed_requests import Service
from blocktrain.coordinator.model_archive import newest_model
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.service import Coordinator
from blocktrain.coordinator.storage.blobs import CHUNK_BYTES, Blobs, payload_key, snapshot_key, text_key
from blocktrain.wire.messages import ErrorReason

downloads = message_router()

BLOB_ANSWERS: Answers = {
    200: {"description": "the whole object", "content": {"application/octet-stream": {}}},
    206: {"description": "the range asked for", "content": {"application/octet-stream": {}}},
    304: {"description": "the client has it (If-None-Match)"},
    307: {
        "description": "it lies in shared storage: follow the presigned Location, without signature headers"
    },
    **refuses(ErrorReason.NOT_FOUND, ErrorReason.INVALID_MESSAGE, ErrorReason.RANGE_NOT_SATISFIABLE),
}

TEXT_ANSWERS: Answers = BLOB_ANSWERS | refuses(
    ErrorReason.NOT_FOUND,
    ErrorReason.INVALID_MESSAGE,
    ErrorReason.RANGE_NOT_SATISFIABLE,
    ErrorReason.NOT_JUDGE,
)
PUBLIC = "public, immutable"


@downloads.get("/v1/updates/{payload_hash}", response_class=Response, responses=BLOB_ANSWERS)
def get_update(request: Request, service: Service, payload_hash: HashPath) -> Response:
    """Payload of a merged update."""
    service.reports.find_merged_payload(payload_hash)
    return blob_response(request, service.resources.blobs, payload_key(payload_hash), payload_hash)


@downloads.get("/v1/snapshots/{snapshot_hash}", response_class=Response, responses=BLOB_ANSWERS)
def get_snapshot(request: Request, service: Service, snapshot_hash: HashPath) -> Response:
    """A snapshot as safetensors."""
    service.reports.find_snapshot(snapshot_hash)
    return blob_response(request, service.resources.blobs, snapshot_key(snapshot_hash), snapshot_hash)


@downloads.get(
    "/v1/checkpoint",
    response_class=Response,
    responses={
        200: {"description": "a tar file", "content": {"application/x-tar": {}}},
        **refuses(ErrorReason.NOT_FOUND),
    },
)
async def get_checkpoint(request: Request, service: Service) -> Response:
    """The newest snapshots as a checkpoint folder in a tar file."""
    archive = await to_thread.run_sync(newest_model, service.resources, limiter=request.app.state.archives)
    headers = {
        "Content-Length": str(archive.num_bytes),
        "Content-Disposition": f'attachment; filename="{archive.name}"',
        "Cache-Control": "no-store",
    }
    return StreamingResponse(archive.stream(), headers=headers, media_type="application/x-tar")


@downloads.get("/v1/data/{sha256}", response_class=Response, responses=TEXT_ANSWERS)
def get_data(request: Request, service: Service, sha256: HashPath) -> Response:
    """A file of the run's text: the manifest, the tokenizer or a training shard, by its SHA-256."""
    return text_response(request, service, sha256, judge=False)


def text_response(request: Request, service: Coordinator, sha256: str, *, judge: bool) -> Response:
    text = service.resources.text
    if text is None:
        raise Refusal(ErrorReason.NOT_FOUND, "this run's text is not served", "get it from the operator")
    name = text.name(sha256, judge=judge)
    if text.shared is not None and not judge:
        return blob_response(request, text.shared, text_key(sha256), sha256)
    return blob_response(request, text.files, name, sha256, "private, no-store" if judge else PUBLIC)


def blob_response(request: Request, blobs: Blobs, key: str, digest: str, caching: str = PUBLIC) -> Response:
    # From shared storage workers fetch by themselves: the coordinator's line carries no weights then.
    if blobs.shared:
        return RedirectResponse(blobs.presigned_get(key), status_code=307)
    # The name is the hash of the content, so it can never be out of date.
    etag = f'"{digest}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": caching}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    size = blobs.size(key)
    if size is None:
        raise Refusal(ErrorReason.NOT_FOUND, f"{key} is no longer in the blob store", "ask for a newer one")
    # If-Range with another tag: the client has begun another object, so it gets this one whole.
    wanted = request.headers.get("range", "") if request.headers.get("if-range", etag) == etag else ""
    start, end = byte_range(wanted, size)
    headers["Content-Length"] = str(end - start)
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status, kind = 206 if wanted else 200, "application/octet-stream"
    # A stream costs two tasks and a watch on the connection: not for what fits into one piece of it.
    if end - start <= CHUNK_BYTES:
        return Response(blobs.get_range(key, start, end), status, headers, kind)
    return StreamingResponse(blobs.stream(key, start, end), status, headers, kind)


def byte_range(header: str, size: int) -> tuple[int, int]:
    """First byte and end of `bytes=a-b`, `bytes=a-` or `bytes=-n`; the whole for an empty header."""
    if not header:
        return 0, size
    # One range only; more would be answered in a multipart body, which no client here asks for.
    start = end = 0
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", header)
    if match is not None and match[1]:
        start, end = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
    elif match is not None and match[2]:
        start, end = max(0, size - int(match[2])), size
    if start >= end:
        raise Refusal(
            ErrorReason.RANGE_NOT_SATISFIABLE, f"expected one range within {size} bytes, as bytes=0-99"
        )
    return start, end
