"""Messages: bounded, strict on the way in, tolerant on the way out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from blocktrain.wire import messages
from blocktrain.wire.messages import (
    MAX_BODY_BYTES,
    Account,
    AssignmentAnswer,
    AssignmentRequest,
    CommitRequest,
    Finished,
    HeartbeatRequest,
    JoinRequest,
    Request,
    Wait,
)

HASH = "ab" * 32


def requests() -> list[type[Request]]:
    return [
        one
        for one in vars(messages).values()
        if isinstance(one, type) and issubclass(one, Request) and one is not Request
    ]


@pytest.mark.parametrize("model", requests())
def test_a_request_with_an_unknown_key_or_version_is_refused(model: type[Request]) -> None:
    for extra in ({"surprise": 1}, {"protocol": 2}):
        with pytest.raises(ValidationError, match="surprise|protocol"):
            model.model_validate(extra)


def test_a_heartbeat_of_an_older_worker_is_understood() -> None:
    old = {"step": 12, "loss": 1.5, "steps_per_second": 4.1, "bytes_per_second": 250000.0}
    assert HeartbeatRequest.model_validate(old) == HeartbeatRequest(step=12, loss=1.5)


def test_an_answer_with_an_unknown_key_is_read() -> None:
    assert Wait.model_validate({"seconds": 1.0, "reason": "x", "new": 5}).seconds == 1.0


def test_the_answers_to_asking_are_told_apart_by_kind() -> None:
    found = TypeAdapter(AssignmentAnswer).validate_json('{"kind": "finished", "reason": "done"}')
    assert isinstance(found, Finished)


@pytest.mark.parametrize(
    "change",
    [
        {"payload_hash": HASH.upper()},
        {"payload_hash": HASH[:-1]},
        {"payload_hash": "../" + HASH[3:]},
        {"payload_bytes": -1},
        {"payload_bytes": 2**60},
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"account": {"seconds_computing": -1.0}},
        {"account": {"surprise": 1}},
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, object]) -> None:
    valid = {"payload_hash": HASH, "payload_bytes": 1, "base_hash": HASH}
    CommitRequest.model_validate(valid)
    with pytest.raises(ValidationError):
        CommitRequest.model_validate({**valid, **change})


def test_the_largest_requests_fit_into_a_body() -> None:
    holding = {str(block): 2**53 - 1 for block in range(256)}
    versions = {f"{i:064}": "v" * 64 for i in range(16)}
    largest: list[BaseModel] = [
        AssignmentRequest(holding=holding, after="ab" * 16),
        JoinRequest(corpus_sha256=HASH, versions=versions, device="d" * 64),
        CommitRequest(payload_hash=HASH, payload_bytes=2**53 - 1, base_hash=HASH, account=Account()),
    ]
    assert all(len(one.model_dump_json()) < MAX_BODY_BYTES for one in largest)


@given(st.dictionaries(st.text(max_size=6), st.integers(), max_size=3))
def test_holdings_have_block_numbers_as_keys(holding: dict[str, int]) -> None:
    """Python's int() reads more than ASCII digits; only those may reach it."""
    try:
        request = AssignmentRequest.model_validate({"holding": holding})
    except ValidationError:
        return
    assert all(key.isascii() and 0 <= int(key) < 10_000 for key in request.holding)
