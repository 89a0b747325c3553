"""Commit and reveal: the life of an update from a promise to a verdict.

The payload is stored before the row that says so, and the verdict is answered only after its transaction:
what was acknowledged survives `kill -9`, and a repeated request finds what the first one did.

Covered: bytes of any length and content, twice, late, or for another round. Not covered: whether the
update helps; that is the judge's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.assignments import Assignments
from blocktrain.coordinator.context import Context
from blocktrain.coordinator.decisions.commit_checks import (
    AssignmentView,
    commit_refusal,
    length_refusal,
    malformed,
    norm_problem,
    norm_remark,
    ruling,
)
from blocktrain.coordinator.decisions.deadlines import Lateness, own_share
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import note_verdict
from blocktrain.coordinator.storage.blobs import PRESIGNED_SECONDS, payload_key, upload_key
from blocktrain.coordinator.storage.ledger import receipt_of
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    MergeRow,
    SnapshotRow,
    UpdateRow,
    WorkerRow,
)
from blocktrain.training.merge import update_norm
from blocktrain.training.update import delta_of
from blocktrain.validation.duplicates import Sketch, most_alike, sketch_of
from blocktrain.validation.evidence import evidence_seed
from blocktrain.validation.reputation import Mark
from blocktrain.validation.verdicts import Finding, duplicate_finding, norm_finding, schedule_factor
from blocktrain.wire.codec import FrameError, FrameReason, decode
from blocktrain.wire.hashing import canonical_json, content_hash
from blocktrain.wire.identity import WorkerId
from blocktrain.wire.messages import (
    MAX_COUNT,
    MAX_SECONDS,
    Account,
    CommitAnswer,
    CommitRequest,
    ErrorReason,
    Outcome,
    Traffic,
    Upload,
    Verdict,
    VerdictReason,
)

UPLOAD_SECONDS = 3600
COUNTED_NORMS = 32
"""Merged updates of a block whose norms make its running median."""
MEDIAN_ROUNDS = 16
"""Rounds behind that median, about; their highest learning rate is what a norm is compared with."""
COMPARED_SKETCHES = 64
"""Earlier updates of a block in which a copy's source is looked for."""


@dataclass(frozen=True)
class Expected:
    """A payload that was committed; `verdict` where it has already arrived."""

    update_id: str
    block: int
    base_hash: str
    payload_hash: str
    payload_bytes: int
    verdict: Verdict | None


@dataclass(frozen=True)
class Decoded:
    """What reading a payload brought to light."""

    norm: float | None
    problem: Lateness | None
    sketch: Sketch | None = None
    """Only where updates are judged."""


class Updates:
    def __init__(self, context: Context, assignments: Assignments) -> None:
        self._context, self._assignments = context, assignments

    # --- commit ---

    def commit(self, worker_id: WorkerId, assignment_id: str, request: CommitRequest) -> CommitAnswer:
        now = self._context.clock()
        with self._context.store.write() as session:
            worker = self._context.worker(session, worker_id, now)
            assignment = self._assignments.own(session, worker_id, assignment_id)
            block = self._context.block(session, assignment.block)
            earlier = self._update_of(session, assignment_id)
            base_version = self._base_version(session, assignment.block, request.base_hash)
            view = self._view(session, assignment, block, earlier, base_version)
            if (refusal := commit_refusal(view, request)) is not None:
                raise refusal
            if earlier is None:
                assert base_version is not None
                earlier = self._promise(session, worker, assignment, base_version, request, now)
            seats = self._context.seats(session, now).get(block.block, 0)
            state, _ = self._context.round(session, block, seats, now)
            return CommitAnswer(
                update_id=earlier.update_id,
                receipt=receipt_of(session, earlier.commit_sequence),
                upload=self._upload(earlier),
                deadline=state.deadline,
                verdict=self._verdict(session, earlier),
            )

    def _update_of(self, session: Session, assignment_id: str) -> UpdateRow | None:
        return session.scalars(select(UpdateRow).where(UpdateRow.assignment_id == assignment_id)).first()

    def _base_version(self, session: Session, block: int, base_hash: str) -> int | None:
        return session.scalar(
            select(func.max(SnapshotRow.version)).where(
                SnapshotRow.block == block, SnapshotRow.hash == base_hash
            )
        )

    def _view(
        self,
        session: Session,
        assignment: AssignmentRow,
        block: BlockRow,
        earlier: UpdateRow | None,
        base_version: int | None,
    ) -> AssignmentView:
        same_base = select(UpdateRow.update_id).where(
            UpdateRow.worker_id == assignment.worker_id,
            UpdateRow.block == assignment.block,
            UpdateRow.base_version == base_version,
            UpdateRow.assignment_id != assignment.assignment_id,
            UpdateRow.state.not_in(("withheld", "refused")),
        )
        return AssignmentView(
            block=assignment.block,
            round=assignment.round,
            returned=assignment.state not in ("leased", "committed"),
            committed_hash=None if earlier is None else earlier.payload_hash,
            payload_bytes=self._context.run.payload_bytes(assignment.block),
            base_version=base_version,
            base_used=session.scalars(same_base.limit(1)).first() is not None,
            head_version=block.version,
        )

    def _promise(
        self,
        session: Session,
        worker: WorkerRow,
        assignment: AssignmentRow,
        base_version: int,
        request: CommitRequest,
        now: float,
    ) -> UpdateRow:
        body = {
            "assignment_id": assignment.assignment_id,
            "worker_id": assignment.worker_id,
            "block": assignment.block,
            "round": assignment.round,
            "base_hash": request.base_hash,
            "payload_hash": request.payload_hash,
            "payload_bytes": request.payload_bytes,
        }
        update_id = content_hash(canonical_json({"run": self._context.run.run_id, **body}))
        row = UpdateRow(
            update_id=update_id,
            base_version=base_version,
            loss=request.loss,
            committed=now,
            state="committed",
            weight=0.0,
            **body,
        )
        assignment.state = "committed"
        if request.account is not None:
            worker.account = _sum(worker.account, request.account)
        receipt = self._context.ledger.append(session, now, "commit", {"update_id": update_id, **body})
        row.commit_sequence = receipt.sequence
        session.add(row)
        session.flush()
        return row

    def _upload(self, row: UpdateRow) -> Upload:
        if self._context.blobs.shared:
            url = self._context.blobs.presigned_put(upload_key(row.update_id))
            return Upload(url=url, presigned=True, expires_seconds=PRESIGNED_SECONDS)
        path = f"/v1/updates/{row.payload_hash}"
        return Upload(url=path, presigned=False, expires_seconds=UPLOAD_SECONDS)

    # --- reveal ---

    def expect(self, worker_id: WorkerId, payload_hash: str, content_length: int | None) -> Expected:
        """What may be sent under this hash, before a byte of it is read."""
        with self._context.store.read() as session:
            row = self._committed(session, worker_id, payload_hash)
            expected = Expected(
                row.update_id,
                row.block,
                row.base_hash,
                row.payload_hash,
                row.payload_bytes,
                self._verdict(session, row),
            )
        if content_length is not None and (refusal := length_refusal(expected.payload_bytes, content_length)):
            raise refusal
        return expected

    def _committed(self, session: Session, worker_id: WorkerId, payload_hash: str) -> UpdateRow:
        """The oldest commit of this payload that still waits for it; else the newest that had it."""
        rows = session.scalars(
            select(UpdateRow)
            .where(
                UpdateRow.worker_id == worker_id,
                UpdateRow.payload_hash == payload_hash,
                UpdateRow.state != "withheld",
            )
            .order_by(UpdateRow.commit_sequence)
        ).all()
        if not rows:
            raise Refusal(
                ErrorReason.NOT_COMMITTED,
                f"no commit of this worker for payload {payload_hash[:12]}…",
                "POST /v1/assignments/{id}/commit first",
            )
        return next((row for row in rows if row.state == "committed"), rows[-1])

    def reveal(self, expected: Expected, body: IO[bytes], found_hash: str) -> Verdict:
        """The verdict on a payload that came as a request body, its length and hash taken as it came."""
        _refuse_other_payload(expected, found_hash)
        body.seek(0)
        payload = body.read()
        self._context.blobs.put(payload_key(expected.payload_hash), payload)
        return self._judge(expected, payload)

    def uploaded(self, worker_id: WorkerId, payload_hash: str) -> Verdict:
        """The verdict on a payload that was put into the shared blob store by presigned URL."""
        expected = self.expect(worker_id, payload_hash, None)
        if expected.verdict is not None:
            return expected.verdict
        blobs, key = self._context.blobs, upload_key(expected.update_id)
        size = blobs.size(key)
        if size is None:
            raise Refusal(
                ErrorReason.NOT_UPLOADED, "there is no object at the upload place", "PUT the payload first"
            )
        if refusal := length_refusal(expected.payload_bytes, size):
            blobs.delete(key)
            raise refusal
        payload = b"".join(_at_most(blobs.pieces(key), expected.payload_bytes))
        _refuse_other_payload(expected, content_hash(payload))
        blobs.put(payload_key(payload_hash), payload)
        verdict = self._judge(expected, payload)
        blobs.delete(key)
        return verdict

    def _judge(self, expected: Expected, payload: bytes) -> Verdict:
        decoded = self._decode(expected, payload)
        copied = self._copied(expected, decoded)
        now = self._context.clock()
        with self._context.store.write() as session:
            row = session.get(UpdateRow, expected.update_id)
            assert row is not None
            worker = self._context.worker(session, WorkerId(row.worker_id), now)
            block = self._context.block(session, row.block, lock=True)
            session.refresh(row)
            if row.state == "committed":
                self._rule(session, worker, block, row, decoded, copied, now)
            verdict = self._verdict(session, row)
        if verdict is None:
            raise Refusal(ErrorReason.NOT_COMMITTED, "the assignment was given up meanwhile")
        if verdict.outcome == Outcome.REFUSED:
            self._context.weights.forget(expected.block, expected.payload_hash)
        self._context.changes.notify()
        return verdict

    def _decode(self, expected: Expected, payload: bytes) -> Decoded:
        run, weights = self._context.run, self._context.weights
        try:
            tensors = decode(run.codec, run.schemas[expected.block], payload)
        except FrameError as error:
            reason = (
                VerdictReason.NOT_FINITE
                if error.reason == FrameReason.NOT_FINITE
                else VerdictReason.MALFORMED
            )
            return Decoded(None, malformed(error.sentence, reason))
        base = weights.snapshot(expected.block, expected.base_hash) if run.codec.sends_weights else {}
        norm = update_norm(run.codec, tensors, base)
        problem = norm_problem(norm)
        if problem is None:
            weights.keep(expected.block, expected.payload_hash, tensors)
        if problem is not None:
            return Decoded(None, problem)
        sketch = None
        if self._context.judged:
            seed = evidence_seed(self._context.secret, f"sketch/{expected.block}", run.run_id)
            sketch = sketch_of(delta_of(run.codec, tensors, base), seed, run.codec)
        return Decoded(norm, None, sketch)

    def _rule(
        self,
        session: Session,
        worker: WorkerRow,
        block: BlockRow,
        row: UpdateRow,
        decoded: Decoded,
        copied: Finding | None,
        now: float,
    ) -> None:
        """A round that is being merged is over: what arrives now is one version later."""
        head = block.version if block.closing_version is None else block.closing_version
        swarm = self._context.run.swarm
        decision = ruling(head - row.base_version, head >= swarm.rounds, decoded.problem, swarm)
        row.norm = decoded.norm
        row.revealed, row.offset = now, self._offset(session, block, row, now)
        self._record_reveal(session, row, now)
        if not self._context.judged:
            if decision.outcome == Outcome.REFUSED:
                assignment = session.get(AssignmentRow, row.assignment_id)
                assert assignment is not None
                assignment.state = "refused"
            count_verdict(worker, decision.outcome)
            self._context.write_verdict(session, row, decision, now, self._remark(session, row))
            return
        finding = None if decoded.norm is None else copied or self._unusual(session, row, decoded.norm)
        if decision.outcome != Outcome.REFUSED and finding is None:
            row.state, row.sketch = "judging", None if decoded.sketch is None else decoded.sketch.to_bytes()
            return
        if decision.outcome != Outcome.REFUSED and finding is not None:
            decision = Lateness(Outcome.REFUSED, 0.0, finding.reason, finding.sentence)
        mark = finding.mark if finding is not None else Mark.NEUTRAL
        if decoded.problem is not None:
            mark = Mark.BAD
        self._refuse(session, worker, row, decision, mark, now)

    def _refuse(
        self,
        session: Session,
        worker: WorkerRow,
        row: UpdateRow,
        decision: Lateness,
        mark: Mark,
        now: float,
    ) -> None:
        count_verdict(worker, decision.outcome)
        self._context.write_verdict(session, row, decision, now, {})
        ledger, trust = self._context.ledger, self._context.run.recipe.trust
        note_verdict(session, ledger, trust, worker, row, mark, None, now)

    def _copied(self, expected: Expected, decoded: Decoded) -> Finding | None:
        """Whether an update that was committed earlier is in this one."""
        if decoded.sketch is None:
            return None
        with self._context.store.read() as session:
            own = session.get(UpdateRow, expected.update_id)
            assert own is not None
            rows = session.execute(
                select(UpdateRow.update_id, UpdateRow.sketch)
                .where(
                    UpdateRow.block == expected.block,
                    UpdateRow.sketch.is_not(None),
                    UpdateRow.commit_sequence < own.commit_sequence,
                )
                .order_by(UpdateRow.commit_sequence.desc())
                .limit(COMPARED_SKETCHES)
            )
            earlier = [(name, Sketch.from_bytes(data)) for name, data in rows if data is not None]
        found = most_alike(decoded.sketch, earlier)
        return None if found is None else duplicate_finding(*found)

    def _unusual(self, session: Session, row: UpdateRow, norm: float) -> Finding | None:
        recipe = self._context.run.recipe
        earlier = max(0, row.base_version - MEDIAN_ROUNDS)
        peak = max(schedule_factor(recipe, round_) for round_ in range(earlier, row.base_version + 1))
        fading = schedule_factor(recipe, row.base_version) / peak if peak > 0 else 1.0
        return norm_finding(norm, running_median(session, row.block), recipe.trust, fading)

    def _offset(self, session: Session, block: BlockRow, row: UpdateRow, now: float) -> float | None:
        if row.base_version == block.version:
            begun = block.begun
        else:
            merged = session.get(MergeRow, (row.block, row.base_version + 1))
            begun = merged.begun if merged is not None else None
        assignment = session.get(AssignmentRow, row.assignment_id)
        assert assignment is not None
        if begun is None:
            return None
        if self._tried_before(session, assignment):
            begun = max(begun, assignment.made)
        return max(0.0, now - begun) * own_share(assignment.stand_in_steps, self._context.run.swarm)

    def _tried_before(self, session: Session, assignment: AssignmentRow) -> bool:
        """Whether this is a second try of a round: the wait between the two is no measure of work."""
        refused = select(AssignmentRow.assignment_id).where(
            AssignmentRow.worker_id == assignment.worker_id,
            AssignmentRow.block == assignment.block,
            AssignmentRow.round == assignment.round,
            AssignmentRow.state == "refused",
        )
        return session.scalars(refused.limit(1)).first() is not None

    def _record_reveal(self, session: Session, row: UpdateRow, now: float) -> None:
        reveal = {
            "update_id": row.update_id,
            "payload_hash": row.payload_hash,
            "payload_bytes": row.payload_bytes,
        }
        row.reveal_sequence = self._context.ledger.append(session, now, "reveal", reveal).sequence

    def _remark(self, session: Session, row: UpdateRow) -> dict[str, Any]:
        remark = None if row.norm is None else norm_remark(row.norm, running_median(session, row.block))
        return {} if remark is None else {"remark": remark}

    def verdict(self, worker_id: WorkerId, payload_hash: str) -> Verdict:
        """What has become of a payload so far."""
        with self._context.store.read() as session:
            verdict = self._verdict(session, self._committed(session, worker_id, payload_hash))
        if verdict is None:
            raise Refusal(ErrorReason.NOT_UPLOADED, "the payload has not arrived yet", "send it first")
        return verdict

    def _verdict(self, session: Session, row: UpdateRow) -> Verdict | None:
        if row.state == "judging":
            return self._pending_verdict(session, row)
        if row.verdict_sequence is None:
            return None
        block = self._context.block(session, row.block)
        state = row.state if row.state != "merged" else ("accepted" if row.weight == 1.0 else "late")
        return Verdict(
            update_id=row.update_id,
            outcome=Outcome(state),
            weight=row.weight,
            reason=VerdictReason(row.reason or ""),
            sentence=row.sentence or "",
            norm=row.norm,
            head_version=block.version,
            head_hash=block.head_hash,
            receipt=receipt_of(session, row.verdict_sequence),
        )

    def _pending_verdict(self, session: Session, row: UpdateRow) -> Verdict:
        assert row.reveal_sequence is not None
        block = self._context.block(session, row.block)
        return Verdict(
            update_id=row.update_id,
            outcome=Outcome.PENDING,
            weight=0.0,
            reason=VerdictReason.JUDGING,
            sentence="arrived; a judge will score it before it counts",
            norm=row.norm,
            head_version=block.version,
            head_hash=block.head_hash,
            receipt=receipt_of(session, row.reveal_sequence),
        )


def running_median(session: Session, block: int) -> float | None:
    """Median norm of the last merged updates of a block; None before its first merge."""
    norms = [
        norm
        for norm in session.scalars(
            select(UpdateRow.norm)
            .where(UpdateRow.block == block, UpdateRow.state == "merged")
            .order_by(UpdateRow.merge_version.desc(), UpdateRow.update_id)
            .limit(COUNTED_NORMS)
        )
        if norm is not None
    ]
    return statistics.median(norms) if norms else None


def _refuse_other_payload(expected: Expected, found: str) -> None:
    if found != expected.payload_hash:
        raise Refusal(
            ErrorReason.HASH_MISMATCH,
            f"expected a payload with blake3 {expected.payload_hash}, found {found}",
            "send the bytes that were committed",
        )


def _at_most(pieces: Iterator[bytes], limit: int) -> Iterator[bytes]:
    """Stop reading an object that grew since its size was asked for."""
    for piece in pieces:
        limit -= len(piece)
        yield piece
        if limit < 0:
            return


def count_verdict(worker: WorkerRow, outcome: Outcome) -> None:
    name = str(outcome)
    setattr(worker, name, getattr(worker, name) + 1)


def _sum(stored: str, reported: Account) -> str:
    """What a worker's commits reported, added up."""
    old = Account.model_validate_json(stored)
    return Account(
        seconds_computing=min(MAX_SECONDS, old.seconds_computing + reported.seconds_computing),
        seconds_transferring=min(MAX_SECONDS, old.seconds_transferring + reported.seconds_transferring),
        seconds_waiting=min(MAX_SECONDS, old.seconds_waiting + reported.seconds_waiting),
        up=_sum_traffic(old.up, reported.up),
        down=_sum_traffic(old.down, reported.down),
    ).model_dump_json()


def _sum_traffic(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(
        payload=min(MAX_COUNT, one.payload + other.payload),
        snapshot=min(MAX_COUNT, one.snapshot + other.snapshot),
        control=min(MAX_COUNT, one.control + other.control),
    )
