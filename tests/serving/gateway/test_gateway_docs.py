"""docs/serve.md is true: its examples run, and nothing the gateway has is missing from it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blocktrain.serving.engine.requests import MAX_DRAFT_TOKENS
from blocktrain.serving.engine.sweeping import SWEEP_TOKENS
from blocktrain.serving.gateway import access, api_errors
from blocktrain.serving.gateway import app as gateway
from blocktrain.serving.gateway.app import ANSWER_HEADERS, create_app
from blocktrain.serving.gateway.engines import Engines
from blocktrain.serving.gateway.limits import GatewayLimits
from blocktrain.serving.gateway.metrics import GatewayMetrics
from blocktrain.serving.gateway.openai_messages import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    TraversalUsage,
)
from blocktrain.serving.gateway.responses import ResponsesRequest
from blocktrain.wire.frame_metadata import MAX_PASSES

from .conftest import Served

PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def here(example: str, served: Served) -> str:
    return example.replace("http://127.0.0.1:8000", served.url).replace('"demo"', '"tiny"')


@pytest.mark.parametrize("example", examples("python"))
def test_python_examples_run(example: str, served: Served) -> None:
    command = [sys.executable, "-c", here(example, served)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("example", examples("bash"))
def test_shell_examples_run(example: str, served: Served) -> None:
    done = subprocess.run(["bash", "-c", here(example, served)], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"]


def test_every_route_is_documented(engine_of: Any) -> None:
    for path, operations in create_app(Engines(engine_of())).openapi()["paths"].items():
        for method in operations:
            assert f"`{method.upper()} {path}`" in PAGE


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, ResponsesRequest, TraversalUsage])
def test_every_field_is_documented(model: Any) -> None:
    assert [name for name in model.model_fields if f"`{name}`" not in PAGE] == []


def test_every_limit_is_documented_with_its_default() -> None:
    for limit in dataclasses.fields(GatewayLimits):
        default = "none" if limit.default is None else f"{limit.default:.10g}"
        assert f"| `{limit.name}` | {default} |" in PAGE


def test_every_header_and_metric_is_documented() -> None:
    for header in ANSWER_HEADERS:
        assert f"`{header}`" in PAGE
    for family in GatewayMetrics().registry.collect():
        name = family.name.removeprefix("blocktrain_gateway_")
        assert f"`{name}_total`" in PAGE if family.type == "counter" else f"`{name}`" in PAGE


def test_every_error_code_is_documented() -> None:
    sources = [Path(module.__file__ or "").read_text() for module in (api_errors, access, gateway)]
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source)}
    codes |= {code for _, code in api_errors.HTTP_WORDS.values()}
    assert len(codes) >= 12
    assert [code for code in sorted(codes) if f"`{code}`" not in PAGE] == []


def test_numbers_in_the_page_are_those_of_the_code() -> None:
    assert f"| `draft_tokens` | 0 to {MAX_DRAFT_TOKENS} tokens" in PAGE
    assert f"| `passes` | 1 to {MAX_PASSES} steps" in PAGE
    assert f"| 1 for up to {SWEEP_TOKENS} |" in PAGE
    assert f"is a byte | {DEFAULT_COMPLETION_TOKENS} |" in PAGE
    assert f"up to the limit `max_tokens` | {DEFAULT_CHAT_TOKENS} |" in PAGE
