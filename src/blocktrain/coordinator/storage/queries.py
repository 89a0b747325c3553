"""Reads that more than one service needs, each within the caller's transaction. They answer with facts; what
follows from them is decided in `decisions/` and `validation/`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.decisions.rounds import (
    HISTORY_ARRIVALS,
    PACE_ROUNDS,
    BlockPace,
    OpenRound,
    RoundFacts,
    round_state,
)
from blocktrain.coordinator.decisions.scheduling import GIVEN_UP_SECONDS
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import read_standing
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.states import COUNTED, WAITING, AssignmentState, UpdateState
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    MergeRow,
    RunRow,
    UpdateRow,
    WorkerRow,
)
from blocktrain.validation.ruling import MEDIAN_NORMS
from blocktrain.wire.messages import ErrorReason, FrozenSnapshot, VerdictReason

RECENT_SCORES = 16  # about two rounds of eight workers: a median that follows the schedule
_frozen: TypeAdapter[tuple[FrozenSnapshot, ...]] = TypeAdapter(tuple[FrozenSnapshot, ...])


def lock_run(session: Session) -> None:
    """For a transaction that makes a row which two processes could make at once."""
    session.get(RunRow, 1, with_for_update=True, populate_existing=True)


def block_row(session: Session, block: int, *, lock: bool = False) -> BlockRow:
    # Read again, also where the session has the row: another process may have moved the head.
    row = session.get(BlockRow, block, with_for_update=lock or None, populate_existing=True)
    if row is None:
        count = session.scalar(select(func.count()).select_from(BlockRow)) or 0
        raise Refusal(ErrorReason.NOT_FOUND, f"no block {block}; this run has 0 to {count - 1}")
    return row


def live_since(now: float, swarm: SwarmConfig) -> float:
    """A worker is live if it was last seen after this time."""
    return now - swarm.lease_seconds


def seats(session: Session, swarm: SwarmConfig, now: float, *, without: str = "") -> dict[int, int]:
    """Live workers on each block."""
    rows = session.execute(
        select(WorkerRow.block, func.count())
        .where(
            WorkerRow.block.is_not(None),
            WorkerRow.last_seen > live_since(now, swarm),
            WorkerRow.worker_id != without,
        )
        .group_by(WorkerRow.block)
    )
    return {block: count for block, count in rows if block is not None}


def round_facts(session: Session, row: BlockRow, swarm: SwarmConfig, now: float) -> RoundFacts:
    """Everything that decides when the block's open round closes."""
    # Columns and not rows, as every heartbeat comes here: with 200 workers at a block instead of 25 it costs
    # 1.2 ms more of processor time; with whole rows it was 3.8 ms.
    workers = session.execute(
        select(WorkerRow.worker_id, WorkerRow.established, WorkerRow.standing).where(
            WorkerRow.block == row.block, WorkerRow.last_seen > live_since(now, swarm)
        )
    ).all()
    on_head = UpdateRow.base_version == row.version
    updates = session.execute(
        select(
            UpdateRow.worker_id,
            UpdateRow.state,
            UpdateRow.base_version,
            UpdateRow.merge_version,
            UpdateRow.revealed,
        ).where(
            UpdateRow.block == row.block,
            or_(
                UpdateRow.state.in_((*WAITING, UpdateState.JUDGING)),
                (UpdateRow.state == UpdateState.REFUSED) & on_head,
            ),
        )
    ).all()
    # What has a merge version belongs to the merge under way, no longer to the open round.
    waiting = [one for one in updates if one.state in WAITING and one.merge_version is None]

    def offsets(*chosen: ColumnElement[bool]) -> list[float]:
        found = session.scalars(
            select(UpdateRow.offset)
            .where(UpdateRow.block == row.block, UpdateRow.offset.is_not(None), *chosen)
            .order_by(UpdateRow.revealed.desc())
            .limit(HISTORY_ARRIVALS)
        )
        return [offset for offset in found if offset is not None]

    counted = UpdateRow.state.in_(COUNTED)
    history = offsets(counted, UpdateRow.base_version < row.version)
    return RoundFacts(
        version=row.version,
        begun=row.begun,
        live=frozenset(name for name, _, _ in workers),
        established={
            name: read_standing(standing).good_verdicts
            for name, established, standing in workers
            if established
        },
        on_time=frozenset(one.worker_id for one in waiting if one.state == UpdateState.ACCEPTED),
        late=frozenset(one.worker_id for one in waiting if one.state == UpdateState.LATE),
        counted=frozenset(
            one.worker_id for one in updates if one.state in WAITING and one.base_version == row.version
        ),
        refused=frozenset(one.worker_id for one in updates if one.state == UpdateState.REFUSED),
        judging=tuple(one.revealed for one in updates if one.state == UpdateState.JUDGING),
        history=history,
        before=offsets(counted, UpdateRow.base_version < row.version - 1) if history else (),
        # Where nothing counts nobody can be cut off, and a lone worker that was refused may try again soon.
        this_round=() if history else offsets(counted, on_head) or offsets(on_head),
        merging=row.closing_version is not None,
        claimed_until=row.claim_until,
    )


def open_round(session: Session, run: Run, row: BlockRow, now: float) -> OpenRound:
    """The block's open round as it stands: who it waits for, until when, and whether it closes now."""
    return round_state(round_facts(session, row, run.swarm, now), run.swarm, run.recipe.trust, now)


def inputs_of_merge(session: Session, block: int, version: int | None) -> list[UpdateRow]:
    """Updates that belong to the merge that makes `version`, in the order in which they are added up; with
    None those that wait for a merge."""
    # Sorted by id: fp32 sums depend on their order, and every process must get the same bytes.
    of_merge = UpdateRow.merge_version == version
    if version is None:
        of_merge = UpdateRow.merge_version.is_(None) & UpdateRow.state.in_(WAITING)
    query = select(UpdateRow).where(UpdateRow.block == block, of_merge).order_by(UpdateRow.update_id)
    return list(session.scalars(query))


def block_paces(session: Session) -> list[BlockPace]:
    """How fast each block's last rounds closed."""
    rows = session.execute(
        select(BlockRow.block, BlockRow.version, MergeRow.begun, MergeRow.closed)
        .outerjoin(
            MergeRow,
            (MergeRow.block == BlockRow.block) & (MergeRow.version > BlockRow.version - PACE_ROUNDS),
        )
        .order_by(BlockRow.block, MergeRow.version)
    ).all()
    paces = []
    for _, group in itertools.groupby(rows, key=lambda row: row.block):
        merges = list(group)
        closed = tuple(row.closed for row in merges if row.closed is not None)
        begun = merges[0].begun
        first = closed[0] - begun if closed and begun is not None else None
        paces.append(BlockPace(version=merges[0].version, closed=closed, first_seconds=first))
    return paces


def num_assignments(session: Session, block: int, round_: int, states: Sequence[AssignmentState]) -> int:
    query = select(func.count()).where(
        AssignmentRow.block == block, AssignmentRow.round == round_, AssignmentRow.state.in_(states)
    )
    return session.scalar(query) or 0


def given_up(session: Session, worker_id: str, now: float) -> list[float]:
    """When the assignments were lent that the worker handed back recently, or spent on a commit without a
    payload or on bytes that are no update."""
    no_update = UpdateRow.reason.in_((VerdictReason.MALFORMED, VerdictReason.NOT_FINITE))
    found = session.scalars(
        select(AssignmentRow.made)
        .outerjoin(UpdateRow, UpdateRow.assignment_id == AssignmentRow.assignment_id)
        .where(
            AssignmentRow.worker_id == worker_id,
            AssignmentRow.made > now - GIVEN_UP_SECONDS,
            or_(
                AssignmentRow.state.in_((AssignmentState.RETURNED, AssignmentState.WITHHELD)),
                (AssignmentRow.state == AssignmentState.REFUSED) & no_update,
            ),
        )
    )
    return list(found)


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


def frozen_of(row: AssignmentRow) -> tuple[FrozenSnapshot, ...]:
    """The snapshots of other blocks that an assignment named when it was lent."""
    return _frozen.validate_json(row.frozen)


def frozen_heads(session: Session, run: Run, block: int) -> list[FrozenSnapshot]:
    """The heads of the blocks that the objective needs for training `block`."""
    heads = [block_row(session, one) for one in run.objective.frozen(block)]
    return [FrozenSnapshot(block=row.block, version=row.version, hash=row.head_hash) for row in heads]
