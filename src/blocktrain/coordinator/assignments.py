"""Joining, asking, heartbeats and handing back, one transaction each; `next_assignment` chooses the work."""

from __future__ import annotations

import itertools
from dataclasses import replace

from sqlalchemy import BindParameter, bindparam, case, func, select
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from blocktrain.coordinator.admission import Admission
from blocktrain.coordinator.decisions.rounds import (
    OpenRound,
    RoundClock,
    extra_steps,
    round_clock,
    starts_clock,
)
from blocktrain.coordinator.decisions.scheduling import (
    BlockView,
    Done,
    Offer,
    Pause,
    WorkerView,
    next_assignment,
    pause_after_giving_up,
)
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import (
    keep_or_ban,
    keep_standing,
    present_worker,
    refuse_banned,
    seen,
    standing_of,
)
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import COUNTED, LIVE, AssignmentState, UpdateState, change
from blocktrain.coordinator.storage.ledger import receipt_of
from blocktrain.coordinator.storage.queries import (
    block_row,
    frozen_heads,
    frozen_of,
    given_up,
    lock_run,
    seats,
)
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    Prepared,
    UpdateRow,
    WorkerRow,
    message_of,
)
from blocktrain.validation.reputation import SILENCE_GRACE_SECONDS, after_giving_up, after_withholding
from blocktrain.validation.ruling import age_ruling
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
    ReturnAnswer,
    StandIn,
    Wait,
)

HEARTBEATS_PER_LEASE = 3  # one may be lost, and the next be late
# The lowest version is there for the index: it keeps the search to the worker's last rounds.
_WORKER: BindParameter[str] = bindparam("worker")
_BLOCK: BindParameter[int] = bindparam("block")
_ROUND: BindParameter[int] = bindparam("round")
_LOWEST = select(func.min(BlockRow.version)).scalar_subquery()
_IN_OPEN_ROUNDS = (
    AssignmentRow.worker_id == _WORKER,
    AssignmentRow.round >= _LOWEST,
    AssignmentRow.round >= BlockRow.version,
)
_WITHHELD = Prepared(
    select(UpdateRow.update_id).where(
        UpdateRow.worker_id == _WORKER, UpdateRow.state == UpdateState.COMMITTED
    )
)
_REFUSED = Prepared(
    select(AssignmentRow.assignment_id, UpdateRow.revealed, AssignmentRow.block)
    .join(UpdateRow, UpdateRow.assignment_id == AssignmentRow.assignment_id)
    .join(BlockRow, BlockRow.block == AssignmentRow.block)
    .where(
        *_IN_OPEN_ROUNDS,
        AssignmentRow.state == AssignmentState.COMMITTED,
        UpdateRow.state == UpdateState.REFUSED,
    )
)
_PASSED = Prepared(
    select(AssignmentRow.assignment_id)
    .join(BlockRow, BlockRow.block == AssignmentRow.block)
    .where(
        AssignmentRow.worker_id == _WORKER,
        AssignmentRow.state == AssignmentState.LEASED,
        AssignmentRow.round < BlockRow.version,
    )
)
_LEASES = Prepared(
    select(AssignmentRow.assignment_id, AssignmentRow.made, AssignmentRow.round)
    .join(BlockRow, BlockRow.block == AssignmentRow.block)
    .where(*_IN_OPEN_ROUNDS, AssignmentRow.state == AssignmentState.LEASED)
    .order_by(AssignmentRow.made, AssignmentRow.round)
)
_USED_ROUNDS = Prepared(
    select(AssignmentRow.block, AssignmentRow.round)
    .join(BlockRow, BlockRow.block == AssignmentRow.block)
    .where(*_IN_OPEN_ROUNDS, AssignmentRow.state.in_(LIVE))
)
# A worker that was away brings an older round's update on today's head: its one vote on that is given, and a
# commit of this round would be refused as a second one.
_VOTED = Prepared(
    select(UpdateRow.block, UpdateRow.base_version)
    .join(BlockRow, BlockRow.block == UpdateRow.block)
    .where(
        UpdateRow.worker_id == _WORKER,
        UpdateRow.state.in_((UpdateState.COMMITTED, UpdateState.JUDGING, *COUNTED)),
        UpdateRow.base_version >= _LOWEST,
        UpdateRow.base_version >= BlockRow.version,
    )
)
_OWN_SECONDS = Prepared(
    select(UpdateRow.offset)
    .where(UpdateRow.worker_id == _WORKER, UpdateRow.block == _BLOCK, UpdateRow.offset.is_not(None))
    .order_by(UpdateRow.revealed.desc())
    .limit(1)
)
_TAKEN_SHARDS = Prepared(
    select(AssignmentRow.shard, AssignmentRow.stand_in_shard).where(
        AssignmentRow.block == _BLOCK,
        AssignmentRow.round == _ROUND,
        # A worker that was refused trains the round again on other text: the same text would give the same
        # update, and the same refusal (decision 0007). Text that another was refused with is no better: where
        # a whole round was refused, workers got each other's text, and what they sent was refused as copies.
        AssignmentRow.state.in_((*LIVE, AssignmentState.REFUSED)),
    )
)
# Refused, and not lent again yet: then the second try is under way.
_REFUSED_IN_ROUND = Prepared(
    select(UpdateRow.revealed)
    .join(AssignmentRow, AssignmentRow.assignment_id == UpdateRow.assignment_id)
    .where(
        UpdateRow.worker_id == _WORKER,
        UpdateRow.state == UpdateState.REFUSED,
        UpdateRow.base_version >= _ROUND,
        AssignmentRow.block == _BLOCK,
        AssignmentRow.round == _ROUND,
        AssignmentRow.state == AssignmentState.COMMITTED,
    )
)
# Lent again behind what the worker trains ahead: it comes to the second try only without that.
_SECOND_TRY_BEHIND = Prepared(
    select(AssignmentRow.assignment_id)
    .where(
        AssignmentRow.worker_id == _WORKER,
        AssignmentRow.block == _BLOCK,
        AssignmentRow.round == _ROUND,
        AssignmentRow.state == AssignmentState.LEASED,
        AssignmentRow.made > bindparam("made"),
    )
    .limit(1)
)
_HEARD = Prepared(
    select(WorkerRow.worker_id)
    .where(WorkerRow.worker_id == _WORKER, WorkerRow.last_seen > bindparam("since"))
    .with_for_update()
)
_NOW: BindParameter[float] = bindparam("now")
_LATER = case((WorkerRow.last_seen > _NOW, WorkerRow.last_seen), else_=_NOW)
_SEEN = Prepared(sql_update(WorkerRow).where(WorkerRow.worker_id == _WORKER).values(last_seen=_LATER))
_BEAT = Prepared(
    sql_update(WorkerRow)
    .where(WorkerRow.worker_id == _WORKER)
    .values(last_seen=_LATER, block=bindparam("seat"), step=bindparam("at_step"), loss=bindparam("at_loss"))
)
LEDGER_KEYS = ("assignment_id", "worker_id", "block", "round", "shard", "base_version", "base_hash")


class Assignments:
    def __init__(self, resources: Resources, admission: Admission) -> None:
        self._resources, self._admission = resources, admission

    # --- joining ---

    def join(
        self, worker_id: WorkerId, public_key: bytes, request: JoinRequest, address: str | None = None
    ) -> JoinAnswer:
        """Joining again is safe: it updates what the operator sees and returns the first receipt."""
        resources, now = self._resources, self._resources.clock()
        if request.corpus_sha256 != resources.run.corpus_sha256:
            raise Refusal(
                ErrorReason.CORPUS_MISMATCH,
                f"expected text with sha256 {resources.run.corpus_sha256}, found {request.corpus_sha256}",
                "load the recipe's corpus in the same version (data.corpus, data.max_bytes)",
            )
        # A worker that has joined before needs no stamp, invitation or listing again.
        if (refusal := self._admission.precheck(worker_id, request, now)) is not None:
            with resources.store.read() as session:
                if session.get(WorkerRow, worker_id) is None:
                    raise refusal
        with resources.store.write() as session:
            refuse_banned(session, worker_id, now)
            row = session.get(WorkerRow, worker_id, with_for_update=True)
            if row is None:
                lock_run(session)  # of two processes that see no row, the second finds the first's
                row = session.get(WorkerRow, worker_id)
            if row is None:
                network = self._admission.enter(session, worker_id, request, address, now)
                body = {"worker_id": worker_id, "public_key": public_key.hex(), "device": request.device}
                row = WorkerRow(
                    worker_id=worker_id,
                    public_key=public_key.hex(),
                    joined=now,
                    last_seen=now,
                    join_sequence=resources.ledger.append(session, now, "join", body).sequence,
                    account=Account().model_dump_json(),
                    address=network,
                    accepted=0,
                    late=0,
                    refused=0,
                    unused=0,
                    standing="{}",
                    established=False,
                )
                session.add(row)
            seen(row, now)
            row.device, row.memory_bytes, row.label = request.device, request.memory_bytes, request.label
            row.versions = canonical_json(request.versions).decode()
            return JoinAnswer(worker_id=worker_id, receipt=receipt_of(session, row.join_sequence))

    # --- asking ---

    def ask(self, worker_id: WorkerId, request: AssignmentRequest) -> Assignment | Wait | Finished:
        """The worker's next assignment: one it already has, or one that `next_assignment` chooses."""
        now, run, rounds = self._resources.clock(), self._resources.run, self._resources.open_rounds
        # Rows are written where a later query must see them, and at the end: the worker's once, not thrice.
        with self._resources.store.write() as session, session.no_autoflush:
            worker = present_worker(session, worker_id, now)
            after = None if request.after is None else own_assignment(session, worker_id, request.after)

            # A worker that asks with nothing in hand has lost what it committed (a new disk, another folder):
            # its rounds are free again. The first three such commits cost it nothing. Leases of rounds that
            # have passed are lost with it, and end too.
            for (update_id,) in _WITHHELD(session, worker=worker_id) if after is None else ():
                update = session.get_one(UpdateRow, update_id)
                change(update, UpdateState.WITHHELD)
                keep_standing(worker, after_withholding(standing_of(worker)))
                assignment = session.get_one(AssignmentRow, update.assignment_id)
                self._end_assignment(session, assignment, AssignmentState.WITHHELD, now)
                self._mark_giving_up(session, worker, now)
            for (assignment_id,) in _PASSED(session, worker=worker_id) if after is None else ():
                assignment = session.get_one(AssignmentRow, assignment_id)
                self._end_assignment(session, assignment, AssignmentState.RECALLED, now)

            # A round with nothing to merge may be tried again by a worker that it refused, once its deadline
            # has passed or nobody else is at it: the block must not stop (small judged runs did,
            # docs/history, "judged runs that stall").
            for assignment_id, revealed, of_block in _REFUSED(session, worker=worker_id):
                if _may_retry(revealed, rounds.state(session, block_row(session, of_block), now)):
                    change(session.get_one(AssignmentRow, assignment_id), AssignmentState.REFUSED)
            session.flush()

            # A request that was lost on its way back finds the lease that it made.
            if (lease := _open_lease(session, worker_id, after)) is not None:
                worker.block = lease.block
                block = block_row(session, lease.block)
                return self._message(session, lease, block, rounds.clock(session, block, now), now)
            if (pause := pause_after_giving_up(given_up(session, worker_id, now), now)) is not None:
                return Wait(seconds=pause.seconds, reason=pause.reason)
            while True:
                # Decide on unlocked rows, lock the chosen block, and decide again if it moved meanwhile.
                versions = {block: version for block, version, _ in rounds.heads(session)}
                others = seats(session, run.swarm, now, without=worker)
                view = WorkerView(
                    current_block=worker.block,
                    holding={int(block): version for block, version in request.holding.items()},
                    prefer_block=request.prefer_block,
                    memory_bytes=worker.memory_bytes,
                )
                blocks = self._block_views(session, worker, versions, others)
                decision = next_assignment(view, blocks, run.swarm)
                if isinstance(decision, Done):
                    return Finished(reason=decision.reason)
                if isinstance(decision, Pause):
                    return Wait(seconds=decision.seconds, reason=decision.reason)
                block = block_row(session, decision.block, lock=True)
                if block.version == versions[decision.block]:
                    return self.lend(session, worker, block, decision, others.get(decision.block, 0), now)

    def _mark_giving_up(self, session: Session, worker: WorkerRow, now: float) -> None:
        """A bad mark for an assignment that was given up where the worker may give up no more."""
        resources, trust = self._resources, self._resources.run.recipe.trust
        session.flush()
        pause = pause_after_giving_up(given_up(session, worker.worker_id, now), now)
        if pause is not None and trust.judge != "off":
            standing = after_giving_up(standing_of(worker))
            keep_or_ban(session, resources.ledger, worker, standing, trust, pause.reason, now)

    def _end_assignment(
        self, session: Session, row: AssignmentRow, state: AssignmentState, now: float
    ) -> None:
        """End an assignment, and say so in the ledger: its round is open to the worker again."""
        change(row, state)
        body = {"assignment_id": row.assignment_id, "worker_id": row.worker_id, "state": str(state)}
        self._resources.ledger.append(session, now, "return", body)

    def _block_views(
        self, session: Session, worker: WorkerRow, versions: dict[int, int], others: dict[int, int]
    ) -> list[BlockView]:
        """The blocks as this worker's schedule sees them: who else is there, and what it has had itself."""
        run = self._resources.run
        used: dict[int, set[int]] = {block: set() for block in versions}
        name = worker.worker_id
        for block, round_ in _USED_ROUNDS(session, worker=name) + _VOTED(session, worker=name):
            used[block].add(round_)
        return [
            BlockView(
                block=block,
                version=version,
                seats=others.get(block, 0),
                used_rounds=frozenset(used[block]),
                training_bytes=run.training_bytes[block],
                full=others.get(block, 0) >= run.recipe.trust.max_workers_per_block,
            )
            for block, version in versions.items()
        ]

    def lend(
        self, session: Session, worker: WorkerRow, block: BlockRow, offer: Offer, others: int, now: float
    ) -> Assignment:
        """Write the lease down: its text, its frozen snapshots, the steps it takes for an absent replica;
        `others` are the block's other live workers."""
        run, name = self._resources.run, worker.worker_id
        values = {"worker": name, "block": offer.block, "round": offer.round}
        arrivals = self._resources.open_rounds.arrivals(session, block)
        if offer.round == block.version and starts_clock(arrivals, others):
            block.begun = now
            arrivals = replace(arrivals, begun=now)
        clock = round_clock(arrivals, run.swarm, now)
        own_seconds = next((seconds for (seconds,) in _OWN_SECONDS(session, **values)), None)
        extra = extra_steps(arrivals, clock.deadline, others, offer.round, own_seconds, run.swarm, now)

        # Text: the first of shards block, block + B, block + 2B, … that no live assignment of the round has.
        # No two blocks or replicas share text, and the first worker of a round sees the local loop's batches.
        taken = {
            shard for row in _TAKEN_SHARDS(session, block=offer.block, round=offer.round) for shard in row
        }
        shards = itertools.count(offer.block, len(run.layouts))
        shard, extra_shard = itertools.islice((one for one in shards if one not in taken), 2)

        frozen = frozen_heads(session, run, offer.block)
        row = AssignmentRow(
            assignment_id=self._resources.new_id(),
            worker_id=name,
            block=offer.block,
            round=offer.round,
            shard=shard,
            stand_in_shard=extra_shard if extra else None,
            stand_in_steps=extra,
            base_version=block.version,
            base_hash=block.head_hash,
            made=now,
            reason=offer.reason,
            state=AssignmentState.LEASED,
            frozen=canonical_json([one.model_dump() for one in frozen]).decode(),
        )
        session.add(row)
        worker.block, worker.step = offer.block, 0
        # The ledger names frozen snapshots and steps for others only where there are any.
        entry = {key: getattr(row, key) for key in LEDGER_KEYS}
        if extra:
            entry["stand_in"] = {"shard": extra_shard, "steps": extra}
        if frozen:
            entry["frozen"] = [one.model_dump() for one in frozen]
        self._resources.ledger.append(session, now, "assign", entry)
        return self._message(session, row, block, clock, now)

    def _message(
        self, session: Session, row: AssignmentRow, block: BlockRow, clock: RoundClock, now: float
    ) -> Assignment:
        swarm = self._resources.run.swarm
        stand_in = None
        if row.stand_in_shard is not None:
            stand_in = StandIn(shard=row.stand_in_shard, steps=row.stand_in_steps)
        # The message names the head of now, the best base there is: a lease that is found again may be older.
        # Row and ledger keep the base at lending, as what was said cannot change; the commit names the base
        # that was used in the end.
        return message_of(
            Assignment,
            row,
            base_version=block.version,
            base_hash=block.head_hash,
            first_step=row.round * swarm.steps_per_round,
            steps=swarm.steps_per_round + row.stand_in_steps,
            total_steps=swarm.total_steps,
            deadline=clock.deadline if row.round == block.version else None,
            deadline_reason=clock.reason,
            lease_seconds=swarm.lease_seconds,
            heartbeat_seconds=swarm.lease_seconds / HEARTBEATS_PER_LEASE,
            server_time=now,
            frozen=frozen_of(row),
            stand_in=stand_in,
            run_seconds_left=self._resources.open_rounds.seconds_left(session, now),
        )

    # --- while it trains ---

    def heartbeat(
        self, worker_id: WorkerId, assignment_id: str, request: HeartbeatRequest
    ) -> HeartbeatAnswer:
        now, swarm, rounds = self._resources.clock(), self._resources.run.swarm, self._resources.open_rounds
        with self._resources.store.write() as session, session.no_autoflush:
            # The commonest request of all: the worker's row is written without being loaded, 0.5 ms less.
            # After a long silence, or where there is no worker, it is looked at as by every other request.
            if not _HEARD(session, worker=worker_id, since=now - SILENCE_GRACE_SECONDS):
                present_worker(session, worker_id, now)
                session.flush()
            refuse_banned(session, worker_id, now)
            row = own_assignment(session, worker_id, assignment_id)
            block = block_row(session, row.block)
            seat = {"seat": row.block, "at_step": request.step, "at_loss": request.loss}
            (_BEAT if row.state in LIVE else _SEEN)(session, worker=worker_id, now=now, **seat)
            clock = rounds.clock(session, block, now)
            by_age = age_ruling(block.version - row.round, swarm, finished=block.version >= swarm.rounds)
            cancel, reason = not by_age.counts, by_age.sentence
            of_round = {"worker": worker_id, "block": row.block, "round": block.version}
            if row.state not in LIVE:
                cancel, reason = True, f"the assignment was {row.state}"
            elif (
                not cancel
                and row.state == AssignmentState.LEASED
                and row.round > block.version
                and (
                    _SECOND_TRY_BEHIND(session, **of_round, made=row.made)
                    or any(
                        _may_retry(revealed, rounds.state(session, block, now))
                        for (revealed,) in _REFUSED_IN_ROUND(session, **of_round)
                    )
                )
            ):
                # It trains ahead for a round that cannot open before the open one closes, and that one now
                # waits for this worker's second try.
                cancel, reason = True, f"the update for round {block.version} did not count: train it again"
                self._end_assignment(session, row, AssignmentState.RECALLED, now)
            return HeartbeatAnswer(
                cancel=cancel,
                reason=reason,
                run_seconds_left=rounds.seconds_left(session, now),
                head_version=block.version,
                head_hash=block.head_hash,
                deadline=clock.deadline,
                deadline_reason=clock.reason,
                server_time=now,
            )

    def hand_back(self, worker_id: WorkerId, assignment_id: str) -> ReturnAnswer:
        now = self._resources.clock()
        with self._resources.store.write() as session:
            worker = present_worker(session, worker_id, now)
            row = own_assignment(session, worker_id, assignment_id)
            if row.state != AssignmentState.LEASED:
                return ReturnAnswer(returned=False)
            # A heartbeat's answer has called off what is too old: that is not the worker giving up.
            version, swarm = block_row(session, row.block).version, self._resources.run.swarm
            if age_ruling(version - row.round, swarm, finished=version >= swarm.rounds).counts:
                self._end_assignment(session, row, AssignmentState.RETURNED, now)
                self._mark_giving_up(session, worker, now)
            else:
                self._end_assignment(session, row, AssignmentState.RECALLED, now)
            session.flush()
            if _open_lease(session, worker_id, None) is None:
                worker.block = None
        self._resources.changes.notify()
        return ReturnAnswer(returned=True)


def own_assignment(session: Session, worker_id: WorkerId, assignment_id: str) -> AssignmentRow:
    """The assignment, locked, if it is this worker's."""
    row = session.get(AssignmentRow, assignment_id, with_for_update=True, populate_existing=True)
    if row is None:
        raise Refusal(
            ErrorReason.NOT_FOUND, f"no assignment {assignment_id}", "ask for one: POST /v1/assignments"
        )
    if row.worker_id != worker_id:
        raise Refusal(ErrorReason.NOT_YOURS, f"assignment {assignment_id} is another worker's")
    return row


def _open_lease(session: Session, worker_id: WorkerId, after: AssignmentRow | None) -> AssignmentRow | None:
    """A lease the worker already has, made after the one in hand, whose round has not passed."""
    for assignment_id, made, round_ in _LEASES(session, worker=worker_id):
        if after is None or (made, round_) > (after.made, after.round):
            return session.get_one(AssignmentRow, assignment_id)
    return None


def _may_retry(revealed: float | None, state: OpenRound) -> bool:
    """Whether the round's deadline was re-set since the refused update came: nothing else has arrived."""
    return revealed is not None and state.period_began is not None and revealed < state.period_began
