"""What the parts of the service share, and the reads that more than one of them needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.blobs import Blobs
from blocktrain.coordinator.deadlines import (
    HISTORY_ARRIVALS,
    Deadline,
    round_deadline,
    wanted_updates,
)
from blocktrain.coordinator.ledger import Ledger
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.store import BlockRow, RunRow, Store, UpdateRow, WorkerRow
from blocktrain.coordinator.weights import WeightCache
from blocktrain.wire.messages import ErrorReason, RoundState


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
        row.last_seen = max(row.last_seen, now)
        return row

    def block(self, session: Session, block: int, *, lock: bool = False) -> BlockRow:
        row = session.get(BlockRow, block, with_for_update=lock or None, populate_existing=True)
        if row is None:
            count = len(self.run.layouts)
            raise Refusal(ErrorReason.NOT_FOUND, f"no block {block}; this run has 0 to {count - 1}")
        return row

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
        deadline = round_deadline(
            row.begun,
            now,
            on_time + late,
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
            wanted=wanted_updates(seats, self.run.swarm),
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

    def _offsets(self, session: Session, row: BlockRow, *, earlier: bool) -> list[float]:
        of_round = UpdateRow.base_version < row.version if earlier else UpdateRow.base_version == row.version
        rows = session.scalars(
            select(UpdateRow.offset)
            .where(UpdateRow.block == row.block, UpdateRow.offset.is_not(None), of_round)
            .order_by(UpdateRow.revealed.desc())
            .limit(HISTORY_ARRIVALS)
        )
        return [offset for offset in rows if offset is not None]
