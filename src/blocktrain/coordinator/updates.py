"""Commit and reveal: the life of an update from a promise to the judges' queue.

The payload is stored before the row that says so, and the verdict is answered only after its transaction:
what was acknowledged survives `kill -9`, and a repeated request finds what the first one did.

Covered: bytes of any length and content, twice, late, or for another round. Not covered: whether the
update helps; that is the judge's.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial

from sqlalchemy import BindParameter, bindparam, func, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.assignments import own_assignment
from blocktrain.coordinator.decisions.commit_checks import (
    AssignmentView,
    commit_refusal,
    hash_refusal,
    length_refusal,
)
from blocktrain.coordinator.decisions.rounds import own_share
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reputation_rows import present_worker
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import LIVE, WAITING, AssignmentState, UpdateState, change, merged_outcome
from blocktrain.coordinator.storage.blobs import PRESIGNED_SECONDS, part_lengths, payload_key, upload_key
from blocktrain.coordinator.storage.ledger import receipt_of
from blocktrain.coordinator.storage.queries import block_row, inputs_of_merge, running_median
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    MergeRow,
    Prepared,
    SnapshotRow,
    UpdateRow,
    WorkerRow,
    message_of,
)
from blocktrain.coordinator.storage.weights import Weights
from blocktrain.coordinator.verdicts import ruling_by_age, settle
from blocktrain.training.merge import update_norm
from blocktrain.training.update import delta_of
from blocktrain.validation.duplicates import Sketch, most_alike, sketch_of
from blocktrain.validation.evidence import evidence_seed
from blocktrain.validation.ruling import (
    Mark,
    Ruling,
    duplicate_ruling,
    fading_of,
    norm_ruling,
    overflow_ruling,
    reveal_ruling,
)
from blocktrain.wire.byte_source import ByteSource
from blocktrain.wire.chunks import FrameReason
from blocktrain.wire.codec import FrameError, UpdateFrame, Values, decode, held
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
    Upload,
    Verdict,
    VerdictReason,
)

_WORKER: BindParameter[str] = bindparam("worker")
_BLOCK: BindParameter[int] = bindparam("block")
_OF_ASSIGNMENT = Prepared(
    select(UpdateRow.update_id).where(UpdateRow.assignment_id == bindparam("assignment"))
)
_VERSION_OF_HASH = Prepared(
    select(func.max(SnapshotRow.version)).where(
        SnapshotRow.block == _BLOCK, SnapshotRow.hash == bindparam("hash")
    )
)
# One update per worker and base: leases of several rounds must not become several votes.
_SAME_BASE = Prepared(
    select(UpdateRow.update_id)
    .where(
        UpdateRow.worker_id == _WORKER,
        UpdateRow.block == _BLOCK,
        UpdateRow.base_version == bindparam("base_version"),
        UpdateRow.assignment_id != bindparam("assignment"),
        UpdateRow.state.not_in((UpdateState.WITHHELD, UpdateState.REFUSED)),
    )
    .limit(1)
)
_OF_PAYLOAD = Prepared(
    select(UpdateRow.update_id, UpdateRow.state)
    .where(
        UpdateRow.worker_id == _WORKER,
        UpdateRow.payload_hash == bindparam("hash"),
        UpdateRow.state != UpdateState.WITHHELD,
    )
    .order_by(UpdateRow.commit_sequence)
)
_EARLIER_TRY = Prepared(
    select(AssignmentRow.assignment_id)
    .where(
        AssignmentRow.worker_id == _WORKER,
        AssignmentRow.block == _BLOCK,
        AssignmentRow.round == bindparam("round"),
        AssignmentRow.state == AssignmentState.REFUSED,
    )
    .limit(1)
)
_STATE = Prepared(select(UpdateRow.state).where(UpdateRow.update_id == bindparam("update")))
_LENT = Prepared(
    select(AssignmentRow.made, AssignmentRow.stand_in_steps).where(
        AssignmentRow.assignment_id == bindparam("assignment")
    )
)
UPLOAD_SECONDS = 3600
COMPARED_SKETCHES = 64
"""Earlier updates of a block in which a copy's source is looked for."""


@dataclass(frozen=True)
class Expected:
    """A payload that was committed; `verdict` where it has already arrived."""

    update_id: str
    worker_id: str
    block: int
    base_hash: str
    payload_hash: str
    payload_bytes: int
    commit_sequence: int
    verdict: Verdict | None


@dataclass(frozen=True)
class Decoded:
    """What reading a payload showed."""

    unreadable: Ruling | None = None
    """The refusal of a frame that cannot be read or merged."""
    norm: float | None = None
    sketch: Sketch | None = None
    """Only where updates are judged."""
    copied: Ruling | None = None
    """The refusal of a copy of an update that was committed earlier."""


class Updates:
    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    # --- commit ---

    def commit(self, worker_id: WorkerId, assignment_id: str, request: CommitRequest) -> CommitAnswer:
        resources, now = self._resources, self._resources.clock()
        run = resources.run
        with resources.store.write() as session, session.no_autoflush:
            worker = present_worker(session, worker_id, now)
            assignment = own_assignment(session, worker_id, assignment_id)
            block = block_row(session, assignment.block)
            values = {"worker": worker_id, "assignment": assignment_id, "block": block.block}
            found = _OF_ASSIGNMENT(session, assignment=assignment_id)
            row = session.get_one(UpdateRow, found[0][0]) if found else None
            [(base_version,)] = _VERSION_OF_HASH(session, block=block.block, hash=request.base_hash)
            used = _SAME_BASE(session, **values, base_version=base_version)
            view = AssignmentView(
                block=block.block,
                round=assignment.round,
                returned=assignment.state not in LIVE,
                committed_hash=None if row is None else row.payload_hash,
                payload_bytes=run.payload_bytes(block.block),
                base_version=base_version,
                base_used=bool(used),
                head_version=block.version,
            )
            if (refusal := commit_refusal(view, request)) is not None:
                raise refusal
            # A repeated commit finds its row: the receipt is the first one's, and nothing is counted twice.
            if row is None:
                assert base_version is not None
                row = self._promise(session, assignment, base_version, request, now)
                if request.account is not None:
                    worker.account = _sum(worker.account, request.account)
            update_id = row.update_id
            answer = partial(
                CommitAnswer,
                update_id=update_id,
                receipt=receipt_of(session, row.commit_sequence),
                deadline=resources.open_rounds.clock(session, block, now).deadline,
                verdict=_verdict(session, row),
            )
        # After the transaction: the store may be asked, and take its time.
        return answer(upload=self._upload(update_id, request, repeated=bool(found)))

    def _upload(self, update_id: str, request: CommitRequest, *, repeated: bool) -> Upload:
        blobs = self._resources.blobs
        if not blobs.shared:
            path = f"/v1/updates/{request.payload_hash}"
            return Upload(url=path, presigned=False, expires_seconds=UPLOAD_SECONDS)
        # To a shared store the worker sends the bytes itself, past the coordinator's own line.
        lengths = part_lengths(update_id, request.payload_bytes)
        there = blobs.sizes(f"{upload_key(update_id)}/") if lengths and repeated else {}
        return Upload(
            url=blobs.presigned_put(upload_key(update_id)),
            presigned=True,
            expires_seconds=PRESIGNED_SECONDS,
            part_bytes=next(iter(lengths.values()), 0),
            parts=["" if there.get(key) == n else blobs.presigned_put(key) for key, n in lengths.items()],
        )

    def _promise(
        self,
        session: Session,
        assignment: AssignmentRow,
        base_version: int,
        request: CommitRequest,
        now: float,
    ) -> UpdateRow:
        """The update's row and its ledger entry; the update's id is the hash of what was promised."""
        body = {
            "assignment_id": assignment.assignment_id,
            "worker_id": assignment.worker_id,
            "block": assignment.block,
            "round": assignment.round,
            "base_hash": request.base_hash,
            "payload_hash": request.payload_hash,
            "payload_bytes": request.payload_bytes,
        }
        update_id = content_hash(canonical_json({"run": self._resources.run.run_id, **body}))
        # The entry comes before the payload is known to anybody: its hash binds the worker, and its place in
        # the ledger says who had an update first.
        change(assignment, AssignmentState.COMMITTED)
        receipt = self._resources.ledger.append(session, now, "commit", {"update_id": update_id, **body})
        row = UpdateRow(
            update_id=update_id,
            base_version=base_version,
            loss=request.loss,
            committed=now,
            state=UpdateState.COMMITTED,
            weight=0.0,
            commit_sequence=receipt.sequence,
            **body,
        )
        session.add(row)
        session.flush()
        return row

    # --- reveal ---

    def expect(self, worker_id: WorkerId, payload_hash: str, content_length: int | None) -> Expected:
        """What may be sent under this hash, before a byte of it is read."""
        with self._resources.store.read() as session:
            row = _committed(session, worker_id, payload_hash)
            columns = [one.name for one in fields(Expected) if one.name != "verdict"]
            verdict = _verdict(session, row)
            expected = Expected(**{name: getattr(row, name) for name in columns}, verdict=verdict)
        if content_length is not None and (refusal := length_refusal(expected.payload_bytes, content_length)):
            raise refusal
        return expected

    def reveal(self, expected: Expected, body: ByteSource, found_hash: str) -> Verdict:
        """The verdict on a payload that came as a request body, its length and hash taken as it came."""
        if (refusal := hash_refusal(expected.payload_hash, found_hash)) is not None:
            raise refusal
        return self._receive(expected, body)

    def uploaded(self, expected: Expected) -> Verdict:
        """The verdict on a payload that was put into the shared blob store by presigned URL."""
        if expected.verdict is not None:
            return expected.verdict
        blobs, keys = self._resources.blobs, [upload_key(expected.update_id)]
        size, missing = blobs.size(keys[0]), "there is no object at the upload place"
        if size is None and (lengths := part_lengths(expected.update_id, expected.payload_bytes)):
            there = blobs.sizes(f"{keys[0]}/")
            num_there = sum(there.get(key) == length for key, length in lengths.items())
            missing = f"{num_there} of {len(lengths)} parts are at the upload place"
            if num_there == len(lengths):
                keys, size = list(lengths), expected.payload_bytes
        if size is None:
            # Told twice at nearly the same moment: the first has taken the object away and given the verdict.
            again = self.expect(WorkerId(expected.worker_id), expected.payload_hash, None)
            if again.verdict is not None:
                return again.verdict
            raise Refusal(ErrorReason.NOT_UPLOADED, missing, "commit again, and PUT what is not there")
        # What cannot be the payload is deleted, so that the same place can be used again.
        refusal = length_refusal(expected.payload_bytes, size)
        if refusal is None:
            with blobs.joined(keys, expected.payload_bytes) as payload:
                refusal = hash_refusal(expected.payload_hash, content_hash(payload))
                if refusal is None:
                    verdict = self._receive(expected, payload)
        for key in keys:
            blobs.delete(key)
        if refusal is not None:
            raise refusal
        return verdict

    def _receive(self, expected: Expected, payload: ByteSource) -> Verdict:
        """All that can be said before a judge has looked: readable, on time, of usual size, no copy."""
        resources, run = self._resources, self._resources.run
        # Stored only for a commit that is still open. A newcomer that gave its commit up before the last byte
        # came had its payload stored and was told nothing: 113 payloads in 30 s, 97 GB an hour.
        with resources.store.read() as session:
            if _STATE(session, update=expected.update_id) != [(UpdateState.COMMITTED,)]:
                row = session.get(UpdateRow, expected.update_id)
                return _said(None if row is None else _verdict(session, row))
        resources.blobs.put_source(payload_key(expected.payload_hash), payload)
        # Reading, sketching and comparing take seconds on a large block: no lock is held meanwhile.
        decoded = self._decode(expected, payload)
        now = resources.clock()
        with resources.store.write() as session, session.no_autoflush:
            worker = present_worker(session, expected.worker_id, now)
            block = block_row(session, expected.block, lock=True)
            row = session.get_one(UpdateRow, expected.update_id)
            # If two requests bring the same payload, the second finds the first one's verdict.
            if row.state == UpdateState.COMMITTED:
                row.norm, row.revealed = decoded.norm, now
                row.offset = self._offset(session, block, row, now)
                reveal = {key: getattr(row, key) for key in ("update_id", "payload_hash", "payload_bytes")}
                row.reveal_sequence = resources.ledger.append(session, now, "reveal", reveal).sequence
                # Without a judge whatever can be read and is in time counts; the merge clips its norm.
                judged = run.recipe.trust.judge != "off"
                by_age, by_norm = ruling_by_age(block, row, run.swarm), None
                if judged and decoded.norm is not None:
                    median = running_median(session, row.block)
                    fading = fading_of(run.recipe, row.base_version)
                    by_norm = norm_ruling(decoded.norm, median, run.recipe.trust, fading)
                ruling = reveal_ruling(decoded.unreadable, by_age, decoded.copied, by_norm)
                if judged and ruling.counts and decoded.sketch is not None:
                    change(row, UpdateState.JUDGING)
                    block.revision += 1
                    row.sketch = decoded.sketch.to_bytes()
                else:
                    settle(resources, session, worker, row, ruling, now)
            verdict = _verdict(session, row)
        if verdict is None:  # given up while its payload was read
            resources.weights.forget(expected.block, expected.payload_hash)
            resources.unneeded.add(expected.payload_hash)
        resources.changes.notify()
        return _said(verdict)

    def _decode(self, expected: Expected, payload: ByteSource) -> Decoded:
        resources, run = self._resources, self._resources.run
        schema, judged = run.schemas[expected.block], run.recipe.trust.judge != "off"
        tensors: Weights = {}
        try:
            with ExitStack() as stack:
                values: Values = UpdateFrame(run.codec, schema, payload).read
                # Only a judge needs the update whole; its norm is taken band by band.
                if judged:
                    tensors = decode(run.codec, schema, payload[0 : len(payload)].data)
                    values = held(tensors)
                base = None
                if run.codec.sends_weights:
                    opened = resources.weights.opened_snapshot(expected.block, expected.base_hash)
                    base = stack.enter_context(opened)
                norm = update_norm(schema, values, base)
        except FrameError as error:
            not_finite = error.reason == FrameReason.NOT_FINITE
            reason = VerdictReason.NOT_FINITE if not_finite else VerdictReason.MALFORMED
            return Decoded(Ruling.refuse(reason, error.sentence, Mark.BAD))
        if (overflow := overflow_ruling(norm)) is not None:
            return Decoded(overflow)
        if not judged:
            return Decoded(norm=norm)
        resources.weights.keep(expected.block, expected.payload_hash, tensors)
        # The seed is the same for a whole run, so that sketches can be compared, and secret, so that a copier
        # does not know which values to change.
        seed = evidence_seed(resources.secret, f"sketch/{expected.block}", run.run_id)
        sends_weights = run.codec.sends_weights
        own_base = resources.weights.snapshot(expected.block, expected.base_hash) if sends_weights else {}
        sketch = sketch_of(delta_of(run.codec, tensors, own_base), seed, run.codec)
        # Who committed first has the update: a copier sees a payload only after its commit is in the ledger.
        with resources.store.read() as session:
            rows = session.execute(
                select(UpdateRow.update_id, UpdateRow.sketch, UpdateRow.base_hash)
                .where(
                    UpdateRow.block == expected.block,
                    UpdateRow.sketch.is_not(None),
                    UpdateRow.commit_sequence < expected.commit_sequence,
                )
                .order_by(UpdateRow.commit_sequence.desc())
                .limit(COMPARED_SKETCHES)
            )
            known = [(name, Sketch.from_bytes(data), base) for name, data, base in rows if data is not None]
        found, copied = most_alike(sketch, [(name, one) for name, one, _ in known]), None
        if found is not None:
            bases = {name: base for name, _, base in known}
            copied = duplicate_ruling(*found, same_base=bases[found[0]] == expected.base_hash)
        return Decoded(None, norm, sketch, copied)

    def _offset(self, session: Session, block: BlockRow, row: UpdateRow, now: float) -> float | None:
        """Seconds that the worker's own steps took, from the beginning of its base's round."""
        # A late update is measured from the beginning of its own round, which its merge has kept.
        begun = block.begun
        if row.base_version != block.version:
            merged = session.get(MergeRow, (row.block, row.base_version + 1))
            begun = None if merged is None else merged.begun
        if begun is None:
            return None
        [(lent, extra)] = _LENT(session, assignment=row.assignment_id)
        if _EARLIER_TRY(session, worker=row.worker_id, block=row.block, round=row.round):
            begun = max(begun, lent)  # the wait between two tries is no measure of work
        return max(0.0, now - begun) * own_share(extra, self._resources.run.swarm)

    def give_up_lost(self) -> None:
        """On start, where this process is the only one: refuse what waits and whose payload is not stored.

        A backup of a running coordinator copies the database first. A payload that was refused and deleted
        before the copy came to it is missing, and its block would wait for it without end.
        """
        resources, now = self._resources, self._resources.clock()
        with resources.store.write() as session:
            waiting = select(UpdateRow).where(UpdateRow.state.in_((UpdateState.JUDGING, *WAITING)))
            for row in session.scalars(waiting).all():
                if resources.blobs.size(payload_key(row.payload_hash)) is not None:
                    continue
                # A merge that had begun with it starts again without it.
                if row.merge_version is not None:
                    block = block_row(session, row.block, lock=True)
                    block.closing_version = block.claim_until = None
                    for one in inputs_of_merge(session, row.block, row.merge_version):
                        one.merge_version = one.scale = None
                sentence = "its payload is not stored; a backup may have been put back"
                ruling = Ruling.refuse(VerdictReason.REMOVED, sentence, mark=None)
                settle(resources, session, session.get(WorkerRow, row.worker_id), row, ruling, now)

    def verdict(self, worker_id: WorkerId, payload_hash: str) -> Verdict:
        """The verdict on a payload, as far as there is one."""
        with self._resources.store.read() as session:
            verdict = _verdict(session, _committed(session, worker_id, payload_hash))
        if verdict is None:
            raise Refusal(ErrorReason.NOT_UPLOADED, "the payload has not arrived yet", "send it first")
        return verdict


def _committed(session: Session, worker_id: WorkerId, payload_hash: str) -> UpdateRow:
    """The oldest commit of this payload that still waits for it; else the newest that had it."""
    rows = _OF_PAYLOAD(session, worker=worker_id, hash=payload_hash)
    if not rows:
        raise Refusal(
            ErrorReason.NOT_COMMITTED,
            f"no commit of this worker for payload {payload_hash[:12]}…",
            "POST /v1/assignments/{id}/commit first",
        )
    waiting = (update_id for update_id, state in rows if state == UpdateState.COMMITTED)
    return session.get_one(UpdateRow, next(waiting, rows[-1][0]))


def _verdict(session: Session, row: UpdateRow) -> Verdict | None:
    """The answer about a payload that has arrived; None before that."""
    outcome, sequence = Outcome.PENDING, row.reveal_sequence
    reason, sentence = VerdictReason.JUDGING, "arrived; a judge will score it before it counts"
    if row.state != UpdateState.JUDGING:
        sequence = row.verdict_sequence
        if sequence is None:
            return None
        outcome = merged_outcome(row.reason) if row.state == UpdateState.MERGED else Outcome(row.state)
        reason, sentence = VerdictReason(row.reason or ""), row.sentence or ""
    assert sequence is not None
    block = session.get_one(BlockRow, row.block)
    return message_of(
        Verdict,
        row,
        outcome=outcome,
        reason=reason,
        sentence=sentence,
        head_version=block.version,
        head_hash=block.head_hash,
        receipt=receipt_of(session, sequence),
    )


def _said(verdict: Verdict | None) -> Verdict:
    if verdict is None:
        raise Refusal(
            ErrorReason.NOT_COMMITTED, "the assignment was given up meanwhile", "ask for another assignment"
        )
    return verdict


def _sum(stored: str, reported: Account) -> str:
    """What a worker's commits reported, added up; bounded, as the fields of the message are."""
    old, new = Account.model_validate_json(stored).model_dump(), reported.model_dump()
    for key in ("seconds_computing", "seconds_transferring", "seconds_waiting"):
        old[key] = min(MAX_SECONDS, old[key] + new[key])
    for way in ("up", "down"):
        old[way] = {kind: min(MAX_COUNT, count + new[way][kind]) for kind, count in old[way].items()}
    return Account.model_validate(old).model_dump_json()
