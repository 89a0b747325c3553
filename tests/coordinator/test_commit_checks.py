"""Which commits are let in: pure checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blocktrain.coordinator.decisions.commit_checks import (
    AssignmentView,
    commit_refusal,
)
from blocktrain.coordinator.refusals import STATUS
from blocktrain.wire.messages import CommitRequest, ErrorReason
from blocktrain.wire.signing import Reason

COMMIT = CommitRequest(payload_hash="aa" * 32, payload_bytes=100, base_hash="bb" * 32)
VIEW = AssignmentView(
    block=0,
    round=3,
    returned=False,
    committed_hash=None,
    payload_bytes=100,
    base_version=3,
    base_used=False,
    head_version=3,
)


def test_a_commit_in_order_is_let_in() -> None:
    assert commit_refusal(VIEW, COMMIT) is None
    assert commit_refusal(replace(VIEW, committed_hash=COMMIT.payload_hash), COMMIT) is None
    assert commit_refusal(replace(VIEW, base_version=5, head_version=5), COMMIT) is None


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(VIEW, returned=True), ErrorReason.LEASE_RETURNED),
        (replace(VIEW, committed_hash="cc" * 32), ErrorReason.ALREADY_COMMITTED),
        (replace(VIEW, base_version=None), ErrorReason.UNKNOWN_BASE),
        (replace(VIEW, base_version=2), ErrorReason.ROUND_NOT_OPEN),
        (replace(VIEW, base_used=True), ErrorReason.ALREADY_COMMITTED),
        (replace(VIEW, payload_bytes=99), ErrorReason.WRONG_LENGTH),
    ],
)
def test_each_way_a_commit_falls_short_has_its_reason(view: AssignmentView, reason: ErrorReason) -> None:
    refusal = commit_refusal(view, COMMIT)
    assert refusal is not None
    assert (refusal.body.reason, refusal.status) == (reason, STATUS[reason])
    assert refusal.body.remedy


def test_every_reason_has_a_status() -> None:
    assert set(STATUS) == {*map(str, ErrorReason), *map(str, Reason)}
