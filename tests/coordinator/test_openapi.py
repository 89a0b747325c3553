"""The OpenAPI document against the running coordinator: no 500, no undocumented answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from blocktrain.coordinator.http.app import API
from blocktrain.wire.signing import body_digest, fresh_nonce, sign_request
from tests.coordinator.conftest import Running, served, tiny_recipe
from tests.coordinator.peer import Peer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data_dir: Path = tmp_path_factory.mktemp("openapi")
    with served(data_dir, tiny_recipe()) as running:
        running.peer()
        yield running


@pytest.fixture(scope="module")
def api(target: Running) -> Any:
    import schemathesis  # 1.6 s of processor time, in the one process that needs it

    return schemathesis.openapi.from_url(f"{target.url}/openapi.json")


def sign(case: Any, peer: Peer) -> dict[str, str]:
    """Signature headers for the request as schemathesis will send it."""
    arguments = case.as_transport_kwargs(base_url=peer.url)
    wanted = ("method", "url", "params", "data", "json", "headers", "cookies", "files")
    request = requests.Request(**{key: arguments[key] for key in wanted if key in arguments}).prepare()
    body = request.body or b""
    assert isinstance(body, str | bytes)
    raw = body.encode() if isinstance(body, str) else body
    return sign_request(
        peer.identity,
        request.method or "",
        request.path_url,
        now=peer.clock(),
        nonce=fresh_nonce(),
        content_digest=body_digest(raw),
        content_length=len(raw),
        audience=peer.run.run_id,
    )


def routes() -> list[tuple[str, str]]:
    found = [
        (method, route.path)
        for router in API
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in sorted(route.methods or ())
    ]
    found.remove(("GET", "/v1/events"))  # never ends; test_reading.py reads it
    return found


every_route = pytest.mark.parametrize(("method", "path"), routes())
every_mode = pytest.mark.parametrize("mode", ["positive", "negative"])


@every_mode
@every_route
def test_every_answer_is_documented(api: Any, target: Running, method: str, path: str, mode: str) -> None:
    check_answers(api, target, method, path, mode, examples=5)


@pytest.mark.slow
@every_mode
@every_route
def test_every_answer_of_many_is_documented(
    api: Any, target: Running, method: str, path: str, mode: str
) -> None:
    check_answers(api, target, method, path, mode, examples=500)


def check_answers(api: Any, target: Running, method: str, path: str, mode: str, examples: int) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    every_check = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    peer = target.peers[0]
    fixed: dict[str, Any] = {}
    if "assignment_id" in path and mode == "positive":
        fixed["path_parameters"] = {"assignment_id": peer.lend().assignment_id}

    @given(case=api[path][method].as_strategy(generation_mode=GenerationMode(mode), **fixed))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(case: Any) -> None:
        if method != "GET":
            case.call_and_validate(checks=every_check)
            case.headers = {**(case.headers or {}), **sign(case, peer)}
        case.call_and_validate(checks=every_check)

    try:
        check()
    except Unsatisfiable:
        pytest.skip("this route has nothing to get wrong")
