"""Reads that more than one service needs, each within the caller's transaction. They answer with facts; what
follows from them is decided in `decisions/` and `validation/`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import TypeAdapter
from sqlalchemy import bindparam, func, literal_column, or_, select
from sqlalchemy.orm import Session

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.decisions.scheduling import GIVEN_UP_SECONDS
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.states import COUNTED, WAITING, AssignmentState, UpdateState
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    EvaluationRow,
    Prepared,
    RunRow,
    UpdateRow,
    WorkerRow,
)
from blocktrain.validation.ruling import MEDIAN_NORMS
from blocktrain.wire.messages import ErrorReason, FrozenSnapshot, VerdictReason

# Plus nothing: SQLite would else group by the index on blocks, through all workers that ever were.
_SEAT = WorkerRow.block + literal_column("0")
_SEATS = Prepared(select(_SEAT, func.count()).where(WorkerRow.last_seen > bindparam("since")).group_by(_SEAT))
_BLOCK = Prepared(select(BlockRow.__table__).where(BlockRow.block == bindparam("block")))
_GIVEN_UP = Prepared(
    select(AssignmentRow.made)
    .outerjoin(UpdateRow, UpdateRow.assignment_id == AssignmentRow.assignment_id)
    .where(
        AssignmentRow.worker_id == bindparam("worker"),
        AssignmentRow.made > bindparam("since"),
        or_(
            AssignmentRow.state.in_((AssignmentState.RETURNED, AssignmentState.WITHHELD)),
            (AssignmentRow.state == AssignmentState.REFUSED)
            & UpdateRow.reason.in_((VerdictReason.MALFORMED, VerdictReason.NOT_FINITE)),
        ),
    )
)
RECENT_SCORES = 16  # about two rounds of eight workers: a median that follows the schedule
_frozen: TypeAdapter[tuple[FrozenSnapshot, ...]] = TypeAdapter(tuple[FrozenSnapshot, ...])


def lock_run(session: Session) -> None:
    """For a transaction that makes a row which two processes could make at once."""
    session.get(RunRow, 1, with_for_update=True, populate_existing=True)


def block_row(session: Session, block: int, *, lock: bool = False) -> BlockRow:
    """The block as it is now; one that is not locked is a copy, and what is changed in it is not written."""
    # Read again, also where the session has the row: another process may have moved the head.
    if lock:
        row = session.get(BlockRow, block, with_for_update=True, populate_existing=True)
    else:
        names, found = BlockRow.__table__.columns.keys(), _BLOCK(session, block=block)
        row = BlockRow(**dict(zip(names, found[0], strict=True))) if found else None
    if row is None:
        count = session.scalar(select(func.count()).select_from(BlockRow)) or 0
        raise Refusal(ErrorReason.NOT_FOUND, f"no block {block}; this run has 0 to {count - 1}")
    return row


def live_since(now: float, swarm: SwarmConfig) -> float:
    """A worker is live if it was last seen after this time."""
    return now - swarm.lease_seconds


def seats(session: Session, swarm: SwarmConfig, now: float, *, without: WorkerRow) -> dict[int, int]:
    """Live workers on each block, but for one that has just been seen."""
    session.flush()
    rows = _SEATS(session, since=live_since(now, swarm))
    found = {block: count for block, count in rows if block is not None}
    if without.block is not None:
        found[without.block] -= 1
    return found


def inputs_of_merge(session: Session, block: int, version: int | None) -> list[UpdateRow]:
    """Updates that belong to the merge that makes `version`, in the order in which they are added up; with
    None those that wait for a merge."""
    # Sorted by id: fp32 sums depend on their order, and every process must get the same bytes.
    of_merge = UpdateRow.merge_version == version
    if version is None:
        of_merge = UpdateRow.merge_version.is_(None) & UpdateRow.state.in_(WAITING)
    query = select(UpdateRow).where(UpdateRow.block == block, of_merge).order_by(UpdateRow.update_id)
    return list(session.scalars(query))


def num_assignments(session: Session, block: int, round_: int, states: Sequence[AssignmentState]) -> int:
    query = select(func.count()).where(
        AssignmentRow.block == block, AssignmentRow.round == round_, AssignmentRow.state.in_(states)
    )
    return session.scalar(query) or 0


def given_up(session: Session, worker_id: str, now: float) -> list[float]:
    """When the assignments were lent that the worker handed back recently, or spent on a commit without a
    payload or on bytes that are no update."""
    return [made for (made,) in _GIVEN_UP(session, worker=worker_id, since=now - GIVEN_UP_SECONDS)]


def running_median(session: Session, block: int) -> float | None:
    """Median norm of the last merged updates of a block; None before its first merge."""
    # Merged ones only: what was merely sent is its sender's choice, and would let a crowd move the median.
    rows = session.scalars(
        select(UpdateRow.norm)
        .where(UpdateRow.block == block, UpdateRow.state == UpdateState.MERGED)
        .order_by(UpdateRow.merge_version.desc(), UpdateRow.update_id)
        .limit(MEDIAN_NORMS)
    )
    norms = [norm for norm in rows if norm is not None]
    return statistics.median(norms) if norms else None


def recent_scores(session: Session, block: int, *, established: bool) -> list[float]:
    """Scores of the block's last updates: of those that counted, or of all those of established workers."""
    # How high a gain must be follows from what counted; whether penalties pause, from all that established
    # workers sent: those that counted are above zero by definition.
    chosen = UpdateRow.state.in_(COUNTED)
    if established:
        trusted = select(WorkerRow.worker_id).where(WorkerRow.established.is_(True))
        chosen = UpdateRow.worker_id.in_(trusted)
    rows = session.scalars(
        select(UpdateRow.score)
        .where(UpdateRow.block == block, UpdateRow.score.is_not(None), chosen)
        .order_by(UpdateRow.verdict_sequence.desc())
        .limit(RECENT_SCORES)
    )
    return [score for score in rows if score is not None]


def tries_in_vain(session: Session, update: UpdateRow) -> int:
    """How many updates of the same worker for the same round, from the same snapshot, had no gain."""
    found = session.scalar(
        select(func.count()).where(
            UpdateRow.worker_id == update.worker_id,
            UpdateRow.state == UpdateState.REFUSED,
            UpdateRow.block == update.block,
            # Not those of older leases on the same head: such a worker did not wait until nothing counted.
            UpdateRow.round == update.round,
            UpdateRow.base_version == update.base_version,
            UpdateRow.reason == VerdictReason.NO_GAIN,
        )
    )
    return found or 0


def held_out_losses(session: Session) -> list[float]:
    """What the run's scores of the assembled model found, oldest first."""
    # From the index alone: a long run has thousands of records, and every judge's task asks.
    losses = session.scalars(select(EvaluationRow.consensus_ce).order_by(EvaluationRow.time))
    return [loss for loss in losses if loss is not None]


def frozen_of(row: AssignmentRow) -> tuple[FrozenSnapshot, ...]:
    """The snapshots of other blocks that an assignment named when it was lent."""
    return _frozen.validate_json(row.frozen)


def frozen_heads(session: Session, run: Run, block: int) -> list[FrozenSnapshot]:
    """The heads of the blocks that the objective needs for training `block`."""
    frozen = run.objective.frozen(block)
    if not frozen:
        return []
    columns = select(BlockRow.block, BlockRow.version, BlockRow.head_hash)
    heads = session.execute(columns.where(BlockRow.block.in_(frozen)).order_by(BlockRow.block))
    return [FrozenSnapshot(block=row.block, version=row.version, hash=row.head_hash) for row in heads]
