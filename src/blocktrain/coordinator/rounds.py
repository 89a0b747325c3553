"""Closing rounds: claim, merge, publish; correct when several processes, or a crash, do it twice.

1. claim    one transaction fixes which updates belong to the merge and marks the block as closing
2. merge    pure arithmetic on those updates; any process gets the same bytes
3. guard    leaves out what makes the merge worse; each refusal is a verdict in a transaction of its own
4. publish  the snapshot is written to the blobs, then one transaction moves the head, if nobody else has

A process that dies after the claim leaves a fixed set behind; the next to claim repeats step 2 with it.
When a round is due is `decisions.rounds.round_state`'s to say.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
from sqlalchemy import and_, func, not_, or_, select
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from blocktrain.coordinator.decisions.merging import merging_weight
from blocktrain.coordinator.judging import Judging
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import LIVE, AssignmentState, UpdateState, change, merged_outcome
from blocktrain.coordinator.storage.blobs import snapshot_key
from blocktrain.coordinator.storage.queries import (
    block_row,
    held_out_losses,
    inputs_of_merge,
    num_assignments,
    running_median,
)
from blocktrain.coordinator.storage.store import (
    BlockRow,
    MergeRow,
    Prepared,
    SnapshotRow,
    UpdateRow,
    WorkerRow,
    message_of,
)
from blocktrain.coordinator.storage.weights import Weights, changed_snapshot
from blocktrain.coordinator.verdicts import settle
from blocktrain.training.merge import clip_scales, replay_merge
from blocktrain.training.snapshot import file_layout
from blocktrain.validation.guard import guard_decision, is_doubted, merge_choices
from blocktrain.validation.ruling import Ruling
from blocktrain.wire.codec import Schema, Values
from blocktrain.wire.hashing import SnapshotHasher
from blocktrain.wire.messages import (
    MergeInputRecord,
    MergeRecord,
    Outcome,
    RoundReport,
    VerdictReason,
)

log = logging.getLogger(__name__)

CLAIM_SECONDS = 15.0
"""After this a claim is taken to be a dead process's; too early only costs a second, equal merge."""
# Tensors are merged side by side; numpy lets go of the lock while it adds. Four replicas of 69 MB take 0.44 s
# with sparse:64 and 1.05 s dense from the last reveal to the new snapshot (docs/experiments.md).
MERGE_THREADS = 2
LOOK_SECONDS = 0.4
"""How soon a deadline, or a worker that left, is noticed at the latest."""
SKETCHED_ROUNDS = 8
"""Rounds for which an update's sketch is kept."""
REMEMBERED_ROUNDS = 16
"""Rounds after which it no longer counts that the guard left a worker's update out."""
UNKNOWN_HASH = "0" * 64
_REVISIONS = Prepared(select(BlockRow.block, BlockRow.revision).order_by(BlockRow.block))


@dataclass(frozen=True)
class Claim:
    """A merge to do: its inputs are fixed in the database."""

    block: int
    version: int
    base_hash: str
    record: MergeRecord
    """With UNKNOWN_HASH as its result, until that is known."""
    reason: str


@dataclass(frozen=True)
class MergedBlock:
    """The next snapshot in a file that has no name yet."""

    draft: IO[bytes]
    hash: str
    num_bytes: int
    places: dict[str, int]
    """The byte at which each tensor's values start."""

    def tensors(self, schema: Schema) -> Weights:
        """Views into the file: its pages come into memory as they are read, and the system may drop them."""
        # "c": writable, as torch wants arrays, and never written back.
        file = np.memmap(self.draft, np.uint8, "c").view(np.ndarray)
        sizes = ((name, shape, 4 * math.prod(shape)) for name, shape in schema.tensors)
        return {
            name: file[self.places[name] :][:size].view("<f4").reshape(shape) for name, shape, size in sizes
        }


class Rounds:
    def __init__(self, resources: Resources, judging: Judging | None = None) -> None:
        self._resources, self._judging = resources, judging
        self._threads = ThreadPoolExecutor(MERGE_THREADS, thread_name_prefix="merge")
        self._looked = -math.inf, -math.inf
        """When `close_due` looked at all blocks last, by the run's clock and by the machine's."""
        self._claimed: dict[int, int] = {}
        """Block to the version that this process began to merge last."""
        self._told_weight = math.inf
        """The merging weight that the operator was told of last."""
        self._revisions: dict[int, int] = {}
        """Block to what its revision was at the last look."""

    def forget_claims(self) -> None:
        """On start, where this process is the only one: claims that are left are a dead predecessor's."""
        with self._resources.store.write() as session:
            for row in session.scalars(select(BlockRow)):
                row.claim_until = None

    def load_heads(self) -> None:
        """So that the first round after a start closes as fast as the others."""
        with self._resources.store.read() as session:
            heads = [(row.block, row.head_hash) for row in session.scalars(select(BlockRow))]
        for block, head in heads:
            try:
                self._resources.weights.snapshot(block, head)
            except Exception as error:  # what needs it will fail in words; here nothing does
                log.error("cannot load the head of block %d: %s", block, error)

    def shut_down(self) -> None:
        self._threads.shutdown()

    def close_due(self) -> bool:
        """Close every round that is due; whether there was one."""
        resources, now, moment = self._resources, self._resources.clock(), time.monotonic()
        # Between two looks at all blocks only at those where something arrived: of 16 blocks with 20 updates
        # a second that is one at a time. Either clock counts, as tests move the run's by hand.
        last_now, last_moment = self._looked
        at_all = now - last_now >= LOOK_SECONDS or moment - last_moment >= LOOK_SECONDS
        if at_all:
            self._looked = now, moment
        due = []
        with resources.store.read() as session:
            for block, revision in _REVISIONS(session):
                if at_all or self._revisions.get(block) != revision:
                    self._revisions[block] = revision
                    # A cheap look without a lock; the claim looks again.
                    row = block_row(session, block)
                    if self._is_orphan(row) or resources.open_rounds.state(session, row, now).close:
                        due.append(block)
        closed = [self.close(block) for block in due]
        return any(closed)

    def close(self, block: int) -> bool:
        """Close the block's round if it is due; whether it was."""
        started = time.perf_counter()
        with self._resources.store.leading(block) as leads, self._resources.blobs.draft() as draft:
            claim = self._claim(block) if leads else None
            if claim is None:
                return False
            merged = self._merge(claim, draft)
            if self._judging is not None and self._judging.guards:
                guarded = self._guarded(claim, merged, self._judging)
                if guarded is None:
                    return True
                claim, merged = guarded
            if self._publish(claim, merged):
                self._delete_old_snapshots(block, claim.version)
                self._resources.metrics.merged(time.perf_counter() - started)
                self._resources.changes.notify()
                self._tell_if_finished()
        return True

    def _tell_if_finished(self) -> None:
        run = self._resources.run
        with self._resources.store.read() as session:
            slowest = session.scalar(select(func.min(BlockRow.version)))
        if slowest == run.swarm.rounds:
            log.info("finished run=%s after %d rounds; workers are sent home", run.run_id[:12], slowest)

    # --- claim ---

    def _is_orphan(self, row: BlockRow) -> bool:
        """Whether the block has a merge that another process began. If that process lives it leads the block,
        and we get nowhere; if it was killed its merge need not wait until its claim ends."""
        return row.closing_version is not None and row.closing_version != self._claimed.get(row.block)

    def _claim(self, block: int) -> Claim | None:
        now = self._resources.clock()
        with self._resources.store.write() as session:
            row = block_row(session, block, lock=True)
            state = self._resources.open_rounds.state(session, row, now)
            if not state.close and not self._is_orphan(row):
                return None
            # The inputs are fixed once: a process that takes over a dead one's claim finds them so.
            if row.closing_version is None:
                row.closing_version = row.version + 1
                updates = inputs_of_merge(session, block, None)
                for update in updates:
                    update.merge_version = row.closing_version
                self._clip(session, block, updates)
            row.claim_until = now + CLAIM_SECONDS
            self._claimed[block] = row.closing_version
            record = self._record(session, row, row.closing_version)
            return Claim(block, row.closing_version, row.head_hash, record, state.reason)

    def _clip(self, session: Session, block: int, updates: Sequence[UpdateRow]) -> None:
        scales = self._scales(updates, running_median(session, block))
        for update, scale in zip(updates, scales, strict=True):
            update.scale = scale
        session.flush()

    def _scales(self, updates: Sequence[UpdateRow], median: float | None) -> list[float]:
        # Only updates of the merge clip one another. Clipped by all that arrived, five colluders of eight
        # workers set the median with short updates that the guard then left out, and cut the honest ones to
        # 0.92 to 0.95 of their length: up to 0.021 nats at the end (docs/history).
        return clip_scales(self._resources.run.codec, [update.norm or 0.0 for update in updates], median)

    def _record(self, session: Session, row: BlockRow, version: int) -> MergeRecord:
        return MergeRecord(
            block=row.block,
            version=version,
            base_hash=row.head_hash,
            result_hash=UNKNOWN_HASH,
            codec=str(self._resources.run.codec),
            alpha=self._step_size(session),
            inputs=tuple(
                _input_record(update, update.scale) for update in inputs_of_merge(session, row.block, version)
            ),
        )

    def _step_size(self, session: Session) -> float:
        """Of the merge: how far the block goes along the mean of its updates."""
        run = self._resources.run
        if not run.objective.is_serial:
            return run.swarm.outer_lr
        losses = held_out_losses(session)
        weight = merging_weight(run.swarm.outer_lr, losses)
        if weight < min(self._told_weight, run.swarm.outer_lr):
            log.warning(
                "the held-out loss rose to %.4f, the lowest was %.4f: merges count %g from now on instead of "
                "swarm.outer_lr = %g; if it goes on, start again with a lower training.matrix_lr",
                losses[-1], min(losses), weight, run.swarm.outer_lr,
            )  # fmt: skip
        self._told_weight = weight
        return weight

    # --- merge ---

    def _merge(self, claim: Claim, draft: IO[bytes]) -> MergedBlock:
        """Merge, hash and write band by band: the whole process takes less memory than the block has
        (benchmarks/merge.py)."""
        weights, run, record = self._resources.weights, self._resources.run, claim.record
        schema = run.schemas[claim.block]
        shapes, (header, places) = dict(schema.tensors), file_layout(schema)
        read, merged = SnapshotHasher(), SnapshotHasher()
        with ExitStack() as stack:

            def opened_base(wanted: str, checked: bool) -> Values:
                return stack.enter_context(weights.opened_snapshot(claim.block, wanted, checked=checked))

            updates = {
                one.payload_hash: stack.enter_context(weights.opened_update(claim.block, one.payload_hash))
                for one in record.inputs
            }
            bases = {}
            if run.codec.sends_weights:  # a late update is the way from its own base to its weights
                late = {one.base_hash for one in record.inputs} - {claim.base_hash}
                bases = {wanted: opened_base(wanted, False) for wanted in late}
            base = opened_base(claim.base_hash, True)
            draft.seek(0)
            draft.write(header)
            for one in replay_merge(record, schema, base, updates, bases, self._threads):
                for hasher, values in ((read, one.base), (merged, one.values)):
                    if one.band.start == 0:
                        hasher.begin(one.name, shapes[one.name])
                    hasher.update(values)
                draft.seek(places[one.name] + 4 * one.band.start)
                draft.write(one.values.astype("<f4", copy=False).data)
        if read.hexdigest() != claim.base_hash:
            raise changed_snapshot(claim.base_hash)
        draft.flush()
        return MergedBlock(draft, merged.hexdigest(), len(header) + 4 * schema.num_values, places)

    # --- guard ---

    def _guarded(
        self, claim: Claim, merged: MergedBlock, judging: Judging
    ) -> tuple[Claim, MergedBlock] | None:
        """The merge without the updates that make it worse; None where nothing is left, or another process
        has the merge: the head stays."""
        while True:
            with self._resources.store.read() as session:
                rows = inputs_of_merge(session, claim.block, claim.version)
                median = running_median(session, claim.block)
                past = session.execute(
                    select(UpdateRow.worker_id, UpdateRow.state == UpdateState.MERGED)
                    .where(
                        UpdateRow.block == claim.block,
                        UpdateRow.worker_id.in_([row.worker_id for row in rows]),
                        UpdateRow.round >= claim.version - REMEMBERED_ROUNDS,
                        or_(UpdateRow.state == UpdateState.MERGED, UpdateRow.reason == VerdictReason.GUARD),
                    )
                    .order_by(UpdateRow.round.desc())
                ).all()
            # Doubted are those whose workers the guard left out of every recent merge: against them
            # weaker evidence is enough (decision 0009).
            left_out: dict[str, list[bool]] = {row.worker_id: [] for row in rows}
            for worker_id, was_merged in past:
                left_out[worker_id].append(not was_merged)
            doubted = frozenset(row.update_id for row in rows if is_doubted(left_out[row.worker_id]))
            # Those with the lowest gain of their own are left out first; one without evidence before all.
            gains = {row.update_id: -math.inf if row.gain is None else row.gain for row in rows}
            refining = self._resources.run.objective.is_serial
            choices, claims = merge_choices(gains, refining=refining), []
            for choice in choices:
                kept = [row for row in rows if row.update_id in choice]
                scales = self._scales(kept, median)
                inputs = tuple(_input_record(row, scale) for row, scale in zip(kept, scales, strict=True))
                claims.append(replace(claim, record=claim.record.model_copy(update={"inputs": inputs})))
            merges = self._tensors_of_each(claims)
            sizes = [len(choice) for choice in choices]
            found = judging.guard(claim.block, claim.version, claim.base_hash, merges, sizes)
            decision = guard_decision(found, choices, doubted)
            for update_id in decision.leave_out:
                left = self._leave_out(claim, update_id, decision.sentence)
                if left is None:
                    return None  # another process has the merge by now
                claim = left
            if not claim.record.inputs:
                return None
            if decision.leave_out:
                merged = self._merge(claim, merged.draft)
            if decision.publish:
                return claim, merged

    def _tensors_of_each(self, claims: Sequence[Claim]) -> Iterator[Weights]:
        # One at a time, as each is a whole block.
        for claim in claims:
            with self._resources.blobs.draft() as draft:
                merged = self._merge(claim, draft)
                yield merged.tensors(self._resources.run.schemas[claim.block])

    def _leave_out(self, claim: Claim, update_id: str, sentence: str) -> Claim | None:
        """The claim without this update; None where the merge is no longer ours. A claim that is left without
        inputs is given up, and the round begins again for all."""
        now = self._resources.clock()
        with self._resources.store.write() as session:
            update = session.get(UpdateRow, update_id)
            assert update is not None
            # The order of all locks: worker, block, run.
            worker = session.get(WorkerRow, update.worker_id, with_for_update=True, populate_existing=True)
            row = block_row(session, claim.block, lock=True)
            session.refresh(update)
            if row.closing_version != claim.version or update.merge_version != claim.version:
                return None
            update.merge_version = update.scale = None
            # No mark: the judge's evidence on the update stands, and chance leaves honest ones out too.
            ruling = Ruling.refuse(VerdictReason.GUARD, sentence, mark=None)
            settle(self._resources, session, worker, update, ruling, now)
            log.warning("dropped update=%s block=%d why=%r", update_id[:12], claim.block, sentence)
            if others := inputs_of_merge(session, claim.block, claim.version):
                self._clip(session, claim.block, others)
                return replace(claim, record=self._record(session, row, claim.version))
            row.closing_version = row.claim_until = None
            row.begun = now
            return replace(claim, record=claim.record.model_copy(update={"inputs": ()}))

    # --- publish ---

    def _publish(self, claim: Claim, merged: MergedBlock) -> bool:
        """Write the snapshot, then move the head; False where another process was first."""
        resources, digest = self._resources, merged.hash
        # The object before the row: a head that names a missing file would stop every worker of the block. A
        # crash in between leaves a file that nothing names, and the next merge writes the same one.
        resources.blobs.publish(snapshot_key(digest), merged.draft)
        record = claim.record.model_copy(update={"result_hash": digest})
        now = resources.clock()
        with resources.store.write() as session:
            row = block_row(session, claim.block, lock=True)
            if row.closing_version != claim.version:
                return False
            updates = inputs_of_merge(session, row.block, record.version)
            report = _report(session, row, record.version, updates, now)
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
                    hash=digest,
                    num_bytes=merged.num_bytes,
                    made=now,
                )
            )
            for update in updates:
                change(update, UpdateState.MERGED)  # only now: payloads of merged updates are public
            # Sketches are for finding copies, and an old update is not worth copying any more.
            outdated = UpdateRow.base_version < record.version - SKETCHED_ROUNDS
            session.execute(
                sql_update(UpdateRow)
                .where(UpdateRow.block == row.block, outdated, UpdateRow.sketch.is_not(None))
                .values(sketch=None)
            )
            row.version, row.head_hash = record.version, digest
            row.closing_version = row.claim_until = None
            # Workers that ran ahead are at work on the next round; else its first one starts the clock.
            row.begun = now if num_assignments(session, row.block, row.version, LIVE) else None
            resources.ledger.append(session, now, "merge", record.model_dump(mode="json"))
            snapshot = {"block": row.block, "version": row.version, "hash": row.head_hash}
            resources.ledger.append(session, now, "snapshot", snapshot)
        # A judge will need the head at once; without one nobody does before the next merge.
        if resources.run.recipe.trust.judge == "coordinator":
            tensors = merged.tensors(resources.run.schemas[claim.block])
            resources.weights.keep(claim.block, digest, tensors)
        for one in claim.record.inputs:
            resources.weights.forget(claim.block, one.payload_hash)
        log.info(
            "merged block=%d version=%d updates=%d hash=%s why=%r",
            claim.block, claim.version, len(record.inputs), digest[:12], claim.reason,
        )  # fmt: skip
        return True

    def _delete_old_snapshots(self, block: int, version: int) -> None:
        """The first stays: with the updates it gives all others again."""
        kept = self._resources.run.swarm.keep_snapshots
        if kept is None:
            return
        is_old = and_(
            SnapshotRow.block == block, SnapshotRow.version > 0, SnapshotRow.version <= version - kept
        )
        with self._resources.store.read() as session:
            # A row without bytes has no file any more.
            old = set(session.scalars(select(SnapshotRow.hash).where(is_old, SnapshotRow.num_bytes > 0)))
            used = set(
                session.scalars(select(SnapshotRow.hash).where(SnapshotRow.hash.in_(old), not_(is_old)))
            )
        for digest in old - used:
            self._resources.blobs.delete(snapshot_key(digest))
        # After the files: where a process dies in between, the next merge deletes them again.
        if old:
            with self._resources.store.write() as session:
                session.execute(sql_update(SnapshotRow).where(is_old).values(num_bytes=0))


def _report(
    session: Session, row: BlockRow, version: int, updates: Sequence[UpdateRow], now: float
) -> RoundReport:
    """What the round that ends with this merge was like, for status and curves."""
    refused = session.scalars(
        select(UpdateRow.held_against).where(
            UpdateRow.block == row.block,
            UpdateRow.round == row.version,
            UpdateRow.state == UpdateState.REFUSED,
        )
    ).all()
    losses = [update.loss for update in updates if update.loss is not None]
    outcomes = [merged_outcome(update.reason) for update in updates]
    return RoundReport(
        block=row.block,
        version=version,
        seconds=0.0 if row.begun is None else max(0.0, now - row.begun),
        on_time=outcomes.count(Outcome.ACCEPTED),
        late=outcomes.count(Outcome.LATE),
        refused=refused.count(True),
        unused=refused.count(False),
        # A refused one that was tried again was assigned work too.
        assigned=num_assignments(session, row.block, row.version, (*LIVE, AssignmentState.REFUSED)),
        mean_loss=sum(losses) / len(losses) if losses else None,
    )


def _input_record(update: UpdateRow, scale: float | None) -> MergeInputRecord:
    assert scale is not None
    return message_of(MergeInputRecord, update, scale=scale)
