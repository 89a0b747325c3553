"""Routes that answer with a message of ours, and the short way to them.

A message was checked when it was made, and becomes JSON in the thread that made it. FastAPI would check it
once more in another thread and write it in a third. It also finds a route by trying all of them and puts
the endpoint's arguments together from a description, at every request: with 450 workers half of the time in
which the interpreter was at work went there. So `ShortWay` carries out a request that is exactly what a route
expects. FastAPI describes the routes (/openapi.json), and answers those that take a query and other paths.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from fastapi import APIRouter, Request, Response
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from blocktrain.coordinator.http.openapi import PATH_PATTERNS
from blocktrain.coordinator.refusals import Refusal
from blocktrain.errors import StorageError

AnswerError = Callable[[Request, Exception], Response]


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


@dataclass(frozen=True)
class _Target:
    """A route, and where each argument of its endpoint comes from."""

    route: APIRoute
    path: re.Pattern[str]
    kinds: dict[str, type]
    """Arguments that stand in the path."""
    dependencies: dict[str, Callable[[Request], Awaitable[Any]]]
    request_names: tuple[str, ...]
    is_async: bool
    threads: str
    """Which of the application's carry it out, where it is not async."""


class ShortWay:
    """Middleware: straight to the endpoint where the path is wholly of a route's form."""

    def __init__(self, app: ASGIApp, routers: Iterable[APIRouter], answer_error: AnswerError) -> None:
        self._app, self._answer_error = app, answer_error
        self._targets: dict[str, list[_Target]] = defaultdict(list)
        for router in routers:
            for route in router.routes:
                assert isinstance(route, APIRoute)
                if (target := _target(route)) is not None:
                    for method in route.methods or ():
                        self._targets[method].append(target)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["query_string"]:
            path = scope["path"]
            for target in self._targets.get(scope["method"], ()):
                if (found := target.path.fullmatch(path)) is not None:
                    scope["route"] = target.route
                    request = Request(scope, receive)
                    response = await self._answer(target, request, found.groupdict())
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _answer(self, target: _Target, request: Request, in_path: dict[str, str]) -> Response:
        try:
            arguments: dict[str, Any] = {name: kind(in_path[name]) for name, kind in target.kinds.items()}
            for name, dependency in target.dependencies.items():
                arguments[name] = await dependency(request)
            for name in target.request_names:
                arguments[name] = request
            if target.is_async:
                return await target.route.endpoint(**arguments)  # type: ignore[no-any-return]
            threads: Executor = getattr(request.app.state, target.threads)
            work = partial(target.route.endpoint, **arguments)
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except (Refusal, StorageError) as error:
            return self._answer_error(request, error)


def _target(route: APIRoute) -> _Target | None:
    """None for an endpoint that needs more than path, request and dependencies on the request."""
    kinds: dict[str, type] = {}
    dependencies: dict[str, Callable[[Request], Awaitable[Any]]] = {}
    request_names, path = [], re.escape(route.path).replace(r"\{", "{").replace(r"\}", "}")
    hints = get_type_hints(route.endpoint, include_extras=True)
    hints.pop("return", None)
    for name, hint in hints.items():
        arguments = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
        depends = arguments[1].dependency if isinstance(arguments[1], Depends) else None
        pattern = next((pattern for form, pattern in PATH_PATTERNS if form == hint), None)
        if hint is Request:
            request_names.append(name)
        elif depends is not None:
            dependencies[name] = depends
        elif pattern is not None:
            kinds[name], path = arguments[0], path.replace(f"{{{name}}}", f"(?P<{name}>{pattern})")
        else:
            return None
    threads = "reading_threads" if route.methods == {"GET"} else "writing_threads"
    if route.response_class is Response:  # bytes, from the store of blobs
        threads = "store_threads"
    is_async = iscoroutinefunction(route.endpoint)
    return _Target(route, re.compile(path), kinds, dependencies, tuple(request_names), is_async, threads)
