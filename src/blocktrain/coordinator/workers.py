"""Workers as people see them: standing, verdicts with reasons, contributions; and what an operator may do.

Contribution is counted where work went into a snapshot, and nowhere else; the export is signed by the
coordinator's key, so that it can be shown elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import ban, standing_of
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import WAITING, AssignmentState, UpdateState, change
from blocktrain.coordinator.storage.queries import block_row, live_since
from blocktrain.coordinator.storage.store import AssignmentRow, BanRow, UpdateRow, WorkerRow, message_of
from blocktrain.coordinator.verdicts import settle
from blocktrain.validation.reputation import Standing, reputation, uptime
from blocktrain.validation.ruling import Ruling
from blocktrain.wire.hashing import canonical_json
from blocktrain.wire.messages import (
    CONTRIBUTIONS_CONTEXT,
    BanRequest,
    BanState,
    ContributionsAnswer,
    ErrorReason,
    OperatorAnswer,
    Receipt,
    VerdictReason,
    VerdictRecord,
    VerdictsAnswer,
    WorkerAnswer,
    WorkersAnswer,
    WorkerSummary,
)

SHOWN_WORKERS = 1000
SHOWN_VERDICTS = 100


@dataclass(frozen=True)
class Credit:
    merged: int
    weight: float
    """Sum of the age weights of the merged updates."""
    gain: float
    """Sum of their gains, as the judge found them, in nats per token."""


def _credits(session: Session, worker_id: str | None = None) -> dict[str, Credit]:
    """What went into snapshots, by worker."""
    query = select(
        UpdateRow.worker_id,
        func.count(),
        func.sum(UpdateRow.weight),
        func.coalesce(func.sum(UpdateRow.gain), 0.0),
    ).where(UpdateRow.state == UpdateState.MERGED)  # what was accepted and then left out earns nothing
    if worker_id is not None:
        query = query.where(UpdateRow.worker_id == worker_id)
    rows = session.execute(query.group_by(UpdateRow.worker_id))
    return {name: Credit(count, float(weight or 0), float(gain or 0)) for name, count, weight, gain in rows}


def _bans(session: Session, now: float, worker_id: str | None = None) -> dict[str, BanState]:
    """The bans in force, by worker."""
    query = select(BanRow).where(BanRow.until > now)
    if worker_id is not None:
        query = query.where(BanRow.worker_id == worker_id)
    return {row.worker_id: BanState(reason=row.reason, until=row.until) for row in session.scalars(query)}


class Workers:
    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    # --- reading ---

    def workers(self) -> WorkersAnswer:
        """The most useful first."""
        now = self._resources.clock()
        with self._resources.store.read() as session:
            rows = session.scalars(
                select(WorkerRow).order_by(WorkerRow.last_seen.desc()).limit(SHOWN_WORKERS)
            ).all()
            credits, bans = _credits(session), _bans(session, now)
            found = [self._summary(row, credits, bans, now) for row in rows]
        return WorkersAnswer(
            workers=tuple(sorted(found, key=lambda one: -one.merged_weight)),
            judged=self._resources.run.recipe.trust.judge != "off",
            newcomer_reputation=reputation(Standing(), 0.0),
        )

    def worker(self, worker_id: str) -> WorkerAnswer:
        now = self._resources.clock()
        with self._resources.store.read() as session:
            row = self._row(session, worker_id)
            verdicts = session.scalars(
                select(UpdateRow)
                .where(UpdateRow.worker_id == worker_id, UpdateRow.revealed.is_not(None))
                .order_by(UpdateRow.commit_sequence.desc())
                .limit(SHOWN_VERDICTS)
            )
            return WorkerAnswer(
                worker=self._summary(row, _credits(session, worker_id), _bans(session, now, worker_id), now),
                verdicts=tuple(map(_record, verdicts)),
            )

    def verdicts(self) -> VerdictsAnswer:
        """The latest of all workers, the last one first."""
        with self._resources.store.read() as session:
            rows = session.scalars(
                select(UpdateRow)
                .where(UpdateRow.verdict_sequence.is_not(None))
                .order_by(UpdateRow.verdict_sequence.desc())
                .limit(SHOWN_VERDICTS)
            )
            return VerdictsAnswer(verdicts=tuple(map(_record, rows)))

    def _row(self, session: Session, worker_id: str, *, lock: bool = False) -> WorkerRow:
        row = session.get(WorkerRow, worker_id, with_for_update=lock or None)
        if row is None:
            raise Refusal(ErrorReason.NOT_FOUND, f"no worker {worker_id} in this run")
        return row

    def _summary(
        self, row: WorkerRow, credits: Mapping[str, Credit], bans: Mapping[str, BanState], now: float
    ) -> WorkerSummary:
        # Reputation is computed here, not stored: uptime depends on the moment one asks.
        standing, known = standing_of(row), now - row.joined
        credit = credits.get(row.worker_id, Credit(0, 0.0, 0.0))
        return message_of(
            WorkerSummary,
            row,
            live=row.last_seen > live_since(now, self._resources.run.swarm),
            probation=self._resources.run.recipe.trust.judge != "off" and not row.established,
            ban=bans.get(row.worker_id),
            reputation=reputation(standing, known),
            rating=standing.rating,
            assigned_versus_other=standing.average,
            uptime=uptime(standing, known),
            good_verdicts=standing.good_verdicts,
            verdicts=standing.verdicts,
            merged=credit.merged,
            merged_weight=credit.weight,
            gain=credit.gain,
            tokens=credit.merged * self._resources.run.tokens_per_update,
        )

    def contributions(self) -> ContributionsAnswer:
        now, run = self._resources.clock(), self._resources.run
        tokens = run.tokens_per_update
        with self._resources.store.read() as session:
            columns = select(WorkerRow.worker_id, WorkerRow.public_key)
            keys = {row.worker_id: row.public_key for row in session.execute(columns)}
            workers = [
                {
                    "worker_id": worker_id,
                    "public_key": keys.get(worker_id),
                    "merged": credit.merged,
                    "merged_weight": credit.weight,
                    "tokens": credit.merged * tokens,
                    "gain": credit.gain,
                }
                for worker_id, credit in sorted(_credits(session).items())
            ]
        statement = {"run_id": run.run_id, "time": now, "workers": workers}
        return ContributionsAnswer(
            statement=statement,
            signature=self._resources.ledger.sign(CONTRIBUTIONS_CONTEXT + canonical_json(statement)).hex(),
        )

    # --- the operator ---

    def ban(self, worker_id: str, request: BanRequest) -> OperatorAnswer:
        """Ban a worker, which also takes back what it has waiting for a merge; 0 seconds lift a ban."""
        now = self._resources.clock()
        with self._resources.store.write() as session:
            # A ban also holds for an id that never joined: an operator may know it from another run.
            row = session.get(WorkerRow, worker_id, with_for_update=True)
            if request.seconds:  # 0 lifts a ban, and leaves the worker's updates and its seat alone
                self._take_back(session, worker_id, row, request.reason, now)
                if row is not None:
                    row.block = None
            receipt = ban(session, self._resources.ledger, worker_id, request.reason, request.seconds, now)
        self._resources.changes.notify()
        return OperatorAnswer(receipt=receipt)

    def remove(self, worker_id: str) -> OperatorAnswer:
        """Forget a worker: its leases are free, and it must join, and be judged, as a newcomer."""
        now = self._resources.clock()
        with self._resources.store.write() as session:
            row = self._row(session, worker_id, lock=True)
            self._take_back(session, worker_id, row, "removed by the operator", now)
            leases = session.scalars(
                select(AssignmentRow).where(
                    AssignmentRow.worker_id == worker_id, AssignmentRow.state == AssignmentState.LEASED
                )
            )
            # Its updates stay: they are in the ledger, and what was merged is in the snapshots.
            for lease in leases.all():
                change(lease, AssignmentState.RETURNED)
            session.delete(row)
            receipt: Receipt = self._resources.ledger.append(session, now, "remove", {"worker_id": worker_id})
        self._resources.changes.notify()
        return OperatorAnswer(receipt=receipt)

    def _take_back(
        self, session: Session, worker_id: str, worker: WorkerRow | None, reason: str, now: float
    ) -> None:
        """Refuse what the worker has waiting for a judge or a merge; a merge under way keeps its inputs."""
        waiting = (
            UpdateRow.worker_id == worker_id,
            UpdateRow.state.in_((UpdateState.JUDGING, *WAITING)),
            UpdateRow.merge_version.is_(None),
        )
        # Blocks first, in order: a merge that begins meanwhile fixes its inputs under the same lock.
        for block in sorted(set(session.scalars(select(UpdateRow.block).where(*waiting)))):
            block_row(session, block, lock=True)
        rows = session.scalars(select(UpdateRow).where(*waiting).execution_options(populate_existing=True))
        for row in rows.all():
            # No mark: the operator's decision is about the worker, not about this update.
            ruling = Ruling.refuse(VerdictReason.REMOVED, reason, mark=None)
            settle(self._resources, session, worker, row, ruling, now)


def _record(row: UpdateRow) -> VerdictRecord:
    evidence = None if row.evidence is None else json.loads(row.evidence)
    return message_of(VerdictRecord, row, evidence=evidence)
