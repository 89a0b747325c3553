"""Closing rounds: claim, merge, publish; correct when several processes, or a crash, do it twice.

1. claim    one transaction fixes which updates belong to the merge and marks the block as closing
2. merge    pure arithmetic on those updates; any process gets the same bytes
3. publish  the snapshot is written to the blobs, then one transaction moves the head, if nobody else has

A process that dies after the claim leaves a fixed set behind; whoever claims next repeats step 2 with it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, or_, select
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from blocktrain.coordinator.context import Context
from blocktrain.coordinator.decisions.deadlines import Lateness, should_close
from blocktrain.coordinator.judging import Judging
from blocktrain.coordinator.storage.blobs import snapshot_key
from blocktrain.coordinator.storage.store import AssignmentRow, BlockRow, MergeRow, SnapshotRow, UpdateRow
from blocktrain.coordinator.storage.weights import Weights
from blocktrain.coordinator.updates import running_median
from blocktrain.errors import BlocktrainError
from blocktrain.training.merge import clip_scales, replay_merge
from blocktrain.training.snapshot import blank_file, snapshot_hash
from blocktrain.validation.verdicts import guard_decision, is_doubted, merge_choices
from blocktrain.wire.messages import MergeInputRecord, MergeRecord, Outcome, RoundReport, VerdictReason

log = logging.getLogger(__name__)

CLAIM_SECONDS = 15.0
"""After this a claim is taken to be a dead process's; too early only costs a second, equal merge."""
POLL_SECONDS = 0.5
"""How soon a deadline, or what another process wrote, is noticed; arrivals here wake the thread at once."""
MERGE_THREADS = 2
SKETCHED_ROUNDS = 8
"""Rounds for which an update's sketch is kept."""
REMEMBERED_ROUNDS = 16
"""Rounds after which it is forgotten that the guard left a worker's update out."""

Published = Callable[[int, int, float], None]
"""Told of a new head: block, version, seconds from the claim."""


@dataclass(frozen=True)
class Claim:
    """A merge to do: its inputs are fixed in the database."""

    block: int
    version: int
    base_hash: str
    record: MergeRecord
    """With an empty result hash, until it is known."""
    reason: str


@dataclass(frozen=True)
class Merged:
    """The next snapshot as its file, and its tensors as views into it."""

    file: NDArray[np.uint8]
    tensors: Weights


UNKNOWN_HASH = "0" * 64


class Rounds:
    def __init__(
        self,
        context: Context,
        published: Published = lambda block, version, seconds: None,
        judging: Judging | None = None,
    ) -> None:
        self._context, self._published, self._judging = context, published, judging
        self._owner = secrets.token_hex(16)
        self._threads = ThreadPoolExecutor(MERGE_THREADS, thread_name_prefix="merge")

    def forget_claims(self) -> None:
        """On start, where this process is the only one: claims that are left are a dead predecessor's."""
        with self._context.store.write() as session:
            for row in session.scalars(select(BlockRow)):
                row.claim_owner = row.claim_until = None

    def run(self, stop: threading.Event) -> None:
        """Close rounds until told to stop; one error must not end the run: it is logged and tried again."""
        self._load_heads()
        while not stop.is_set():
            seen = self._context.changes.count
            try:
                busy = self.close_due()
            except BlocktrainError as error:
                log.error("cannot close a round: %s", error)
                busy = False
            except Exception:
                log.exception("failed to close a round")
                busy = False
            if not busy:
                self._context.changes.wait(seen, POLL_SECONDS)

    def _load_heads(self) -> None:
        """So that the first round after a start closes as fast as the others."""
        with self._context.store.read() as session:
            heads = [(row.block, row.head_hash) for row in session.scalars(select(BlockRow))]
        for block, head in heads:
            try:
                self._context.weights.snapshot(block, head)
            except BlocktrainError as error:
                log.error("cannot load the head of block %d: %s", block, error)

    def close(self) -> None:
        self._threads.shutdown()

    def close_due(self) -> bool:
        """Close every round that is due; whether there was one."""
        blocks = range(len(self._context.run.layouts))
        closed = [self._close(block) for block in blocks if self._is_due(block)]
        return any(closed)

    def _close(self, block: int) -> bool:
        started = time.perf_counter()
        claim = self._claim(block)
        if claim is None:
            return False
        merged = self._merge(claim)
        if self._judging is not None and self._judging.guards:
            guarded = self._guarded(claim, merged, self._judging)
            if guarded is None:
                return True
            claim, merged = guarded
        if self._publish(claim, merged):
            self._published(claim.block, claim.version, time.perf_counter() - started)
            self._context.changes.notify()
        return True

    # --- claim ---

    def _is_due(self, block: int) -> bool:
        """A cheap look without a lock; the claim looks again."""
        now = self._context.clock()
        with self._context.store.read() as session:
            return self._closing_reason(session, self._context.block(session, block), now) is not None

    def _closing_reason(self, session: Session, row: BlockRow, now: float) -> str | None:
        if row.version >= self._context.run.swarm.rounds:
            return None
        if row.closing_version is not None:
            abandoned = row.claim_until is None or row.claim_until < now
            return "continues a merge that was begun" if abandoned else None
        seats = self._context.seats(session, now).get(row.block, 0)
        state, deadline = self._context.round(session, row, seats, now)
        closing = should_close(now, state.accepted, state.late, state.wanted, deadline)
        if closing.close and self._context.waits_for_judge(session, row.block, deadline, now):
            return None
        return closing.reason if closing.close else None

    def _claim(self, block: int) -> Claim | None:
        now = self._context.clock()
        with self._context.store.write() as session:
            row = self._context.block(session, block, lock=True)
            reason = self._closing_reason(session, row, now)
            if reason is None:
                return None
            if row.closing_version is None:
                row.closing_version = row.version + 1
                self._fix_inputs(session, row)
            row.claim_owner, row.claim_until = self._owner, now + CLAIM_SECONDS
            return Claim(block, row.closing_version, row.head_hash, self._record(session, row), reason)

    def _fix_inputs(self, session: Session, row: BlockRow) -> None:
        updates = session.scalars(
            select(UpdateRow)
            .where(
                UpdateRow.block == row.block,
                UpdateRow.state.in_(("accepted", "late")),
                UpdateRow.merge_version.is_(None),
            )
            .order_by(UpdateRow.update_id)
        ).all()
        for update in updates:
            update.merge_version = row.closing_version
        self._clip(session, row.block, updates)

    def _clip(self, session: Session, block: int, updates: Sequence[UpdateRow]) -> None:
        scales = self._scales(updates, running_median(session, block))
        for update, scale in zip(updates, scales, strict=True):
            update.scale = scale
        session.flush()

    def _scales(self, updates: Sequence[UpdateRow], median: float | None) -> list[float]:
        """Only updates of the merge clip one another: small ones that the guard left out would shrink it."""
        return clip_scales(self._context.run.codec, [update.norm or 0.0 for update in updates], median)

    def _record(self, session: Session, row: BlockRow) -> MergeRecord:
        assert row.closing_version is not None
        updates = _inputs(session, row.block, row.closing_version)
        return MergeRecord(
            block=row.block,
            version=row.closing_version,
            base_hash=row.head_hash,
            result_hash=UNKNOWN_HASH,
            codec=str(self._context.run.codec),
            alpha=self._context.run.swarm.outer_lr,
            inputs=tuple(_input_record(update, update.scale) for update in updates),
        )

    # --- merge ---

    def _merge(self, claim: Claim) -> Merged:
        weights = self._context.weights
        decoded = {
            one.payload_hash: weights.update(claim.block, one.payload_hash) for one in claim.record.inputs
        }
        bases = {}
        if self._context.run.codec.sends_weights:
            late = {one.base_hash for one in claim.record.inputs} - {claim.base_hash}
            bases = {wanted: weights.snapshot(claim.block, wanted) for wanted in late}
        base = weights.snapshot(claim.block, claim.base_hash)
        file, views = blank_file(self._context.run.schemas[claim.block])
        replay_merge(claim.record, base, decoded, bases, self._threads, views)
        return Merged(file, views)

    # --- guard ---

    def _guarded(self, claim: Claim, merged: Merged, judging: Judging) -> tuple[Claim, Merged] | None:
        """The merge without the updates that make it worse; None where nothing is left: the block holds."""
        while True:
            choices, merges, doubted = self._choices(claim)
            found = judging.guard(claim.block, claim.version, claim.base_hash, merges, len(choices[0]))
            decision = guard_decision(found, choices, doubted)
            for update_id in decision.leave_out:
                kept = self._drop(claim, update_id, decision.sentence)
                if kept is None:
                    return None
                claim = kept
            if decision.leave_out:
                merged = self._merge(claim)
            if decision.publish:
                return claim, merged

    def _choices(
        self, claim: Claim
    ) -> tuple[list[tuple[str, ...]], list[Callable[[], Weights]], frozenset[str]]:
        """Sets of updates, for each what makes their merge, and which updates are doubted."""
        with self._context.store.read() as session:
            rows = _inputs(session, claim.block, claim.version)
            median = running_median(session, claim.block)
            doubted = _doubted(session, claim, rows)
        choices = merge_choices({row.update_id: -1e9 if row.gain is None else row.gain for row in rows})
        kept = [[row for row in rows if row.update_id in choice] for choice in choices]
        return choices, [self._lazy(claim, some, median) for some in kept], doubted

    def _lazy(self, claim: Claim, kept: Sequence[UpdateRow], median: float | None) -> Callable[[], Weights]:
        scales = self._scales(kept, median)
        inputs = tuple(_input_record(row, scale) for row, scale in zip(kept, scales, strict=True))
        smaller = replace(claim, record=claim.record.model_copy(update={"inputs": inputs}))
        return lambda: self._merge(smaller).tensors

    def _drop(self, claim: Claim, update_id: str, sentence: str) -> Claim | None:
        """Take an update out of a merge under way; None where it was the last, or the merge is another's."""
        now = self._context.clock()
        with self._context.store.write() as session:
            row = self._context.block(session, claim.block, lock=True)
            update = session.get(UpdateRow, update_id)
            if (
                row.closing_version != claim.version
                or update is None
                or update.merge_version != claim.version
            ):
                return None
            update.merge_version = update.scale = None
            refusal = Lateness(Outcome.REFUSED, 0.0, VerdictReason.GUARD, sentence)
            self._context.write_verdict(session, update, refusal, now, {})
            session.flush()
            log.warning("dropped update=%s block=%d why=%r", update_id[:12], claim.block, sentence)
            if others := _inputs(session, claim.block, claim.version):
                self._clip(session, claim.block, others)
                return replace(claim, record=self._record(session, row))
            row.closing_version = row.claim_owner = row.claim_until = None
            row.begun = now
            return None

    # --- publish ---

    def _publish(self, claim: Claim, merged: Merged) -> bool:
        """Write the snapshot, then move the head; False where another process was first."""
        digest = snapshot_hash(merged.tensors)
        self._context.blobs.put(snapshot_key(digest), merged.file.data)
        record = claim.record.model_copy(update={"result_hash": digest})
        now = self._context.clock()
        with self._context.store.write() as session:
            row = self._context.block(session, claim.block, lock=True)
            if row.closing_version != claim.version:
                return False
            self._move_head(session, row, record, merged.file.nbytes, now)
        self._remember(claim, digest, merged.tensors)
        log.info(
            "merged block=%d version=%d updates=%d hash=%s why=%r",
            claim.block, claim.version, len(record.inputs), digest[:12], claim.reason,
        )  # fmt: skip
        return True

    def _move_head(
        self, session: Session, row: BlockRow, record: MergeRecord, num_bytes: int, now: float
    ) -> None:
        updates = _inputs(session, row.block, record.version)
        report = self._report(session, row, record.version, updates, now)
        session.add(
            MergeRow(
                block=row.block,
                version=record.version,
                record=record.model_dump_json(),
                report=report.model_dump_json(),
                begun=row.begun,
                closed=now,
            )
        )
        session.add(
            SnapshotRow(
                block=row.block,
                version=record.version,
                hash=record.result_hash,
                num_bytes=num_bytes,
                made=now,
            )
        )
        for update in updates:
            update.state = "merged"
        self._forget_sketches(session, row.block, record.version)
        row.version, row.head_hash, row.closing_version = record.version, record.result_hash, None
        row.claim_owner = row.claim_until = None
        row.begun = now if self._assigned(session, row.block, row.version) else None
        self._context.ledger.append(session, now, "merge", record.model_dump(mode="json"))
        snapshot = {"block": row.block, "version": row.version, "hash": row.head_hash}
        self._context.ledger.append(session, now, "snapshot", snapshot)

    def _forget_sketches(self, session: Session, block: int, version: int) -> None:
        old = UpdateRow.base_version < version - SKETCHED_ROUNDS
        session.execute(
            sql_update(UpdateRow)
            .where(UpdateRow.block == block, old, UpdateRow.sketch.is_not(None))
            .values(sketch=None)
        )

    def _report(
        self, session: Session, row: BlockRow, version: int, updates: list[UpdateRow], now: float
    ) -> RoundReport:
        refused = session.scalar(
            select(func.count()).where(
                UpdateRow.block == row.block,
                UpdateRow.round == row.version,
                UpdateRow.state == "refused",
            )
        )
        losses = [update.loss for update in updates if update.loss is not None]
        return RoundReport(
            block=row.block,
            version=version,
            seconds=0.0 if row.begun is None else max(0.0, now - row.begun),
            on_time=sum(update.weight == 1.0 for update in updates),
            late=sum(update.weight != 1.0 for update in updates),
            refused=refused or 0,
            assigned=self._assigned(session, row.block, row.version),
            mean_loss=sum(losses) / len(losses) if losses else None,
        )

    def _assigned(self, session: Session, block: int, round_: int) -> int:
        count = session.scalar(
            select(func.count()).where(
                AssignmentRow.block == block,
                AssignmentRow.round == round_,
                AssignmentRow.state.in_(("leased", "committed")),
            )
        )
        return count or 0

    def _remember(self, claim: Claim, digest: str, tensors: Weights) -> None:
        weights = self._context.weights
        weights.keep(claim.block, digest, tensors)
        for one in claim.record.inputs:
            weights.forget(claim.block, one.payload_hash)


def _inputs(session: Session, block: int, version: int) -> list[UpdateRow]:
    return list(
        session.scalars(
            select(UpdateRow)
            .where(UpdateRow.block == block, UpdateRow.merge_version == version)
            .order_by(UpdateRow.update_id)
        )
    )


def _doubted(session: Session, claim: Claim, rows: Sequence[UpdateRow]) -> frozenset[str]:
    """Those of these updates whose workers the guard has lately left out of every merge."""
    by_guard = UpdateRow.reason == VerdictReason.GUARD
    past = session.execute(
        select(UpdateRow.worker_id, UpdateRow.state == "merged")
        .where(
            UpdateRow.block == claim.block,
            UpdateRow.worker_id.in_([row.worker_id for row in rows]),
            UpdateRow.round >= claim.version - REMEMBERED_ROUNDS,
            or_(UpdateRow.state == "merged", by_guard),
        )
        .order_by(UpdateRow.round.desc())
    ).all()
    left_out: dict[str, list[bool]] = {row.worker_id: [] for row in rows}
    for worker_id, merged in past:
        left_out[worker_id].append(not merged)
    return frozenset(row.update_id for row in rows if is_doubted(left_out[row.worker_id]))


def _input_record(update: UpdateRow, scale: float | None) -> MergeInputRecord:
    assert scale is not None
    return MergeInputRecord(
        update_id=update.update_id,
        payload_hash=update.payload_hash,
        worker_id=update.worker_id,
        base_version=update.base_version,
        base_hash=update.base_hash,
        weight=update.weight,
        scale=scale,
    )
