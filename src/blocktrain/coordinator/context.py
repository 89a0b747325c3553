"""What the parts of the service share, and the reads that more than one of them needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.decisions.deadlines import (
    HISTORY_ARRIVALS,
    Deadline,
    Lateness,
    round_deadline,
    round_seconds,
    wanted_updates,
)
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import refuse_banned, seen, standing_of
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.blobs import Blobs
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import AssignmentRow, BlockRow, RunRow, Store, UpdateRow, WorkerRow
from blocktrain.coordinator.storage.weights import WeightCache
from blocktrain.wire.messages import ErrorReason, FrozenSnapshot, RoundState

_frozen: TypeAdapter[tuple[FrozenSnapshot, ...]] = TypeAdapter(tuple[FrozenSnapshot, ...])


def frozen_of(row: AssignmentRow) -> tuple[FrozenSnapshot, ...]:
    """The snapshots of other blocks that an assignment named when it was lent."""
    return _frozen.validate_json(row.frozen)


class Changes:
    """Wakes threads that wait for something to be written; a change between two waits is not missed."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def notify(self) -> None:
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait(self, seen: int, seconds: float) -> None:
        """Until there are more changes than were `seen`, or the time is over."""
        with self._condition:
            self._condition.wait_for(lambda: self._count > seen, seconds)


@dataclass(frozen=True)
class Context:
    run: Run
    store: Store
    blobs: Blobs
    ledger: Ledger
    weights: WeightCache
    clock: Callable[[], float]
    changes: Changes = field(default_factory=Changes)
    secret: bytes = bytes(32)
    """Known to the coordinator's key only: draws evidence, chooses what sketches look at."""

    @property
    def judged(self) -> bool:
        return self.run.recipe.trust.judge != "off"

    def lock_run(self, session: Session) -> None:
        """For a transaction that makes a row which two processes could make at once."""
        session.get(RunRow, 1, with_for_update=True, populate_existing=True)

    def worker(self, session: Session, worker_id: str, now: float) -> WorkerRow:
        """The worker, locked, and seen alive."""
        row = session.get(WorkerRow, worker_id, with_for_update=True, populate_existing=True)
        if row is None:
            raise Refusal(
                ErrorReason.NOT_JOINED,
                f"worker {worker_id} has not joined run {self.run.run_id[:12]}",
                "POST /v1/join first",
            )
        refuse_banned(session, worker_id, now)
        seen(row, now)
        return row

    def block(self, session: Session, block: int, *, lock: bool = False) -> BlockRow:
        row = session.get(BlockRow, block, with_for_update=lock or None, populate_existing=True)
        if row is None:
            count = len(self.run.layouts)
            raise Refusal(ErrorReason.NOT_FOUND, f"no block {block}; this run has 0 to {count - 1}")
        return row

    def frozen(self, session: Session, block: int, round_: int) -> list[FrozenSnapshot]:
        """The heads of the blocks that the objective needs for training `block` in this round."""
        heads = [self.block(session, one) for one in self.run.objective.upstream(block)]
        return [FrozenSnapshot(block=row.block, version=row.version, hash=row.head_hash) for row in heads]

    def seats(self, session: Session, now: float, *, without: str | None = None) -> dict[int, int]:
        """Live workers on each block."""
        rows = session.execute(
            select(WorkerRow.block, func.count())
            .where(
                WorkerRow.block.is_not(None),
                WorkerRow.last_seen > now - self.run.swarm.lease_seconds,
                WorkerRow.worker_id != (without or ""),
            )
            .group_by(WorkerRow.block)
        )
        return {block: count for block, count in rows if block is not None}

    def round(self, session: Session, row: BlockRow, seats: int, now: float) -> tuple[RoundState, Deadline]:
        """The open round of a block, with its deadline and the sentence for it."""
        on_time, late = self._pending(session, row)
        moved = self._moved(session, row, now)
        judging = refused = extra = 0
        if self.judged:
            judging = self._judging(session, row)
            established = self._established(session, row, now)
            refused = self._refused(session, row, established)
            extra = self._extra(session, row, established)
            moved = 0 if established else moved  # `extra` has them
            seats = len(established) or seats
        deadline = round_deadline(
            row.begun,
            now,
            on_time + late + judging,
            self._offsets(session, row, earlier=True),
            self._offsets(session, row, earlier=False),
            self.run.swarm,
        )
        state = RoundState(
            round=row.version,
            begun=row.begun,
            deadline=deadline.at,
            deadline_reason=deadline.reason,
            accepted=on_time,
            late=late,
            wanted=max(1, wanted_updates(seats, moved, self.run.swarm) - refused) + extra,
            workers=seats,
            merging=row.closing_version is not None,
        )
        return state, deadline

    def _pending(self, session: Session, row: BlockRow) -> tuple[int, int]:
        """Updates that wait for the next merge: from how many workers on time, and how many late."""
        counts = session.execute(
            select(UpdateRow.state, func.count(func.distinct(UpdateRow.worker_id)))
            .where(
                UpdateRow.block == row.block,
                UpdateRow.state.in_(("accepted", "late")),
                UpdateRow.merge_version.is_(None),
            )
            .group_by(UpdateRow.state)
        )
        found = {"accepted": 0, "late": 0}
        for state, count in counts:
            found[state] = count
        return found["accepted"], found["late"]

    def _moved(self, session: Session, row: BlockRow, now: float) -> int:
        """Workers whose update on the head waits for the merge while they are elsewhere, or gone."""
        query = (
            select(func.count(func.distinct(UpdateRow.worker_id)))
            .join(WorkerRow, WorkerRow.worker_id == UpdateRow.worker_id)
            .where(
                UpdateRow.block == row.block,
                UpdateRow.state == "accepted",
                UpdateRow.merge_version.is_(None),
                or_(
                    WorkerRow.block.is_(None),
                    WorkerRow.block != row.block,
                    WorkerRow.last_seen <= now - self.run.swarm.lease_seconds,
                ),
            )
        )
        return session.scalar(query) or 0

    def _judging(self, session: Session, row: BlockRow) -> int:
        count = select(func.count()).where(UpdateRow.block == row.block, UpdateRow.state == "judging")
        return session.scalar(count) or 0

    def _established(self, session: Session, row: BlockRow, now: float) -> list[str]:
        """Live workers on the block that were off probation when its round began. Where there are any, a
        round waits for these, so that a crowd of newcomers can neither hold it up nor close it early; nor can
        who has just been established close it alone, before its equals have delivered."""
        rows = session.scalars(
            select(WorkerRow).where(
                WorkerRow.block == row.block,
                WorkerRow.established.is_(True),
                WorkerRow.last_seen > now - self.run.swarm.lease_seconds,
            )
        ).all()
        counted = set(
            session.scalars(
                select(UpdateRow.worker_id).where(
                    UpdateRow.block == row.block,
                    UpdateRow.base_version == row.version,
                    UpdateRow.state.in_(("accepted", "late")),
                )
            )
        )
        needed = self.run.recipe.trust.probation_verdicts
        return [
            one.worker_id
            for one in rows
            if standing_of(one).good_verdicts - (one.worker_id in counted) >= needed
        ]

    def _extra(self, session: Session, row: BlockRow, established: list[str]) -> int:
        """Workers whose update counts though nobody waits for them: they do not stand in for who is."""
        if not established:
            return 0
        query = select(func.count(func.distinct(UpdateRow.worker_id))).where(
            UpdateRow.block == row.block,
            UpdateRow.state == "accepted",
            UpdateRow.merge_version.is_(None),
            UpdateRow.worker_id.not_in(established),
        )
        return session.scalar(query) or 0

    def _refused(self, session: Session, row: BlockRow, established: list[str]) -> int:
        """Workers that delivered on the head and were refused: they are no longer waited for."""
        query = select(func.count(func.distinct(UpdateRow.worker_id))).where(
            UpdateRow.block == row.block,
            UpdateRow.state == "refused",
            UpdateRow.base_version == row.version,
        )
        if established:
            query = query.where(UpdateRow.worker_id.in_(established))
        return session.scalar(query) or 0

    def waits_for_judge(self, session: Session, block: int, deadline: Deadline, now: float) -> bool:
        """Whether something that arrived in time still has no verdict, and may get one soon."""
        arrived = UpdateRow.revealed > now - self.run.recipe.trust.judge_patience_seconds
        if deadline.at is not None:
            arrived &= UpdateRow.revealed <= deadline.at
        waiting = select(UpdateRow.update_id).where(
            UpdateRow.block == block, UpdateRow.state == "judging", arrived
        )
        return session.scalars(waiting.limit(1)).first() is not None

    def write_verdict(
        self, session: Session, row: UpdateRow, decision: Lateness, now: float, more: dict[str, Any]
    ) -> None:
        """Into the row and the ledger."""
        row.state, row.weight = str(decision.outcome), decision.weight
        row.reason, row.sentence = str(decision.reason), decision.sentence
        verdict = {
            "update_id": row.update_id,
            "outcome": row.state,
            "weight": row.weight,
            "reason": row.reason,
            "sentence": row.sentence,
            "norm": row.norm,
        }
        row.verdict_sequence = self.ledger.append(session, now, "verdict", {**verdict, **more}).sequence

    def round_seconds(self, session: Session, row: BlockRow) -> float | None:
        """Length of the block's next round; None where nothing has been observed."""
        history = self._offsets(session, row, earlier=True)
        return round_seconds(history, (), self.run.swarm)[0] if history else None

    def own_seconds(self, session: Session, block: int, worker_id: str) -> float | None:
        """From the beginning of a round to this worker's update, as it was last time."""
        return session.scalar(
            select(UpdateRow.offset)
            .where(UpdateRow.block == block, UpdateRow.worker_id == worker_id, UpdateRow.offset.is_not(None))
            .order_by(UpdateRow.revealed.desc())
            .limit(1)
        )

    def _offsets(self, session: Session, row: BlockRow, *, earlier: bool) -> list[float]:
        of_round = UpdateRow.base_version < row.version if earlier else UpdateRow.base_version == row.version
        rows = session.scalars(
            select(UpdateRow.offset)
            .where(UpdateRow.block == row.block, UpdateRow.offset.is_not(None), of_round)
            .order_by(UpdateRow.revealed.desc())
            .limit(HISTORY_ARRIVALS)
        )
        return [offset for offset in rows if offset is not None]
