"""Joining, asking, heartbeats and handing back: one transaction each around `next_assignment`."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.admission import Door
from blocktrain.coordinator.context import Context, frozen_of
from blocktrain.coordinator.decisions.deadlines import lateness, stand_in_steps
from blocktrain.coordinator.decisions.scheduling import (
    BlockView,
    Done,
    Offer,
    Pause,
    WorkerView,
    next_assignment,
)
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import refuse_banned, seen, withheld
from blocktrain.coordinator.storage.ledger import receipt_of
from blocktrain.coordinator.storage.store import LIVE_STATES, AssignmentRow, BlockRow, UpdateRow, WorkerRow
from blocktrain.wire.hashing import canonical_json
from blocktrain.wire.identity import WorkerId
from blocktrain.wire.messages import (
    Account,
    Assignment,
    AssignmentRequest,
    ErrorReason,
    Finished,
    HeartbeatAnswer,
    HeartbeatRequest,
    JoinAnswer,
    JoinRequest,
    Outcome,
    ReturnAnswer,
    StandIn,
    Wait,
)

HEARTBEATS_PER_LEASE = 3
LEDGER_KEYS = ("assignment_id", "worker_id", "block", "round", "shard", "base_version", "base_hash")
FULL_SECONDS = 30.0
"""How long a worker waits where all seats are taken."""


def _entry(row: AssignmentRow) -> dict[str, Any]:
    """For the ledger, which names frozen snapshots and steps for others only where there are any."""
    body: dict[str, Any] = {key: getattr(row, key) for key in LEDGER_KEYS}
    if row.stand_in_steps:
        body["stand_in"] = {"shard": row.stand_in_shard, "steps": row.stand_in_steps}
    frozen = json.loads(row.frozen)
    return {**body, "frozen": frozen} if frozen else body


def _standing_in(row: AssignmentRow) -> StandIn | None:
    if row.stand_in_shard is None:
        return None
    return StandIn(shard=row.stand_in_shard, steps=row.stand_in_steps)


class Assignments:
    def __init__(self, context: Context, door: Door) -> None:
        self._context, self._door = context, door

    # --- joining ---

    def join(
        self, worker_id: WorkerId, public_key: bytes, request: JoinRequest, address: str | None = None
    ) -> JoinAnswer:
        """Joining again is safe: it updates what the operator sees and returns the first receipt."""
        self._refuse_other_text(request)
        now = self._context.clock()
        self._refuse_stranger(worker_id, request, now)
        with self._context.store.write() as session:
            refuse_banned(session, worker_id, now)
            row = session.get(WorkerRow, worker_id, with_for_update=True)
            if row is None:
                row = self._new_worker(session, worker_id, public_key, request, address, now)
            else:
                seen(row, now)
            row.device, row.memory_bytes, row.last_seen = request.device, request.memory_bytes, now
            row.label = request.label
            row.versions = canonical_json(request.versions).decode()
            return JoinAnswer(worker_id=worker_id, receipt=receipt_of(session, row.join_sequence))

    def _refuse_stranger(self, worker_id: WorkerId, request: JoinRequest, now: float) -> None:
        """A worker that has joined before needs no stamp, invitation or listing again."""
        refusal = self._door.precheck(worker_id, request, now)
        if refusal is None:
            return
        with self._context.store.read() as session:
            if session.get(WorkerRow, worker_id) is None:
                raise refusal

    def _refuse_other_text(self, request: JoinRequest) -> None:
        expected = self._context.run.corpus_sha256
        if request.corpus_sha256 != expected:
            raise Refusal(
                ErrorReason.CORPUS_MISMATCH,
                f"expected text with sha256 {expected}, found {request.corpus_sha256}",
                "load the recipe's corpus in the same version (data.corpus, data.max_bytes)",
            )

    def _new_worker(
        self,
        session: Session,
        worker_id: WorkerId,
        public_key: bytes,
        request: JoinRequest,
        address: str | None,
        now: float,
    ) -> WorkerRow:
        self._context.lock_run(session)  # of two processes that see no row, the second finds the first's
        if (found := session.get(WorkerRow, worker_id)) is not None:
            return found
        network = self._door.enter(session, worker_id, request, address, now)
        body = {"worker_id": worker_id, "public_key": public_key.hex(), "device": request.device}
        receipt = self._context.ledger.append(session, now, "join", body)
        row = WorkerRow(
            worker_id=worker_id,
            public_key=public_key.hex(),
            joined=now,
            join_sequence=receipt.sequence,
            account=Account().model_dump_json(),
            address=network,
            accepted=0,
            late=0,
            refused=0,
            standing="{}",
            established=False,
        )
        session.add(row)
        return row

    # --- asking ---

    def ask(self, worker_id: WorkerId, request: AssignmentRequest) -> Assignment | Wait | Finished:
        now = self._context.clock()
        with self._context.store.write() as session:
            worker = self._context.worker(session, worker_id, now)
            after = self._after(session, worker_id, request)
            if after is None:
                self._release_withheld(session, worker, now)
            if self._context.judged:
                self._free_refused(session, worker_id, now)
            open_ = self._open(session, worker_id, after)
            if open_ is not None:
                worker.block = open_.block
                return self._message(session, open_, now)
            return self._decide(session, worker, request, now)

    def _after(
        self, session: Session, worker_id: WorkerId, request: AssignmentRequest
    ) -> AssignmentRow | None:
        return None if request.after is None else self.own(session, worker_id, request.after)

    def _open(
        self, session: Session, worker_id: WorkerId, after: AssignmentRow | None
    ) -> AssignmentRow | None:
        """A lease the worker already has, made after the one in hand, whose round has not passed."""
        rows = session.execute(
            select(AssignmentRow, BlockRow.version)
            .join(BlockRow, BlockRow.block == AssignmentRow.block)
            .where(AssignmentRow.worker_id == worker_id, AssignmentRow.state == "leased")
            .order_by(AssignmentRow.made, AssignmentRow.round)
        )
        for row, version in rows:
            later = after is None or (row.made, row.round) > (after.made, after.round)
            if later and row.round >= version:
                return row
        return None

    def _free_refused(self, session: Session, worker_id: str, now: float) -> None:
        """A round that passed its deadline with nothing to merge may be tried again by who was refused."""
        rows = session.execute(
            select(AssignmentRow, UpdateRow.revealed)
            .join(UpdateRow, UpdateRow.assignment_id == AssignmentRow.assignment_id)
            .join(BlockRow, BlockRow.block == AssignmentRow.block)
            .where(
                AssignmentRow.worker_id == worker_id,
                AssignmentRow.state == "committed",
                UpdateRow.state == "refused",
                AssignmentRow.round >= BlockRow.version,
            )
        )
        for assignment, revealed in rows.all():
            if self._is_freed(session, assignment.block, revealed, now):
                assignment.state = "refused"
        session.flush()

    def _runs_ahead_of_refusal(
        self, session: Session, row: AssignmentRow, block: BlockRow, now: float
    ) -> bool:
        """Whether the worker waits for a version that only its own second try can bring."""
        if row.round <= block.version or row.state != "leased":
            return False
        refused = session.scalars(
            select(UpdateRow).where(
                UpdateRow.worker_id == row.worker_id,
                UpdateRow.block == row.block,
                UpdateRow.round == block.version,
                UpdateRow.state == "refused",
            )
        )
        return any(self._is_freed(session, row.block, update.revealed, now) for update in refused.all())

    def _is_freed(self, session: Session, block: int, revealed: float | None, now: float) -> bool:
        row = self._context.block(session, block)
        seats = self._context.seats(session, now).get(block, 0)
        _, deadline = self._context.round(session, row, seats, now)
        return revealed is not None and deadline.since is not None and revealed < deadline.since

    def _release_withheld(self, session: Session, worker: WorkerRow, now: float) -> None:
        """A worker that asks with nothing in hand has lost what it committed: its round is free again."""
        rows = session.scalars(
            select(UpdateRow).where(UpdateRow.worker_id == worker.worker_id, UpdateRow.state == "committed")
        )
        for update in rows.all():
            update.state = "withheld"
            withheld(worker)
            assignment = session.get(AssignmentRow, update.assignment_id)
            assert assignment is not None
            assignment.state = "withheld"
            self._record_return(session, assignment, now)

    def _decide(
        self, session: Session, worker: WorkerRow, request: AssignmentRequest, now: float
    ) -> Assignment | Wait | Finished:
        """Decide on unlocked rows, lock the chosen block, and decide again if it moved meanwhile."""
        swarm = self._context.run.swarm
        while True:
            blocks = session.scalars(
                select(BlockRow).order_by(BlockRow.block).execution_options(populate_existing=True)
            ).all()
            decision = next_assignment(
                self._worker_view(worker, request, now),
                self._block_views(session, worker, blocks, now),
                swarm,
            )
            if isinstance(decision, Done) and any(block.version < swarm.rounds for block in blocks):
                return Wait(
                    seconds=FULL_SECONDS, reason="every block that still trains has all its seats taken"
                )
            if isinstance(decision, Done):
                return Finished(reason=decision.reason)
            if isinstance(decision, Pause):
                return Wait(seconds=decision.seconds, reason=decision.reason)
            version = blocks[decision.block].version
            block = self._context.block(session, decision.block, lock=True)
            if block.version == version:
                return self._lend(session, worker, block, decision, now)

    def _worker_view(self, worker: WorkerRow, request: AssignmentRequest, now: float) -> WorkerView:
        return WorkerView(
            current_block=worker.block,
            holding={int(block): version for block, version in request.holding.items()},
            prefer_block=request.prefer_block,
            memory_bytes=worker.memory_bytes,
        )

    def _block_views(
        self, session: Session, worker: WorkerRow, blocks: Sequence[BlockRow], now: float
    ) -> list[BlockView]:
        seats = self._context.seats(session, now, without=worker.worker_id)
        full = self._context.run.recipe.trust.max_workers_per_block
        used = self._used_rounds(session, worker.worker_id)
        return [
            BlockView(
                block=row.block,
                version=row.version,
                seats=seats.get(row.block, 0),
                used_rounds=frozenset(used.get(row.block, ())),
                num_parameters=self._context.run.schemas[row.block].num_values,
            )
            for row in blocks
            if row.block == worker.block or seats.get(row.block, 0) < full
        ]

    def _used_rounds(self, session: Session, worker_id: str) -> dict[int, set[int]]:
        rows = session.execute(
            select(AssignmentRow.block, AssignmentRow.round)
            .join(BlockRow, BlockRow.block == AssignmentRow.block)
            .where(
                AssignmentRow.worker_id == worker_id,
                AssignmentRow.state.in_(LIVE_STATES),
                AssignmentRow.round >= BlockRow.version,
            )
        )
        used: dict[int, set[int]] = {}
        for block, round_ in rows:
            used.setdefault(block, set()).add(round_)
        return used

    def _lend(
        self, session: Session, worker: WorkerRow, block: BlockRow, offer: Offer, now: float
    ) -> Assignment:
        if offer.round == block.version and self._nobody_at_work(session, worker, block, now):
            block.begun = now
        frozen = self._context.frozen(session, offer.block, offer.round)
        shard, other = itertools.islice(self._free_shards(session, worker, offer), 2)
        standing_in = self._stand_in(session, worker, block, offer, now)
        row = AssignmentRow(
            assignment_id=secrets.token_hex(16),
            worker_id=worker.worker_id,
            block=offer.block,
            round=offer.round,
            shard=shard,
            stand_in_shard=other if standing_in else None,
            stand_in_steps=standing_in,
            base_version=block.version,
            base_hash=block.head_hash,
            made=now,
            reason=offer.reason,
            state="leased",
            frozen=canonical_json([one.model_dump() for one in frozen]).decode(),
        )
        session.add(row)
        worker.block, worker.step = offer.block, 0
        self._context.ledger.append(session, now, "assign", _entry(row))
        return self._message(session, row, now)

    def _nobody_at_work(self, session: Session, worker: WorkerRow, block: BlockRow, now: float) -> bool:
        """The clock of a round starts with its first worker, and again where all others have gone."""
        if block.begun is None:
            return True
        others = self._context.seats(session, now, without=worker.worker_id).get(block.block, 0)
        state, _ = self._context.round(session, block, others, now)
        return not others and not state.accepted and not state.late

    def _stand_in(
        self, session: Session, worker: WorkerRow, block: BlockRow, offer: Offer, now: float
    ) -> int:
        """Steps for a replica that is away: of the open round in the time it has left, of the next in all."""
        others = self._context.seats(session, now, without=worker.worker_id).get(block.block, 0)
        state, deadline = self._context.round(session, block, others, now)
        left = self._context.round_seconds(session, block)
        if offer.round == block.version:
            others += state.accepted
            left = left if deadline.at is None else deadline.at - now
        missing = self._context.run.swarm.replicas - 1 - others
        own = self._context.own_seconds(session, block.block, worker.worker_id)
        return stand_in_steps(missing, left, own, self._context.run.swarm)

    def _free_shards(self, session: Session, worker: WorkerRow, offer: Offer) -> Iterator[int]:
        """block, block + B, block + 2B, …: those that no live assignment of the round has.

        No two blocks or replicas share text, and the first worker of a round sees the local loop's batches.
        A worker that was refused trains the round again on other text: the same would give the same update.
        """
        rows = session.execute(
            select(AssignmentRow.shard, AssignmentRow.stand_in_shard).where(
                AssignmentRow.block == offer.block,
                AssignmentRow.round == offer.round,
                or_(
                    AssignmentRow.state.in_(LIVE_STATES),
                    and_(AssignmentRow.state == "refused", AssignmentRow.worker_id == worker.worker_id),
                ),
            )
        )
        taken = {shard for row in rows for shard in row}
        shards = itertools.count(offer.block, len(self._context.run.layouts))
        return (shard for shard in shards if shard not in taken)

    def _message(self, session: Session, row: AssignmentRow, now: float) -> Assignment:
        swarm = self._context.run.swarm
        block = self._context.block(session, row.block)
        seats = self._context.seats(session, now).get(row.block, 0)
        state, _ = self._context.round(session, block, seats, now)
        return Assignment(
            assignment_id=row.assignment_id,
            block=row.block,
            round=row.round,
            base_version=block.version,
            base_hash=block.head_hash,
            shard=row.shard,
            first_step=row.round * swarm.steps_per_round,
            steps=swarm.steps_per_round + row.stand_in_steps,
            total_steps=swarm.total_steps,
            deadline=state.deadline if row.round == block.version else None,
            deadline_reason=state.deadline_reason,
            lease_seconds=swarm.lease_seconds,
            heartbeat_seconds=swarm.lease_seconds / HEARTBEATS_PER_LEASE,
            server_time=now,
            reason=row.reason,
            frozen=frozen_of(row),
            stand_in=_standing_in(row),
        )

    # --- while it trains ---

    def heartbeat(
        self, worker_id: WorkerId, assignment_id: str, request: HeartbeatRequest
    ) -> HeartbeatAnswer:
        now = self._context.clock()
        with self._context.store.write() as session:
            worker = self._context.worker(session, worker_id, now)
            row = self.own(session, worker_id, assignment_id)
            block = self._context.block(session, row.block)
            if row.state in LIVE_STATES:
                worker.block, worker.step, worker.loss = row.block, request.step, request.loss
            seats = self._context.seats(session, now).get(row.block, 0)
            state, _ = self._context.round(session, block, seats, now)
            cancel, reason = self._cancelled(row, block)
            if not cancel and self._context.judged and self._runs_ahead_of_refusal(session, row, block, now):
                cancel, reason = True, f"the update for round {block.version} was refused: train that again"
                row.state = "returned"
                self._record_return(session, row, now)
            return HeartbeatAnswer(
                cancel=cancel,
                reason=reason,
                head_version=block.version,
                head_hash=block.head_hash,
                deadline=state.deadline,
                deadline_reason=state.deadline_reason,
                server_time=now,
            )

    def _cancelled(self, row: AssignmentRow, block: BlockRow) -> tuple[bool, str]:
        swarm = self._context.run.swarm
        if row.state not in LIVE_STATES:
            return True, f"the assignment was {row.state}"
        if block.version >= swarm.rounds:
            return True, "the block has had all its rounds"
        late = lateness(block.version - row.round, swarm)
        return late.outcome == Outcome.REFUSED, late.sentence

    def hand_back(self, worker_id: WorkerId, assignment_id: str) -> ReturnAnswer:
        now = self._context.clock()
        with self._context.store.write() as session:
            worker = self._context.worker(session, worker_id, now)
            row = self.own(session, worker_id, assignment_id)
            if row.state != "leased":
                return ReturnAnswer(returned=False)
            row.state = "returned"
            session.flush()
            if self._open(session, worker_id, None) is None:
                worker.block = None
            self._record_return(session, row, now)
        self._context.changes.notify()
        return ReturnAnswer(returned=True)

    def _record_return(self, session: Session, row: AssignmentRow, now: float) -> None:
        body = {"assignment_id": row.assignment_id, "worker_id": row.worker_id, "state": row.state}
        self._context.ledger.append(session, now, "return", body)

    def own(self, session: Session, worker_id: WorkerId, assignment_id: str) -> AssignmentRow:
        row = session.get(AssignmentRow, assignment_id, with_for_update=True, populate_existing=True)
        if row is None:
            raise Refusal(
                ErrorReason.NOT_FOUND, f"no assignment {assignment_id}", "ask for one: POST /v1/assignments"
            )
        if row.worker_id != worker_id:
            raise Refusal(ErrorReason.NOT_YOURS, f"assignment {assignment_id} is another worker's")
        return row
