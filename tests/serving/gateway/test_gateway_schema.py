"""Requests made up from /openapi.json: none may break the server, and every answer is a documented one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.app import GatewayConfig
from blocktrain.serving.gateway.limits import GatewayLimits

from .conftest import serve_engine


@pytest.fixture(scope="session")
def api(checkpoint: Path) -> Iterator[Any]:
    import schemathesis  # 1.6 s of processor time, in the one process that needs it

    limits = GatewayLimits(max_tokens=32, max_choices=4)
    with serve_engine(LocalEngine(checkpoint), GatewayConfig(limits=limits)) as served:
        with served.http() as client:
            described = client.get("/openapi.json").json()
        for name in (
            "CompletionRequest",
            "ChatRequest",
            "ResponsesRequest",
        ):  # so that requests get past the first check
            described["components"]["schemas"][name]["properties"]["model"] = {"const": "tiny"}
        schema = schemathesis.openapi.from_dict(described)
        schema.config.update(base_url=served.url)
        yield schema


def try_out(api: Any, examples: int, **options: Any) -> None:
    """Every operation with valid and with invalid requests; schemathesis checks status, headers and shape."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    for result in api.get_all_operations():
        for mode in GenerationMode:

            @given(case=result.ok().as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), **options
            )
            def check(case: Any) -> None:
                # A schema cannot say how fields depend on each other (`best_of` on `n`), so that data it
                # calls valid may be refused.
                case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)

            with suppress(Unsatisfiable):  # a route without parameters has no invalid request
                check()


def test_no_request_breaks_the_server(api: Any) -> None:
    try_out(api, 12, derandomize=True, phases=[Phase.generate])


@pytest.mark.slow
def test_no_request_of_many_breaks_the_server(api: Any) -> None:
    try_out(api, 1000)
