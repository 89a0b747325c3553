"""Routes that answer with a message of ours: it was checked when it was made, and becomes JSON in the thread
that made it.

FastAPI would check it once more, in another thread, and write it in a third: with that a request of nothing
took 0.87 ms of processor time, without it 0.37.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel


class MessageRoute(APIRoute):
    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, _answering(endpoint), **settings)


def message_router() -> APIRouter:
    return APIRouter(route_class=MessageRoute)


def _answering(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The endpoint with its signature, which FastAPI reads, and a whole response as its answer."""

    @wraps(endpoint)
    async def answer_later(**arguments: Any) -> Response:
        return _response(await endpoint(**arguments))

    @wraps(endpoint)
    def answer(**arguments: Any) -> Response:
        return _response(endpoint(**arguments))

    return answer_later if iscoroutinefunction(endpoint) else answer


def _response(answer: BaseModel | Response) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(answer.model_dump_json(), media_type="application/json")
