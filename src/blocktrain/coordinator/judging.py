"""The judges' queue: lends revealed updates to judges, takes their evidence, writes the verdict.

The coordinator's own judge is a thread with a low priority; others come by HTTP and share the queue by
leases, so a judge that dies delays only what it held, and only until its lease ends. Requests never wait for
a judge. The decision is `validation.ruling`'s; the verdict's ledger entry holds the evidence and its seed.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
from collections.abc import Iterable, Sequence

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.decisions.merging import merging_weight
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import standing_of
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import UpdateState
from blocktrain.coordinator.storage.ledger import receipt_of
from blocktrain.coordinator.storage.queries import (
    block_row,
    frozen_heads,
    frozen_of,
    held_out_losses,
    live_since,
    recent_scores,
    running_median,
    tries_in_vain,
)
from blocktrain.coordinator.storage.store import AssignmentRow, UpdateRow, WorkerRow, message_of
from blocktrain.coordinator.storage.weights import Weights
from blocktrain.coordinator.verdicts import ruling_by_age, settle
from blocktrain.training.merge import RUNNING_MEDIAN_FACTOR
from blocktrain.validation.evidence import Cost, evidence_of, evidence_seed, report_of, training_tokens
from blocktrain.validation.reputation import comparison
from blocktrain.validation.ruling import evidence_ruling, judged_ruling, probation_ruling
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.codec import Tensors
from blocktrain.wire.messages import (
    ErrorReason,
    EvidenceReport,
    FrozenSnapshot,
    JudgeTask,
    JudgeWait,
    OperatorAnswer,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.5
"""How long a judge with nothing to do is asked to wait."""


class Judging:
    def __init__(self, resources: Resources, scorer: Scorer | None) -> None:
        self._resources, self._scorer = resources, scorer
        self._scoring, self._counting = threading.Lock(), threading.Lock()
        self._judge = secrets.token_hex(16)
        self.cost = Cost()

    @property
    def guards(self) -> bool:
        trust = self._resources.run.recipe.trust
        return self._scorer is not None and trust.guard and trust.judge != "off"

    # --- the coordinator's own judge ---

    def judge_next(self) -> bool:
        """Judge the update that has waited longest; whether there was one."""
        assert self._scorer is not None
        task = self.lease(self._judge)
        if isinstance(task, JudgeWait):
            return False
        try:
            weights = self._resources.weights
            base = weights.snapshot(task.block, task.head_hash)
            own_base = weights.snapshot(task.block, task.base_hash)
            decoded = weights.update(task.block, task.payload_hash)
            codec, frozen = self._resources.run.codec, self._loaded(task.frozen)
            with self._scoring:
                evidence = self._scorer.judge(task, codec, base, own_base, decoded, frozen)
            self.report(self._judge, task.update_id, report_of(evidence))
        except Refusal as refusal:
            log.info("verdict came too late: %s", refusal)
        except Exception:
            # It keeps its lease, without a judge, so that those behind it come first; it is tried again when
            # the lease ends. One update that no memory is enough for must not stop the queue.
            with self._resources.store.write() as session:
                row = session.get(UpdateRow, task.update_id)
                if row is not None and row.judge == self._judge:
                    row.judge = None
            raise
        return True

    def _loaded(self, frozen: Iterable[FrozenSnapshot]) -> dict[int, Weights]:
        return {one.block: self._resources.weights.snapshot(one.block, one.hash) for one in frozen}

    # --- the queue ---

    def lease(self, judge: str) -> JudgeTask | JudgeWait:
        now, run = self._resources.clock(), self._resources.run
        with self._resources.store.write() as session:
            # The oldest that nobody holds. A judge that asks again gets what it already has: it has started
            # over, and its first lease would otherwise have to end before anybody may judge that update.
            row = session.scalars(
                select(UpdateRow)
                .where(
                    UpdateRow.state == UpdateState.JUDGING,
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
            row.judge, row.judge_until = judge, now + run.recipe.trust.judge_lease_seconds
            assignment = session.get(AssignmentRow, row.assignment_id)
            assert assignment is not None
            # Judged as it will be merged: alone, clipped to the running median, and with less weight where a
            # serial run has begun to diverge.
            losses = held_out_losses(session) if run.objective.is_serial else ()
            weight = merging_weight(run.swarm.outer_lr, losses)
            median = running_median(session, row.block)
            clip = min(1.0, RUNNING_MEDIAN_FACTOR * median / row.norm) if median and row.norm else 1.0
            return message_of(
                JudgeTask,
                row,
                head_hash=block_row(session, row.block).head_hash,
                step=weight * clip,
                shard=assignment.shard,
                first_step=assignment.round * run.swarm.steps_per_round,
                steps=run.swarm.steps_per_round,
                seed=self._seed(session, row),
                lease_seconds=run.recipe.trust.judge_lease_seconds,
                frozen=frozen_of(assignment),
            )

    def _seed(self, session: Session, row: UpdateRow) -> int:
        """From the commit: the worker cannot choose an update to fit it. 53 bits survive JSON."""
        commit = receipt_of(session, row.commit_sequence).entry_hash
        return evidence_seed(self._resources.secret, row.update_id, commit) % (1 << 53)

    def lent_payload(self, judge: str, update_id: str) -> str:
        """Hash of the payload of an update that this judge holds."""
        with self._resources.store.read() as session:
            return _held_by(session, judge, update_id).payload_hash

    # --- verdicts ---

    def report(self, judge: str, update_id: str, found: EvidenceReport) -> OperatorAnswer:
        """Write the verdict that follows from a judge's evidence."""
        now, run = self._resources.clock(), self._resources.run
        swarm, trust = run.swarm, run.recipe.trust
        with self._resources.store.write() as session:
            row = _held_by(session, judge, update_id)
            worker = session.get(WorkerRow, row.worker_id, with_for_update=True, populate_existing=True)
            block = block_row(session, row.block, lock=True)
            session.refresh(row)
            row = _held_by(session, judge, update_id)  # again: under the locks it may be another's by now
            # The evidence decides; then probation, for who is new; then the age that it has by now.
            evidence = evidence_of(found)
            ruling = evidence_ruling(
                evidence,
                recent_scores(session, row.block, established=False),
                late=row.base_version < block.version,
                refining=run.objective.is_serial,
                in_vain=tries_in_vain(session, row),
            )
            gain = evidence.gain
            row.score, row.gain = gain.score, gain.mean if math.isfinite(gain.mean) else None
            # The ledger speaks of clusters only where blocks have some.
            absent = {name for name in ("own", "rest") if getattr(found, name) is None}
            recorded = found.model_dump(mode="json", exclude={"protocol", *absent})
            recorded["seed"] = self._seed(session, row)
            row.evidence = json.dumps(recorded)
            # A newcomer's update is scored and not merged while others on the block are established. Its mark
            # is that of an update that counted, which is how it gets off probation.
            if ruling.counts and worker is not None and not worker.established:
                others = session.scalars(
                    select(WorkerRow.worker_id).where(
                        WorkerRow.block == row.block,
                        WorkerRow.established.is_(True),
                        WorkerRow.last_seen > live_since(now, swarm),
                    )
                )
                good = standing_of(worker).good_verdicts + 1
                needed, established = trust.probation_verdicts, others.first() is not None
                ruling = probation_ruling(good, needed, established) or ruling
            settle(
                self._resources,
                session,
                worker,
                row,
                judged_ruling(ruling, ruling_by_age(block, row, swarm)),
                now,
                evidence=recorded,
                compared=comparison(evidence.mark, row.norm, running_median(session, row.block)),
            )
            assert row.verdict_sequence is not None
            receipt = receipt_of(session, row.verdict_sequence)
            before, behind = run.objective.upstream(row.block), run.objective.downstream(row.block)
        # Judges and guard cost at most 9.9 % of what they judged in the suite of attacks; /metrics has it.
        with self._counting:
            self.cost.judging += found.tokens
            self.cost.judged += training_tokens(run.recipe, len(before), len(behind))
            self.cost.updates += 1
        return OperatorAnswer(receipt=receipt)

    # --- the guard ---

    def guard(
        self,
        block: int,
        version: int,
        base_hash: str,
        merges: Iterable[Tensors],
        sizes: Sequence[int],
    ) -> list[list[float]]:
        """What merges of some of these updates gain on the judge's text, window by window, before one of them
        is published. `sizes` is how many updates each merge has, the largest first."""
        assert self._scorer is not None
        resources = self._resources
        seed = evidence_seed(resources.secret, f"guard/{block}/{version}", base_hash)
        base = resources.weights.snapshot(block, base_hash)
        # Updates were trained beside different versions of other blocks; the merge is used beside the newest.
        with resources.store.read() as session:
            heads = frozen_heads(session, resources.run, block)
        frozen = self._loaded(heads)
        budget = self._scorer.budget(block)
        windows = budget.guard_windows(sizes[0], len(sizes))
        with self._scoring:
            found = self._scorer.guard(block, base, merges, windows, seed, frozen)
        with self._counting:
            self.cost.judging += budget.guard_forwards(len(sizes)) * windows * budget.length
        return found


def _held_by(session: Session, judge: str, update_id: str) -> UpdateRow:
    """The update, if this judge has it on lease and it has no verdict yet."""
    row = session.get(UpdateRow, update_id)
    if row is None:
        raise Refusal(ErrorReason.NOT_FOUND, f"no update {update_id}")
    if row.state != UpdateState.JUDGING or row.judge != judge:
        raise Refusal(
            ErrorReason.LEASE_LOST,
            f"update {update_id[:12]} is judged, or lent to another judge by now",
            "ask for another task",
        )
    return row
