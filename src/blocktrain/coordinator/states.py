"""The states of assignments and updates, and which may follow which; stored as their strings.

An update: committed, (judging,) accepted or late or refused, merged; refused may also follow a verdict that
counted, when the guard or a ban takes it back. `withheld`: its payload never came.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from blocktrain.wire.messages import Outcome, VerdictReason


class AssignmentState(StrEnum):
    LEASED = "leased"
    COMMITTED = "committed"
    RETURNED = "returned"
    """By the worker."""
    RECALLED = "recalled"
    """By a coordinator that wants an earlier round trained first; never counted against the worker."""
    WITHHELD = "withheld"
    """Committed and never revealed."""
    REFUSED = "refused"
    """Revealed and refused: the worker may try the round again."""


class UpdateState(StrEnum):
    COMMITTED = "committed"
    JUDGING = "judging"
    ACCEPTED = "accepted"
    LATE = "late"
    REFUSED = "refused"
    MERGED = "merged"
    WITHHELD = "withheld"


LIVE = (AssignmentState.LEASED, AssignmentState.COMMITTED)
"""At most one of these per worker, block and round; the others leave the round open to the worker."""
WAITING = (UpdateState.ACCEPTED, UpdateState.LATE)
"""Counts in the next merge."""
COUNTED = (*WAITING, UpdateState.MERGED)

_AFTER_ASSIGNMENT: Mapping[AssignmentState, tuple[AssignmentState, ...]] = {
    AssignmentState.LEASED: (
        AssignmentState.COMMITTED,
        AssignmentState.RETURNED,
        AssignmentState.RECALLED,
    ),
    # Never back to leased: what was committed is in the ledger.
    AssignmentState.COMMITTED: (AssignmentState.WITHHELD, AssignmentState.REFUSED),
    AssignmentState.RETURNED: (),
    AssignmentState.RECALLED: (),
    AssignmentState.WITHHELD: (),
    AssignmentState.REFUSED: (),
}
_AFTER_UPDATE: Mapping[UpdateState, tuple[UpdateState, ...]] = {
    UpdateState.COMMITTED: (UpdateState.JUDGING, *WAITING, UpdateState.REFUSED, UpdateState.WITHHELD),
    UpdateState.JUDGING: (*WAITING, UpdateState.REFUSED),
    # By the guard, or with a ban, before the merge.
    UpdateState.ACCEPTED: (UpdateState.MERGED, UpdateState.REFUSED),
    UpdateState.LATE: (UpdateState.MERGED, UpdateState.REFUSED),
    UpdateState.REFUSED: (),
    UpdateState.MERGED: (),
    UpdateState.WITHHELD: (),
}


def merged_outcome(reason: str | None) -> Outcome:
    """The outcome that an update had before it was merged, from the reason of its verdict."""
    # Not from its weight: with swarm.age_decay = 1 late updates have all of it.
    return Outcome.LATE if reason == VerdictReason.CARRIED else Outcome.ACCEPTED


class HasState(Protocol):
    state: Any


def change(row: HasState, new: AssignmentState | UpdateState) -> None:
    """Every change of a stored state goes through here; one that the tables do not allow is our own fault."""
    # The database holds plain strings, so the type of `new` says which table applies.
    if isinstance(new, AssignmentState):
        allowed = new in _AFTER_ASSIGNMENT[AssignmentState(row.state)]
    else:
        allowed = new in _AFTER_UPDATE[UpdateState(row.state)]
    assert allowed, f"{type(row).__name__}: {new} may not follow {row.state}"
    row.state = new
