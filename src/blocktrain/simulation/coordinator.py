"""A real coordinator in virtual time: its own services, called one after the other, on tables in memory.

Scheduling, commits, verdicts, the judge, the guard, rounds and merges are the coordinator's own code, so that
a rule cannot mean one thing in a run and another in a simulation. There are no threads, no HTTP and no disk.
Made up here: heartbeats (a machine that is there is heard at every moment), waking up at deadlines, and one
rule of the litepaper (`_use_up_round`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select
from sqlalchemy import update as sql_update

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base
from blocktrain.config import Recipe
from blocktrain.coordinator.decisions.rounds import round_state
from blocktrain.coordinator.decisions.scheduling import Offer
from blocktrain.coordinator.operator_notes import Display
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import present_worker
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.service import POLL_SECONDS, Coordinator
from blocktrain.coordinator.states import LIVE, UpdateState
from blocktrain.coordinator.storage.blobs import Blobs
from blocktrain.coordinator.storage.queries import block_row, num_assignments, seats
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    MergeRow,
    SnapshotRow,
    Store,
    Table,
    UpdateRow,
    WorkerRow,
)
from blocktrain.data.dataset import RunText
from blocktrain.errors import BlocktrainError
from blocktrain.ids import derive_seed
from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.networks import Machine
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity, WorkerId
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    CommitRequest,
    HeartbeatRequest,
    JoinRequest,
    MergeRecord,
    Outcome,
    Verdict,
)
from blocktrain.worker.block_progress import PendingUpdate

MAX_VAIN_DEADLINES = 20
"""Deadlines of one round that pass while a judge refuses all that comes; in virtual time nobody would stop a
run that goes on so."""


class SimulationError(BlocktrainError):
    """A simulated run that cannot go on."""


@dataclass
class SimulatedBlock:
    """What anybody may read of a block."""

    layout: Layout
    head: Base
    merges: list[MergeRecord] = field(default_factory=list)
    """Without inputs where a round of `drop` passed without an update."""
    closed: list[float] = field(default_factory=list)
    """Virtual time of each merge."""


class SimulatedCoordinator:
    def __init__(
        self,
        recipe: Recipe,
        text: RunText,
        clock: VirtualClock,
        machines: Sequence[Machine],
        *,
        judged: bool,
    ) -> None:
        self.clock, self.machines, self.swarm, self.judged = clock, machines, recipe.swarm, judged
        judge: Literal["coordinator", "off"] = "coordinator" if judged else "off"
        # Nobody has to be kept out of a simulation: no invitations, no hashing for a stamp.
        trust = dataclasses.replace(recipe.trust, judge=judge, admission="open", stamp_bits=0)
        recipe = dataclasses.replace(recipe, trust=trust)
        # Updates are added up in the order of their ids, which depend on the run's and the assignments': both
        # must be the same in every run with this seed, or the last bits of a merge of three would differ.
        seed = content_hash(str(derive_seed("simulated coordinator", recipe.seed)).encode())
        identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed)))
        numbers = count()
        store, blobs = Store("sqlite://"), Blobs.from_url("memory://")
        # The tables of this version at once: running every migration would take longer than a small run.
        Table.metadata.create_all(store.engine)
        run = open_run(store, blobs, identity, recipe, text, clock.now)
        self.resources = Resources(
            run, store, blobs, identity, lambda: clock.now, new_id=lambda: f"{next(numbers):032x}"
        )
        scorer = Scorer(recipe, text) if judged else None
        self.service = Coordinator(self.resources, None, scorer, Path(), Display())
        self.blocks = [
            SimulatedBlock(Layout.of(layout), self._base(layout.block, 0, layout.initial_hash))
            for layout in run.layouts
        ]
        self.worker_ids = [WorkerId(f"{index:032x}") for index in range(len(machines))]
        for worker_id in self.worker_ids:
            request = JoinRequest(corpus_sha256=text.sha256)
            self.service.assignments.join(worker_id, bytes(32), request)
        self.watchers: list[Callable[[int], None]] = []
        """Told of every new head."""
        self._woken_at: set[tuple[int, float]] = set()
        self._vain_deadlines: Counter[tuple[int, int]] = Counter()
        """Block and version to the deadlines that passed there with nothing to merge."""
        self._heard_at = -1.0

    def _base(self, block: int, version: int, snapshot_hash: str) -> Base:
        return Base(version, snapshot_hash, self.resources.weights.snapshot(block, snapshot_hash))

    @property
    def finished(self) -> bool:
        return all(block.head.version >= self.swarm.rounds for block in self.blocks)

    def num_assigned(self) -> int:
        with self.resources.store.read() as session:
            return session.scalar(select(func.count()).select_from(AssignmentRow)) or 0

    def refusals(self) -> dict[str, int]:
        """Updates that were refused, at their arrival or by judge or guard, by reason."""
        with self.resources.store.read() as session:
            rows = session.execute(
                select(UpdateRow.reason, func.count())
                .where(UpdateRow.state == UpdateState.REFUSED)
                .group_by(UpdateRow.reason)
                .order_by(UpdateRow.reason)
            )
            return {str(reason): number for reason, number in rows}

    # --- requests; a machine that was banned is refused, and waits

    def ask(self, worker: int, request: AssignmentRequest) -> Assignment | None:
        """An assignment, or None where there is nothing to do now."""
        self._hear()
        try:
            answer = self.service.assignments.ask(self.worker_ids[worker], request)
        except Refusal:
            return None
        if not isinstance(answer, Assignment):
            return None
        # It may have started its round's clock, and cannot have closed the round: no need to look.
        if answer.deadline is not None:
            self._wake(answer.block, answer.deadline)
        return answer

    def lend(self, worker: int, block: int) -> Assignment | None:
        """The open round of this block, whatever the scheduler would choose: the litepaper's seats are
        fixed."""
        self._hear()
        now = self.clock.now
        try:
            with self.resources.store.write() as session:
                row = present_worker(session, self.worker_ids[worker], now)
                locked = block_row(session, block, lock=True)
                offer = Offer(block, locked.version, "its block's next round")
                others = seats(session, self.swarm, now, without=row).get(block, 0)
                assignment = self.service.assignments.lend(session, row, locked, offer, others, now)
        except Refusal:
            return None
        assert assignment.deadline is not None
        self._wake(block, assignment.deadline)
        return assignment

    def cancels(self, worker: int, update: PendingUpdate) -> bool:
        """What the next heartbeat's answer says of an assignment."""
        beat = partial(self.service.assignments.heartbeat, self.worker_ids[worker], update.assignment_id)
        try:
            return beat(HeartbeatRequest(step=update.step)).cancel
        except Refusal:
            return True

    def commit(self, worker: int, update: PendingUpdate) -> bool:
        """Whether the coordinator will have it."""
        assert update.base is not None
        self._hear()
        request = CommitRequest(
            payload_hash=update.payload_hash,
            payload_bytes=len(update.payload),
            base_hash=update.base.hash,
            loss=update.loss,
        )
        try:
            self.service.updates.commit(self.worker_ids[worker], update.assignment_id, request)
        except Refusal:
            return False
        return True

    def reveal(self, worker: int, update: PendingUpdate) -> Verdict | None:
        """The verdict on a payload that has arrived; the judge takes no virtual time."""
        self._hear()
        updates, worker_id = self.service.updates, self.worker_ids[worker]
        try:
            expected = updates.expect(worker_id, update.payload_hash, len(update.payload))
            verdict = updates.reveal(expected, np.frombuffer(update.payload, np.uint8), update.payload_hash)
        except Refusal:
            return None
        # In a real run a round waits for its judge anyway; here nobody else is served meanwhile.
        while self.judged and self.service.judging.judge_next():
            pass
        if verdict.outcome is Outcome.PENDING:
            verdict = updates.verdict(worker_id, update.payload_hash)
        self._look(update.block)
        return verdict

    def _hear(self) -> None:
        """Write down what heartbeats would have said: when each machine was last there."""
        now = self.clock.now
        if now == self._heard_at:
            return
        self._heard_at = now
        with self.resources.store.write() as session:
            # Only requests read it, so it is written before each of them and not at every heartbeat.
            session.execute(sql_update(WorkerRow).values(last_seen=now))
            for worker_id, machine in zip(self.worker_ids, self.machines, strict=True):
                if away := machine.away_seconds(now):
                    session.execute(
                        sql_update(WorkerRow)
                        .where(WorkerRow.worker_id == worker_id)
                        .values(last_seen=now - away)
                    )

    # --- rounds

    def _look(self, block: int) -> None:
        """Close the block's round if it is due, tell of its new head, and look again when its deadline
        passes."""
        state, now, drop = self.blocks[block], self.clock.now, self.swarm.policy == "drop"
        while state.head.version < self.swarm.rounds:
            with self.resources.store.read() as session:
                facts = self.resources.open_rounds.facts(session, block_row(session, block), now)
            found = round_state(facts, self.swarm, self.resources.run.recipe.trust, now)
            deadline = found.clock.deadline
            if drop and facts.begun is not None:
                deadline = facts.begun + self.swarm.drop_deadline_seconds
            passed = deadline is not None and deadline <= now
            if found.close:
                self.service.rounds.close(block)
            elif drop and passed:
                self._use_up_round(block)
            else:
                if deadline is not None and not passed:
                    self._wake(block, deadline)
                elif deadline is not None and self.judged:
                    # The deadline is re-set from the next moment on, when a real coordinator looks again.
                    self._wake(block, now + POLL_SECONDS)
                return
            if not self._tell_of_new_heads(block):
                self._tell(block)  # the guard left nothing over: the round begins again, for all

    def _wake(self, block: int, at: float) -> None:
        if (block, at) not in self._woken_at:
            self._woken_at.add((block, at))
            self.clock.at(at, partial(self._deadline_passed, block, self.blocks[block].head.version))

    def _deadline_passed(self, block: int, version: int) -> None:
        if self.blocks[block].head.version != version:
            return
        self._hear()
        self._look(block)
        if self.judged and self.blocks[block].head.version == version:
            # A refused worker may try its round again when the deadline was re-set; it must ask to know.
            self._tell(block)
            self._vain_deadlines[block, version] += 1
            if self._vain_deadlines[block, version] > MAX_VAIN_DEADLINES:
                found = ", ".join(f"{reason}: {number}" for reason, number in self.refusals().items())
                raise SimulationError(
                    f"block {block} does not get past version {version}: {MAX_VAIN_DEADLINES} deadlines "
                    f"passed with nothing to merge; refused so far: {found or 'nothing'}. Rounds that are "
                    "too short show no gain to a judge: raise swarm.steps_per_round or trust.compute_share"
                )

    def _use_up_round(self, block: int) -> None:
        """The litepaper's rule: under `drop` a deadline that passes with nothing to merge uses up a round,
        and the old snapshot stays, for the number of rounds is fixed. A real coordinator re-sets the
        deadline."""
        now = self.clock.now
        with self.resources.store.write() as session:
            row = block_row(session, block, lock=True)
            record = MergeRecord(
                block=block,
                version=row.version + 1,
                base_hash=row.head_hash,
                result_hash=row.head_hash,
                codec=self.swarm.codec,
                alpha=self.swarm.outer_lr,
                inputs=(),
            )
            session.add(
                MergeRow(
                    block=block,
                    version=record.version,
                    record=record.model_dump_json(),
                    report="{}",
                    begun=row.begun,
                    closed=now,
                )
            )
            session.add(
                SnapshotRow(block=block, version=record.version, hash=row.head_hash, num_bytes=0, made=now)
            )
            row.version = record.version
            # As after a merge: workers that ran ahead are at work on the next round already.
            row.begun = now if num_assignments(session, block, row.version, LIVE) else None

    def _tell_of_new_heads(self, block: int) -> bool:
        state = self.blocks[block]
        with self.resources.store.read() as session:
            version = session.scalar(select(BlockRow.version).where(BlockRow.block == block))
            if version == state.head.version:
                return False
            rows = session.scalars(
                select(MergeRow)
                .where(MergeRow.block == block, MergeRow.version > state.head.version)
                .order_by(MergeRow.version)
            ).all()
        for row in rows:
            # One after the other, so that watchers see every version.
            state.merges.append(MergeRecord.model_validate_json(row.record))
            state.closed.append(row.closed)
            state.head = self._base(block, row.version, state.merges[-1].result_hash)
            self._tell(block)
        return True

    def _tell(self, block: int) -> None:
        for watcher in self.watchers:
            self.clock.at(self.clock.now, partial(watcher, block))
