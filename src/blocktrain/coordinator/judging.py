"""The judges' queue: lends revealed updates to judges, takes their evidence, writes the verdict.

The coordinator's own judge is a thread with a low priority; others come by HTTP and share the queue by
leases, so a judge that dies delays only what it held, and only until its lease ends. Requests never wait for
a judge. The decision is `validation.verdicts`'; here it is put together with lateness and probation, in one
transaction with its ledger entry, seed included.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.context import Context, frozen_of
from blocktrain.coordinator.decisions.commit_checks import ruling
from blocktrain.coordinator.decisions.deadlines import Lateness
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import counted_scores, note_verdict, standing_of
from blocktrain.coordinator.scoring import lower_priority
from blocktrain.coordinator.storage.ledger import receipt_of
from blocktrain.coordinator.storage.store import AssignmentRow, BlockRow, UpdateRow, WorkerRow
from blocktrain.coordinator.storage.weights import Weights
from blocktrain.coordinator.updates import count_verdict, running_median
from blocktrain.errors import BlocktrainError
from blocktrain.training.merge import RUNNING_MEDIAN_FACTOR
from blocktrain.training.snapshot import Tensors
from blocktrain.validation.evidence import Cost, evidence_seed, training_tokens
from blocktrain.validation.reputation import comparison
from blocktrain.validation.scorer import Scorer
from blocktrain.validation.tasks import applied, evidence_of, report_of, work_of
from blocktrain.validation.verdicts import Finding, evidence_finding, excused, probation_finding
from blocktrain.wire.messages import (
    ErrorReason,
    EvidenceReport,
    FrozenSnapshot,
    JudgeTask,
    JudgeWait,
    OperatorAnswer,
    Outcome,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
WAIT_SECONDS = 0.5
"""How long a judge with nothing to do is asked to wait."""

Told = Callable[[str, str], None]
"""Told of a verdict: outcome, reason."""
Merge = Callable[[], Tensors]
"""Makes a merge when it is wanted."""


class Judging:
    def __init__(
        self, context: Context, scorer: Scorer | None, told: Told = lambda outcome, reason: None
    ) -> None:
        self._context, self._told = context, told
        self._scorer = scorer
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._owner = secrets.token_hex(16)
        self.cost = Cost()

    @property
    def guards(self) -> bool:
        trust = self._context.run.recipe.trust
        return self._scorer is not None and trust.guard and trust.judge != "off"

    # --- the coordinator's own judge ---

    def run(self, stop: threading.Event) -> None:
        lower_priority()
        while not stop.is_set():
            seen = self._context.changes.count
            try:
                busy = self.judge_next()
            except Refusal as refusal:
                log.info("verdict came too late: %s", refusal)
                busy = True
            except BlocktrainError as error:
                log.error("cannot judge an update: %s", error)
                busy = False
            if not busy:
                self._context.changes.wait(seen, POLL_SECONDS)

    def judge_next(self) -> bool:
        """Judge the update that has waited longest; whether there was one."""
        assert self._scorer is not None
        task = self.lease(self._owner)
        if isinstance(task, JudgeWait):
            return False
        weights = self._context.weights
        base = weights.snapshot(task.block, task.head_hash)
        own_base = weights.snapshot(task.block, task.base_hash)
        decoded = weights.update(task.block, task.payload_hash)
        after = applied(self._context.run.codec, base, own_base, decoded, task.step)
        frozen = self._loaded(task.frozen)
        with self._lock:
            evidence = self._scorer.evidence(task.block, base, after, work_of(task), task.seed, frozen)
        self.report(self._owner, task.update_id, report_of(evidence))
        return True

    def _loaded(self, frozen: Iterable[FrozenSnapshot]) -> dict[int, Weights]:
        return {one.block: self._context.weights.snapshot(one.block, one.hash) for one in frozen}

    # --- the queue ---

    def lease(self, judge: str) -> JudgeTask | JudgeWait:
        now = self._context.clock()
        trust = self._context.run.recipe.trust
        with self._context.store.write() as session:
            row = session.scalars(
                select(UpdateRow)
                .where(
                    UpdateRow.state == "judging",
                    or_(
                        UpdateRow.judge_until.is_(None), UpdateRow.judge_until < now, UpdateRow.judge == judge
                    ),
                )
                .order_by(UpdateRow.reveal_sequence)
                .limit(1)
                .with_for_update(skip_locked=True)
            ).first()
            if row is None:
                return JudgeWait(seconds=WAIT_SECONDS)
            row.judge, row.judge_until = judge, now + trust.judge_lease_seconds
            return self._task(session, row)

    def _task(self, session: Session, row: UpdateRow) -> JudgeTask:
        run = self._context.run
        assignment = session.get(AssignmentRow, row.assignment_id)
        assert assignment is not None
        return JudgeTask(
            update_id=row.update_id,
            block=row.block,
            payload_hash=row.payload_hash,
            head_hash=self._context.block(session, row.block).head_hash,
            base_hash=row.base_hash,
            step=run.swarm.outer_lr * self._clip(session, row),
            shard=assignment.shard,
            first_step=assignment.round * run.swarm.steps_per_round,
            steps=run.swarm.steps_per_round,
            seed=self._seed(session, row),
            lease_seconds=run.recipe.trust.judge_lease_seconds,
            frozen=frozen_of(assignment),
        )

    def _clip(self, session: Session, row: UpdateRow) -> float:
        median = running_median(session, row.block)
        if not median or not row.norm:
            return 1.0
        return min(1.0, RUNNING_MEDIAN_FACTOR * median / row.norm)

    def _seed(self, session: Session, row: UpdateRow) -> int:
        commit = receipt_of(session, row.commit_sequence).entry_hash
        return evidence_seed(self._context.secret, row.update_id, commit) % (1 << 53)

    def lent_payload(self, judge: str, update_id: str) -> str:
        """Hash of the payload of an update that this judge holds."""
        with self._context.store.read() as session:
            row = session.get(UpdateRow, update_id)
            if row is None:
                raise Refusal(ErrorReason.NOT_FOUND, f"no update {update_id}")
            if row.state != "judging" or row.judge != judge:
                raise _lease_lost(update_id)
            return row.payload_hash

    # --- verdicts ---

    def report(self, judge: str, update_id: str, found: EvidenceReport) -> OperatorAnswer:
        """Write the verdict that follows from a judge's evidence."""
        now = self._context.clock()
        with self._context.store.write() as session:
            row = session.get(UpdateRow, update_id)
            if row is None:
                raise Refusal(ErrorReason.NOT_FOUND, f"no update {update_id}")
            worker = session.get(WorkerRow, row.worker_id, with_for_update=True, populate_existing=True)
            block = self._context.block(session, row.block, lock=True)
            session.refresh(row)
            if row.state != "judging" or row.judge != judge:
                raise _lease_lost(update_id)
            self._decide(session, worker, block, row, found, now)
            assert row.verdict_sequence is not None
            receipt = receipt_of(session, row.verdict_sequence)
            told = (row.state, row.reason or "")
            assignment = session.get(AssignmentRow, row.assignment_id)
            beside = 0 if assignment is None else len(frozen_of(assignment))
        if told[0] == Outcome.REFUSED:
            self._context.weights.forget(block.block, row.payload_hash)
        self._account(found.tokens, training_tokens(self._context.run.recipe, beside), 1)
        self._told(*told)
        self._context.changes.notify()
        return OperatorAnswer(receipt=receipt)

    def _account(self, judging: int, judged: int = 0, updates: int = 0) -> None:
        with self._counting:
            self.cost.judging += judging
            self.cost.judged += judged
            self.cost.updates += updates

    def _decide(
        self,
        session: Session,
        worker: WorkerRow | None,
        block: BlockRow,
        row: UpdateRow,
        found: EvidenceReport,
        now: float,
    ) -> None:
        evidence = evidence_of(found)
        seed = self._seed(session, row)
        finding = evidence_finding(evidence, counted_scores(session, row.block))
        if row.base_version < block.version:
            finding = excused(finding)
        row.score, row.gain = evidence.held_out.score, found.held_out.mean
        row.evidence = json.dumps({**found.model_dump(mode="json", exclude={"protocol"}), "seed": seed})
        if finding.counts and worker is not None:
            finding = self._on_probation(session, worker, row, now) or finding
        decision = self._with_lateness(block, row, finding)
        self._context.write_verdict(session, row, decision, now, {"evidence": json.loads(row.evidence)})
        if worker is not None:
            count_verdict(worker, decision.outcome)
            trust = self._context.run.recipe.trust
            ledger = self._context.ledger
            compared = comparison(evidence.mark, row.norm, running_median(session, row.block))
            note_verdict(session, ledger, trust, worker, row, finding.mark, compared, now)

    def _on_probation(
        self, session: Session, worker: WorkerRow, row: UpdateRow, now: float
    ) -> Finding | None:
        if worker.established:
            return None
        lease = self._context.run.swarm.lease_seconds
        others = session.scalars(
            select(WorkerRow.worker_id).where(
                WorkerRow.block == row.block,
                WorkerRow.established.is_(True),
                WorkerRow.last_seen > now - lease,
            )
        )
        good = standing_of(worker).good_verdicts + 1
        needed = self._context.run.recipe.trust.probation_verdicts
        return probation_finding(good, needed, others.first() is not None)

    def _with_lateness(self, block: BlockRow, row: UpdateRow, finding: Finding) -> Lateness:
        """A judge that took long makes an update late; that is not its worker's fault, nor its merit."""
        if not finding.counts:
            return Lateness(Outcome.REFUSED, 0.0, finding.reason, finding.sentence)
        swarm = self._context.run.swarm
        head = block.version if block.closing_version is None else block.closing_version
        late = ruling(head - row.base_version, head >= swarm.rounds, None, swarm)
        return Lateness(late.outcome, late.weight, late.reason, f"{late.sentence}; {finding.sentence}")

    # --- the guard ---

    def guard(
        self, block: int, version: int, base_hash: str, candidates: Sequence[Merge], merged: int
    ) -> list[list[float]]:
        """What merges of some of these updates do to held-out loss, window by window, before one of them is
        published; they are made one at a time."""
        assert self._scorer is not None
        seed = evidence_seed(self._context.secret, f"guard/{block}/{version}", base_hash)
        base = self._context.weights.snapshot(block, base_hash)
        frozen = self._heads_beside(block, version)
        budget = self._scorer.budget(len(frozen))
        windows = budget.guard_windows(merged, len(candidates))
        with self._lock:
            made = (merge() for merge in candidates)
            found = self._scorer.guard(block, base, made, windows, seed, frozen)
        self._account(budget.guard_forwards(len(candidates)) * windows * budget.length)
        return found

    def _heads_beside(self, block: int, version: int) -> dict[int, Weights]:
        """A merge joins updates that were trained beside different versions; it will be used beside the
        newest."""
        with self._context.store.read() as session:
            heads = self._context.frozen(session, block, version - 1)
        return self._loaded(heads)


def _lease_lost(update_id: str) -> Refusal:
    return Refusal(
        ErrorReason.LEASE_LOST,
        f"update {update_id[:12]} is judged, or lent to another judge by now",
        "ask for another task",
    )
