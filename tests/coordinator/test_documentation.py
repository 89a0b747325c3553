"""docs/protocol.md names every route, refusal, verdict, ledger kind and metric; its examples are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from blocktrain.coordinator.http.app import API
from blocktrain.coordinator.http.pages import pages
from blocktrain.coordinator.metrics import Metrics
from blocktrain.wire.messages import (
    MAX_BODY_BYTES,
    AssignmentAnswer,
    AssignmentRequest,
    BlockAnswer,
    CommitAnswer,
    CommitRequest,
    ErrorAnswer,
    ErrorReason,
    EvidenceReport,
    HeartbeatAnswer,
    HeartbeatRequest,
    JoinAnswer,
    JoinRequest,
    JudgeTask,
    LedgerEntry,
    MergesAnswer,
    Outcome,
    RunAnswer,
    Verdict,
    VerdictReason,
)
from blocktrain.wire.signing import Reason

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_every_route_is_documented() -> None:
    for route in (route for router in (*API, pages) for route in router.routes):
        assert isinstance(route, APIRoute)
        path = route.path.replace("{assignment_id}", "{id}").replace("{snapshot_hash}", "{hash}")
        for method in route.methods or ():
            assert re.search(rf"{method} {re.escape(path)}", TEXT), f"{method} {path}"


@pytest.mark.parametrize("word", [*ErrorReason, *Reason, *VerdictReason, *Outcome])
def test_every_refusal_and_verdict_is_documented(word: str) -> None:
    assert f"`{word}`" in TEXT


def test_every_ledger_kind_is_documented() -> None:
    for kind in get_args(LedgerEntry.model_fields["kind"].annotation):
        assert f"`{kind}`" in TEXT


def test_every_metric_is_documented() -> None:
    for family in Metrics()._registry.collect():
        assert f"`{family.name}" in TEXT, family.name


def test_the_limits_are_those_of_the_code() -> None:
    assert f"| JSON body | {MAX_BODY_BYTES // 1024} KiB |" in TEXT


def test_every_example_is_a_valid_message() -> None:
    models: list[Any] = [
        *(AssignmentRequest, JoinRequest, JoinAnswer, AssignmentAnswer, HeartbeatRequest, HeartbeatAnswer),
        *(EvidenceReport, JudgeTask),
        *(CommitRequest, CommitAnswer, Verdict, RunAnswer, BlockAnswer, MergesAnswer, ErrorAnswer),
    ]
    adapters = [TypeAdapter[Any](model) for model in models]
    examples = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) >= 14
    for example in examples:
        filled = re.sub(r'"([0-9a-f]*)…"', lambda found: '"' + found[1].ljust(64, "0") + '"', example)
        if json.loads(filled).keys() != {"protocol", "length", "entries"}:
            assert any(fits(adapter, filled) for adapter in adapters), example


def fits(adapter: TypeAdapter[Any], example: str) -> bool:
    """Ids are shorter than hashes and signatures longer; the examples abbreviate all of them alike."""
    short = {"worker_id": 32, "assignment_id": 32, "signature": 128}
    for name, length in short.items():
        example = re.sub(rf'"{name}": "([0-9a-f]*)"', f'"{name}": "{"0" * length}"', example)
    try:
        adapter.validate_json(example)
    except ValueError:
        return False
    return True
