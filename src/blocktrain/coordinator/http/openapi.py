"""What /openapi.json says beyond what FastAPI finds out by itself: refusals, signed bodies, path values.

tests/coordinator/test_openapi.py sends documented requests and broken ones, and holds the answers to it.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel

from blocktrain.coordinator.refusals import STATUS
from blocktrain.wire.messages import MAX_BLOCKS, MAX_COUNT, ErrorAnswer, ErrorReason
from blocktrain.wire.signing import Reason

Answers = dict[int | str, dict[str, Any]]

BlockPath = Annotated[int, Path(ge=0, lt=MAX_BLOCKS)]
HashPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
IdPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
"""The id of an assignment or a worker."""
PATH_PATTERNS = ((BlockPath, "[0-9]{1,3}"), (HashPath, "[0-9a-f]{64}"), (IdPath, "[0-9a-f]{32}"))
"""What such values look like; each that looks so is one."""
Since = Annotated[int, Query(ge=0, le=MAX_COUNT)]

SIGNED_REASONS = (
    *Reason,
    ErrorReason.LENGTH_REQUIRED,
    ErrorReason.TOO_LARGE,
    ErrorReason.TOO_SLOW,
    ErrorReason.WRONG_LENGTH,
    ErrorReason.INVALID_MESSAGE,
    ErrorReason.NOT_JOINED,
    ErrorReason.BANNED,
)
"""Any signed route may answer these."""
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def refuses(*reasons: str) -> Answers:
    """The documented error answers of a route: each status with the reasons that lead to it."""
    grouped: dict[int | str, list[str]] = {}
    for reason in dict.fromkeys((*reasons, ErrorReason.UNAVAILABLE)):
        grouped.setdefault(STATUS[reason], []).append(str(reason))
    return {
        status: {"model": ErrorAnswer, "description": ", ".join(names)} for status, names in grouped.items()
    }


def signed_refusals(*reasons: str) -> Answers:
    return refuses(*SIGNED_REASONS, *reasons)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON body of a route. `SignedBody` reads it, after the signature, so FastAPI must be told of it."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        # A route's extra schema has no place for definitions, so each is put where it is referred to.
        if isinstance(part, list):
            return [inlined(one) for one in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).rpartition("/")[2]
        whole = definitions.get(name, {}) | part
        return {key: inlined(value) for key, value in whole.items() if key != "$ref"}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}
