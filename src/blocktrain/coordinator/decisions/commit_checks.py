"""Whether a commit or a payload is let in: pure checks, cheapest first, each refusal with its remedy.

Order in the request path: signature and replay (app), joined, assignment known and its own, (worker,
block, round) unused, base hash known, exact length; then, as the body streams, length, rate and digest;
then hash equals commit, parse, norm.

Covered: everything that can be told from the bytes and the state. Not covered: whether the update helps
(the judge's work), rate caps per address, bans. Norms outside `NORM_BOUNDS` times the running median are
recorded with the verdict and clipped by the merge, not refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.decisions.deadlines import Lateness, lateness
from blocktrain.coordinator.refusals import Refusal
from blocktrain.wire.messages import CommitRequest, ErrorReason, Outcome, VerdictReason

NORM_BOUNDS = (0.1, 10.0)
"""A norm outside these multiples of the running median is worth an operator's look."""
MAX_NORM = 1e18
"""Above this a merge could overflow fp32; no block of finite training comes near."""


@dataclass(frozen=True, kw_only=True)
class AssignmentView:
    """What a commit is checked against."""

    block: int
    round: int
    returned: bool
    committed_hash: str | None
    """Payload hash of an earlier commit for this (worker, block, round)."""
    payload_bytes: int
    """Exact length of every payload of this block."""
    base_version: int | None
    """Version of the commit's base hash in this block; None where it is no snapshot of it."""
    base_used: bool
    """Another assignment of this worker has an update on the same snapshot."""
    head_version: int


def commit_refusal(assignment: AssignmentView, commit: CommitRequest) -> Refusal | None:
    """Why this commit is refused, or None; a repeated commit of the same payload is not refused."""
    if assignment.returned:
        return Refusal(
            ErrorReason.LEASE_RETURNED, "this assignment was handed back", "ask for another assignment"
        )
    if assignment.committed_hash not in (None, commit.payload_hash):
        return Refusal(
            ErrorReason.ALREADY_COMMITTED,
            f"round {assignment.round} of block {assignment.block} already has another commit of this worker",
            "deliver the payload that was committed, or ask for another assignment",
        )
    if assignment.base_version is None:
        return Refusal(
            ErrorReason.UNKNOWN_BASE,
            f"base {commit.base_hash[:12]}… is no snapshot of block {assignment.block}",
            f"rebase on a snapshot from GET /v1/blocks/{assignment.block}",
        )
    return (
        _round_refusal(assignment)
        or _base_refusal(assignment)
        or length_refusal(assignment.payload_bytes, commit.payload_bytes)
    )


def _round_refusal(assignment: AssignmentView) -> Refusal | None:
    assert assignment.base_version is not None
    if assignment.base_version >= assignment.round:
        return None
    return Refusal(
        ErrorReason.ROUND_NOT_OPEN,
        f"round {assignment.round} of block {assignment.block} starts from version {assignment.round}, this "
        f"update from version {assignment.base_version}; the head is version {assignment.head_version}",
        "rebase on that version and commit again"
        if assignment.head_version >= assignment.round
        else "wait until the round before it has closed, rebase, and commit again",
    )


def _base_refusal(assignment: AssignmentView) -> Refusal | None:
    """Leases of several rounds must not add up to several votes in one merge."""
    if not assignment.base_used:
        return None
    return Refusal(
        ErrorReason.ALREADY_COMMITTED,
        f"this worker has already committed an update on version {assignment.base_version} of block "
        f"{assignment.block}",
        "rebase on a newer version, or ask for another assignment",
    )


def length_refusal(expected: int, found: int) -> Refusal | None:
    if found == expected:
        return None
    return Refusal(
        ErrorReason.WRONG_LENGTH,
        f"expected a payload of exactly {expected} bytes, found {found}",
        "encode with the codec and schema of GET /v1/run",
    )


def ruling(age: int, finished: bool, problem: Lateness | None, swarm: SwarmConfig) -> Lateness:
    """What becomes of a revealed payload; `problem` is what decoding it brought to light."""
    if problem is not None:
        return problem
    if finished:
        sentence = "the block has had all its rounds"
        return Lateness(Outcome.REFUSED, 0.0, VerdictReason.RUN_FINISHED, sentence)
    return lateness(age, swarm)


def malformed(sentence: str, reason: VerdictReason = VerdictReason.MALFORMED) -> Lateness:
    return Lateness(Outcome.REFUSED, 0.0, reason, sentence)


def norm_problem(norm: float) -> Lateness | None:
    if math.isfinite(norm) and norm <= MAX_NORM:
        return None
    sentence = f"expected a norm of at most {MAX_NORM:g}, found {norm:g}"
    return Lateness(Outcome.REFUSED, 0.0, VerdictReason.NOT_FINITE, sentence)


def norm_remark(norm: float, running_median: float | None) -> str | None:
    """A sentence for the ledger where the norm is out of the ordinary."""
    if not running_median:
        return None
    low, high = NORM_BOUNDS
    ratio = norm / running_median
    if low <= ratio <= high:
        return None
    return f"norm {norm:.3g} is {ratio:.3g} times the running median; usual is {low:g} to {high:g}"
