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
from blocktrain.serving.gateway.limits import Refusal
from blocktrain.serving.gateway.openai_messages import ErrorAnswer, ErrorBody

INVALID = "invalid_request_error"
SERVICE = "server_error"
RATE = "rate_limit_error"


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
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)

    def json(self) -> str:
        return ErrorAnswer(error=self.body).model_dump_json()

    def response(self) -> Response:
        return Response(self.json(), self.status, self.headers, media_type="application/json")


def as_api_error(error: BaseException) -> ApiError:
    """The answer to any exception that reaches the edge."""
    if isinstance(error, BaseExceptionGroup):
        return as_api_error(error.exceptions[0])
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refusal):
        return _too_many(error)
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors())
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, HTTPException):
        return _http(error)
    return _service(error)


def _too_many(refusal: Refusal) -> ApiError:
    seconds = refusal.retry_after_seconds
    return ApiError(
        429,
        f"{refusal.reason}; try again in {seconds} s",
        kind=RATE,
        code="rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
    )


def _service(error: BaseException) -> ApiError:
    if isinstance(error, StagesUnavailableError):
        headers = {"retry-after": "2"}
        return ApiError(503, str(error), kind=SERVICE, code="stages_unavailable", headers=headers)
    if isinstance(error, DeadlineError | TimeoutError):
        message = str(error) or "the request's deadline passed before its text was complete"
        return ApiError(504, message, kind=SERVICE, code="deadline_exceeded")
    if isinstance(error, ServingError):
        return ApiError(503, str(error), kind=SERVICE, code="service_unavailable")
    return ApiError(500, "something broke here; it was logged", kind=SERVICE, code="internal_error")


HTTP_WORDS: dict[int, tuple[str | None, str]] = {
    400: ("the body could not be read as JSON in UTF-8", "invalid_json"),
    404: ("no such route; the routes are listed at /openapi.json", "unknown_url"),
    405: ("this route does not take that method", "method_not_allowed"),
    413: (None, "request_too_large"),
}


def _http(error: HTTPException) -> ApiError:
    message, code = HTTP_WORDS.get(error.status_code, (None, None))
    return ApiError(error.status_code, message or str(error.detail), code=code, headers=error.headers)


def _invalid(errors: Sequence[Any]) -> ApiError:
    """The first problem, named by its field. Unions report one problem per arm; the field is the same."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return _http(HTTPException(400))
    where = [str(part) for part in first["loc"] if part not in ("body", "path", "query", "header")]
    field = where[0] if where else None
    if first["type"] == "extra_forbidden":
        name = where[-1]
        message = f"unrecognized request argument: {printable(name)}"
        return ApiError(400, message, param=printable(name), code="unknown_parameter")
    if first["type"] == "missing":
        message = f"you must provide {'.'.join(where) or 'a JSON object as the body'}"
        return ApiError(400, message, param=field, code="missing_required_parameter")
    param = field or first.get("ctx", {}).get("param")
    return ApiError(400, _problem(field, errors), param=param, code="invalid_value")


FIELD_WORDS = {
    "prompt": "expected a string, a list of strings, a list of token ids or a list of such lists; not empty",
    "stop": "expected a string or a list of up to 16 strings, each of 1 to 200 characters",
}


def _problem(field: str | None, errors: Sequence[Any]) -> str:
    message = str(errors[0]["msg"])
    if field is None:
        return message
    if field in FIELD_WORDS and len(errors) > 1:
        return f"{field}: {FIELD_WORDS[field]}"
    where = ".".join(str(part) for part in errors[0]["loc"][1:])
    return f"{where}: {message}"


def printable(text: str, limit: int = 64) -> str:
    """Text of a client's that can go into a header, a log line or JSON: short, no control characters and
    nothing UTF-8 cannot hold."""
    clean = "".join(c if c.isprintable() else "?" for c in text[:limit].encode("utf-8", "replace").decode())
    return clean if len(text) <= limit else clean + "…"
