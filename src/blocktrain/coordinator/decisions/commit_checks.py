"""Whether a commit or a payload is let in: pure checks, cheapest first, each refusal with its remedy.

Order in the request path: signature and replay (http), joined, assignment known and its own, then the checks
of `commit_refusal`; as the body streams, length, rate and digest; then hash equals commit, and what
`validation.ruling` says of the content.

Covered: everything that can be told from the bytes and the state. Not covered: whether the update helps (the
judge's work), rate caps per address, bans.
"""

from __future__ import annotations

from dataclasses import dataclass

from blocktrain.coordinator.refusals import Refusal
from blocktrain.wire.messages import CommitRequest, ErrorReason


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
    block, base = assignment.block, assignment.base_version
    if assignment.returned:
        return Refusal(
            ErrorReason.LEASE_RETURNED, "this assignment was handed back", "ask for another assignment"
        )
    # The first commit binds: choosing among several after seeing others' is what commits are there to
    # prevent.
    if assignment.committed_hash not in (None, commit.payload_hash):
        return Refusal(
            ErrorReason.ALREADY_COMMITTED,
            f"round {assignment.round} of block {block} already has another commit of this worker",
            "deliver the payload that was committed, or ask for another assignment",
        )
    if base is None:
        return Refusal(
            ErrorReason.UNKNOWN_BASE,
            f"base {commit.base_hash[:12]}… is no snapshot of block {block}",
            f"rebase on a snapshot from GET /v1/blocks/{block}",
        )
    if base < assignment.round:
        return Refusal(
            ErrorReason.ROUND_NOT_OPEN,
            f"round {assignment.round} of block {block} starts from version {assignment.round}, this update "
            f"from version {base}; the head is version {assignment.head_version}",
            "rebase on that version and commit again"
            if assignment.head_version >= assignment.round
            else "wait until the round before it has closed, rebase, and commit again",
        )
    # Leases of several rounds must not add up to several votes in one merge.
    if assignment.base_used:
        return Refusal(
            ErrorReason.ALREADY_COMMITTED,
            f"this worker has already committed an update on version {base} of block {block}",
            "rebase on a newer version, or ask for another assignment",
        )
    return length_refusal(assignment.payload_bytes, commit.payload_bytes)


def length_refusal(expected: int, found: int) -> Refusal | None:
    # A codec gives every payload of a block one length, so a wrong one is refused before a byte is read.
    if found == expected:
        return None
    return Refusal(
        ErrorReason.WRONG_LENGTH,
        f"expected a payload of exactly {expected} bytes, found {found}",
        "encode with the codec and schema of GET /v1/run",
    )


def hash_refusal(expected: str, found: str) -> Refusal | None:
    if found == expected:
        return None
    return Refusal(
        ErrorReason.HASH_MISMATCH,
        f"expected a payload with blake3 {expected}, found {found}",
        "send the bytes that were committed",
    )
