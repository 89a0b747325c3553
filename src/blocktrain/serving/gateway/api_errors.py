"""Every error the API answers, in OpenAI's one shape, and the one place where others become it.

Messages never repeat the client's input, which may be huge or not even text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from blocktrain.serving.engine.requests import (
    DeadlineError,
    RequestError,
    ServingError,
    StagesUnavailableError,
)
from blocktrain.serving.gateway.limits import TooManyRequestsError
from blocktrain.serving.gateway.openai_messages import ApiErrorAnswer, ApiErrorBody

INVALID = "invalid_request_error"
SERVICE = "server_error"
RATE = "rate_limit_error"

HTTP_WORDS: dict[int, tuple[str | None, str]] = {
    400: ("the body could not be read as JSON in UTF-8", "invalid_json"),
    404: ("no such route; the routes are listed at /openapi.json", "unknown_url"),
    405: ("this route does not take that method", "method_not_allowed"),
    408: (None, "request_timeout"),
    413: (None, "request_too_large"),
}
FIELD_WORDS = {
    "prompt": "expected a string, a list of strings, a list of token ids or a list of both; not empty",
    "input": "expected a string, or a list of messages with a role and a text; not empty",
    "stop": "expected a string or a list of up to 16 strings, each of 1 to 200 characters",
    "content": 'expected a text, or a list of parts {"type": "text", "text": …}',
}
"""Fields of several types: pydantic reports a problem for each type, and none of them helps."""
RULE_WORDS = {
    "logit_bias": "expected token ids, each with a number from -100 to 100",
    "tools": "expected none: this model calls no tools",
    "tool_calls": "expected none: this model calls no tools",
    "annotations": "expected none",
}
"""Fields whose rule pydantic would show as a pattern or a length."""
OUR_WORDS = {
    "Input should be a valid dictionary or object to extract fields from": "expected a JSON object",
    "Input should be a valid dictionary": "expected a JSON object",
    "Input should be a valid integer": "expected a whole number",
    "Input should be a valid ": "expected a ",
    "Input should be ": "must be ",
    "String should ": "must ",
    "List should ": "must ",
    "Value error, ": "",
    ", unable to parse raw data as a unicode string": " of Unicode",
    " after validation, not ": ", found ",
}
"""Pydantic's words and ours. Clients need not know with what their requests are checked."""
CONSTRAINTS = {
    "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema",
    "response_format", "structured_outputs",
}  # fmt: skip
"""Fields by which other servers are told to constrain the text."""


class ApiError(Exception):
    """An answer other than the one asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = ApiErrorBody(message=message, type=kind, param=param, code=code)

    def json(self) -> str:
        return ApiErrorAnswer(error=self.body).model_dump_json()

    def response(self) -> Response:
        return Response(self.json(), self.status, self.headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """The answer to any exception that reaches the edge."""
    # A task group wraps what went wrong; the first cause is the one that ended the others.
    if isinstance(error, BaseExceptionGroup):
        return as_api_error(error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TooManyRequestsError):
        seconds = error.retry_after_seconds
        message, headers = f"{error.reason}; try again in {seconds} s", {"retry-after": str(seconds)}
        return ApiError(429, message, kind=RATE, code=error.code, headers=headers)
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), error.body)
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, HTTPException):
        words, code = HTTP_WORDS.get(error.status_code, (None, None))
        return ApiError(error.status_code, words or str(error.detail), code=code, headers=error.headers)
    if isinstance(error, StagesUnavailableError):
        headers = {"retry-after": "2"}
        return ApiError(503, str(error), kind=SERVICE, code="stages_unavailable", headers=headers)
    # 504 and not 503: trying the same again would take as long.
    if isinstance(error, DeadlineError | TimeoutError):
        message = str(error) or "the request's deadline passed before its text was complete"
        return ApiError(504, message, kind=SERVICE, code="deadline_exceeded")
    if isinstance(error, ServingError):
        return ApiError(503, str(error), kind=SERVICE, code="service_unavailable")
    # The cause is for our log, not for strangers.
    return ApiError(500, "something broke here; it was logged", kind=SERVICE, code="internal_error")


def _invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """The first problem, named by its field. Unions report one problem per arm; the field is the same."""
    first = errors[0]
    kind = first["type"]
    if kind == "json_invalid":
        return as_api_error(HTTPException(400))
    # A place is told by what the client sent: between the names of fields pydantic puts those of its own
    # types, such as `function-after[_unicode(), str]`.
    place: list[str] = []
    found = body
    for part in first["loc"][1:]:
        if isinstance(found, dict) and part in found or isinstance(found, list) and isinstance(part, int):
            place.append(printable(str(part)))
            found = found[part]
    if kind == "missing":
        place += [str(part) for part in first["loc"][-1:] if part != "body"]
    field = place[0] if place else None
    # A misspelt option that is ignored would look like a model that does not listen.
    if kind == "extra_forbidden":
        name = printable(str(first["loc"][-1]))
        message = f"unrecognized request argument: {name}"
        if name in CONSTRAINTS:
            message = f"{name} is not offered: no decoding here is constrained by a grammar or a schema"
        return ApiError(400, message, param=name, code="unknown_parameter")
    if kind == "missing":
        message = f"you must provide {'.'.join(place) or 'a JSON object as the body'}"
        return ApiError(400, message, param=field, code="missing_required_parameter")
    message = str(first["msg"])
    for theirs, ours in OUR_WORDS.items():
        message = message.replace(theirs, ours)
    # Of a rule about several fields, which names the one to change.
    param = first.get("ctx", {}).get("param")
    if param is not None or field is None:
        return ApiError(400, message, param=param, code="invalid_value")
    if kind != "value_error":  # which is a sentence of ours, about the value
        words = {**RULE_WORDS, **(FIELD_WORDS if len(errors) > 1 else {})}
        message = next((words[name] for name in reversed(place) if name in words), message)
    message = f"{'.'.join(place)}: {message}"
    return ApiError(400, message, param=field, code="invalid_value")


def printable(text: str, limit: int = 64) -> str:
    """Text of a client's that can go into a header, a log line or JSON: short, no control characters and
    nothing UTF-8 cannot hold."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:limit].encode("utf-8", "replace").decode())
    return clean if len(text) <= limit else clean + "…"
