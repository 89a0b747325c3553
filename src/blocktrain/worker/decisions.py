"""What a worker does next, as pure functions of what it knows; time and chance are arguments.

Knows no sockets, files, tensors or clocks. Each function answers one question the running worker asks,
so that a test (or the simulation) can put any situation to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blocktrain.wire.messages import Assignment, Outcome, VerdictReason

PREFETCH_SECONDS = 5.0
PREFETCH_SHARE = 0.8
ASLEEP_SECONDS = 20.0
SAVING_SHARE = 0.02
OPTIMIZER_SAVING_SECONDS = 120.0
"""The trainer pauses while its state is copied; and state two minutes old is about as good, because the
momenta forget within some twenty steps."""
SNAPSHOT_SAVING_SECONDS = 5.0
MOVE_DAMPING = 2.0
FIRST_WATCH_SECONDS = 0.05
IDLE_WATCH_SECONDS = 2.0
RETURNED_REASONS = frozenset({VerdictReason.DROPPED, VerdictReason.TOO_OLD, VerdictReason.RUN_FINISHED})
MAX_UNSENT = 1
"""Finished rounds that may wait behind the one being sent; each costs a copy of the weights."""


def slept_seconds(*, wall: float, monotonic: float) -> float | None:
    """How long this machine was suspended, from what both clocks say has passed; None if it was not.

    The monotonic clock stands still in suspension on Linux and macOS; the wall clock does not. A wall
    clock set back is no sleep.
    """
    gap = wall - monotonic
    return gap if gap > ASLEEP_SECONDS else None


def asks_for_next(*, steps_done: int, steps: int, elapsed_seconds: float) -> bool:
    """Whether to ask for the next assignment now, so that it is there when this one ends.

    Late enough that the answer is fresh, early enough for a slow network: when a fifth of the round,
    or a few seconds, are left.
    """
    if steps_done >= steps or steps_done >= PREFETCH_SHARE * steps:
        return True
    if not steps_done:
        return False
    return elapsed_seconds / steps_done * (steps - steps_done) <= PREFETCH_SECONDS


def own_steps(assignment: Assignment) -> int:
    """Without those in the place of another."""
    return assignment.steps - (0 if assignment.stand_in is None else assignment.stand_in.steps)


def batch_of(assignment: Assignment, step: int) -> tuple[int, int]:
    """Place in the schedule, and data shard, of a step of an assignment."""
    own = own_steps(assignment)
    if step < own or assignment.stand_in is None:
        return assignment.first_step + step, assignment.shard
    return assignment.first_step + step - own, assignment.stand_in.shard


def may_step(*, step: int, steps: int, version: int, round_: int, run_ahead: float) -> bool:
    """Whether to train on, though the snapshot of version `round_` may still be missing."""
    return version >= round_ or step < run_ahead * steps


def move_share(rounds_ahead: float) -> float:
    """Which share of a new snapshot's move to apply at once, by how far training has gone on without it.

    What the others' updates correct in this worker's weights, its own gradient has by then corrected in
    part: applied in full, a move that comes a round late overshoots, and two replicas end up worse than one
    (docs/experiments.md). A move in time (0 rounds ahead) is applied in full.
    """
    return 1.0 / (1.0 + MOVE_DAMPING * rounds_ahead)


def saving_is_due(
    *, now: float, saved_at: float | None, cost_seconds: float, least_seconds: float = 0.0
) -> bool:
    """Whether to write to disk again: at first, then after a while, and for a small share of the time."""
    return saved_at is None or now - saved_at >= max(least_seconds, cost_seconds / SAVING_SHARE)


def share_to_return(outcome: Outcome, weight: float) -> float:
    """Which share of a late update goes back to error feedback: what will not be in the snapshot."""
    if outcome is Outcome.ACCEPTED:
        return 0.0
    if outcome is Outcome.LATE:
        return 1.0 - min(1.0, max(0.0, weight))
    return 1.0


def is_forgotten(outcome: Outcome, reason: VerdictReason) -> bool:
    """Whether an update is given up altogether, and what compression left of it too.

    Work that came too late is sound and returns to error feedback. Work that was judged and found wanting
    does not: the round is trained again from the same snapshot, so the next update would be this one
    twice, and the one after it three times (docs/decisions/0007).
    """
    return outcome is Outcome.REFUSED and reason not in RETURNED_REASONS


@dataclass(frozen=True)
class Sent:
    """An update on its way: what it was formed against, and what is known of it."""

    payload_hash: str
    base_version: int
    judged: bool = False
    gone: bool = False
    """It will not be merged: refused, or never taken. Its progress is in error feedback."""


@dataclass(frozen=True)
class Settlement:
    settled: int
    """How many updates, oldest first, are no longer on their way."""
    given_up: tuple[int, ...]
    """Those of them that were to be merged and never were; their progress must go to error feedback."""


def settle(sent: Sequence[Sent], merged: Iterable[str], version: int, max_age: int) -> Settlement:
    """Which updates are done with, now that the snapshot is `version` and holds the payloads `merged`.

    Stops at the first that may still be merged, because the local weights hold its progress on top of
    the snapshot. An update counts in the next merge after its verdict, so one that is not in any merge
    up to max_age rounds later was taken out by the coordinator.
    """
    merged = set(merged)
    given_up: list[int] = []
    for index, update in enumerate(sent):
        if update.gone or update.payload_hash in merged:
            continue
        if not (update.judged and version > update.base_version + max_age + 1):
            return Settlement(index, tuple(given_up))
        given_up.append(index)
    return Settlement(len(sent), tuple(given_up))


def verdict_wait_seconds(asked: int) -> float:
    """How long until a verdict is asked for again: soon at first, then seldom."""
    return min(IDLE_WATCH_SECONDS, FIRST_WATCH_SECONDS * 1.5 ** min(asked, 20))


def watch_seconds(*, waiting: bool, quiet_seconds: float) -> float:
    """How long until the head is looked at again: often while an own update is about to be merged."""
    if not waiting:
        return IDLE_WATCH_SECONDS
    return min(IDLE_WATCH_SECONDS, max(FIRST_WATCH_SECONDS, quiet_seconds / 4))
