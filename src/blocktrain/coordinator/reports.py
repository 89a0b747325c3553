"""What anybody may read: the run, blocks, merges, the ledger and the state of the whole swarm."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from blocktrain.coordinator.operator_notes import Display
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import LIVE, AssignmentState, UpdateState, merged_outcome
from blocktrain.coordinator.storage.ledger import read_entries
from blocktrain.coordinator.storage.queries import block_row, live_since
from blocktrain.coordinator.storage.store import (
    AssignmentRow,
    BlockRow,
    EvaluationRow,
    MergeRow,
    Prepared,
    RunRow,
    SnapshotRow,
    UpdateRow,
    WorkerRow,
    message_of,
)
from blocktrain.wire.messages import (
    MAX_LEDGER_PAGE,
    MAX_MERGE_PAGE,
    Account,
    BlockAnswer,
    ByteCounts,
    ErrorReason,
    EvaluationState,
    LedgerAnswer,
    MergeRecord,
    MergesAnswer,
    RoundReport,
    RoundState,
    RunAnswer,
    StatusAnswer,
    VerdictReason,
    WorkCounts,
    WorkerState,
    verdict_word,
)

_MADE = Prepared(
    select(SnapshotRow.made).where(
        SnapshotRow.block == bindparam("block"), SnapshotRow.version == bindparam("version")
    )
)
_OF_HASH = Prepared(select(SnapshotRow.version).where(SnapshotRow.hash == bindparam("hash")).limit(1))
# Caps on a status that anybody may ask for, every second: the page draws no more.
SHOWN_WORKERS = 500
SHOWN_EVALUATIONS = 200
SHOWN_ROUNDS = 500
MEASURED_ROUNDS = 4
"""Rounds of each block from which throughput is told."""


class Reports:
    def __init__(self, resources: Resources, display: Display) -> None:
        self._resources, self._display = resources, display

    def run(self) -> RunAnswer:
        run = self._resources.run
        return RunAnswer(
            run_id=run.run_id,
            recipe=run.recipe.to_dict(),
            corpus_sha256=run.corpus_sha256,
            coordinator_key=run.coordinator_key,
            server_time=self._resources.clock(),
            blocks=run.layouts,
            dataset=None if self._resources.text is None else self._resources.text.identity,
            vocabulary=run.objective.vocabulary,
        )

    def block(self, block: int) -> BlockAnswer:
        now = self._resources.clock()
        with self._resources.store.read() as session:
            row = block_row(session, block)
            return self._block(session, row, now)

    def _block(self, session: Session, row: BlockRow, now: float) -> BlockAnswer:
        run = self._resources.run
        [(made,)] = _MADE(session, block=row.block, version=row.version)
        state = self._resources.open_rounds.state(session, row, now)
        return BlockAnswer(
            block=row.block,
            head_version=row.version,
            head_hash=row.head_hash,
            head_made=made,
            finished=row.version >= run.swarm.rounds,
            round=RoundState(
                round=row.version,
                begun=row.begun,
                deadline=state.clock.deadline,
                deadline_reason=state.clock.reason,
                accepted=state.on_time,
                late=state.late,
                wanted=state.wanted,
                workers=state.workers,
                merging=row.closing_version is not None,
            ),
            server_time=now,
        )

    def merges(self, block: int, since: int) -> MergesAnswer:
        with self._resources.store.read() as session:
            row = block_row(session, block)
            records = session.scalars(
                select(MergeRow.record)
                .where(MergeRow.block == block, MergeRow.version > since)
                .order_by(MergeRow.version)
                .limit(MAX_MERGE_PAGE)
            )
            return MergesAnswer(
                block=block,
                head_version=row.version,
                head_hash=row.head_hash,
                merges=tuple(map(MergeRecord.model_validate_json, records)),
            )

    def ledger(self, since: int) -> LedgerAnswer:
        with self._resources.store.read() as session:
            entries = read_entries(session, since, MAX_LEDGER_PAGE)
            return LedgerAnswer(length=self._run_row(session).ledger_length, entries=tuple(entries))

    def ledger_length(self) -> int:
        with self._resources.store.read() as session:
            return self._run_row(session).ledger_length

    def _run_row(self, session: Session) -> RunRow:
        run = session.get(RunRow, 1)
        assert run is not None
        return run

    def find_snapshot(self, snapshot_hash: str) -> None:
        """Refuses a hash that no published snapshot has."""
        with self._resources.store.read() as session:
            if not _OF_HASH(session, hash=snapshot_hash):
                raise Refusal(ErrorReason.NOT_FOUND, f"no snapshot {snapshot_hash}")

    def find_merged_payload(self, payload_hash: str) -> None:
        """Payloads are public once merged: before, they would help those who copy."""
        with self._resources.store.read() as session:
            found = session.scalars(
                select(UpdateRow.update_id)
                .where(UpdateRow.payload_hash == payload_hash, UpdateRow.state == UpdateState.MERGED)
                .limit(1)
            )
            if found.first() is None:
                raise Refusal(ErrorReason.NOT_FOUND, f"no merged update with payload {payload_hash}")

    def status(self, up: ByteCounts, down: ByteCounts) -> StatusAnswer:
        """The whole swarm in one transaction; `up` and `down` are what this process has moved."""
        resources, now = self._resources, self._resources.clock()
        with resources.store.read() as session:
            run = self._run_row(session)
            rows = session.scalars(select(BlockRow).order_by(BlockRow.block))
            blocks = tuple(self._block(session, row, now) for row in rows)
            # The latest of each list, since a long run has too many, and then the oldest first.
            workers = session.scalars(
                select(WorkerRow).order_by(WorkerRow.last_seen.desc()).limit(SHOWN_WORKERS)
            )
            evaluations = session.scalars(
                select(EvaluationRow.record).order_by(EvaluationRow.time.desc()).limit(SHOWN_EVALUATIONS)
            ).all()
            merges = session.execute(
                select(MergeRow.report, MergeRow.closed)
                .order_by(MergeRow.closed.desc(), MergeRow.block)
                .limit(SHOWN_ROUNDS)
            ).all()
            reports = tuple(
                RoundReport.model_validate_json(report).model_copy(update={"closed": closed})
                for report, closed in reversed(merges)
            )
            # Rounds between an update's base and its merge: 0 was on time.
            age = UpdateRow.merge_version - 1 - UpdateRow.base_version
            ages = session.execute(
                select(age, func.count())
                .where(UpdateRow.state == UpdateState.MERGED)
                .group_by(age)
                .order_by(age)
            )
            arrived = session.execute(
                select(UpdateRow.block, func.count())
                .where(UpdateRow.revealed.is_not(None))
                .group_by(UpdateRow.block)
            )
            schemas, since = resources.run.schemas, live_since(now, resources.run.swarm)
            per_update, shown = resources.run.tokens_per_update, []
            for row in workers:
                account = Account.model_validate_json(row.account)
                computed = account.seconds_computing
                updates = row.accepted + row.late + row.unused + row.refused
                shown.append(
                    message_of(
                        WorkerState,
                        row,
                        live=row.last_seen > since,
                        tokens_per_second=updates * per_update / computed if computed else None,
                        **account.model_dump(),
                    )
                )
            rounds, finished = resources.run.swarm.rounds, all(block.finished for block in blocks)
            left = resources.open_rounds.seconds_left(session, now)
            work = _work(session)
            return StatusAnswer(
                run_id=run.run_id,
                name=resources.run.recipe.name,
                created=run.created,
                server_time=now,
                finished=finished,
                rounds=rounds,
                ended=reports[-1].closed if finished and reports else None,
                seconds_left=left if finished or any(worker.live for worker in shown) else None,
                tokens_per_second=_tokens_per_second(reports, per_update, len(blocks)),
                work=work,
                blocks=blocks,
                workers=tuple(shown),
                participation=work.participation,
                ages={str(age): count for age, count in ages},
                up=up,
                down=down,
                # As if each update's whole block had travelled in fp32 (4 bytes), once down and once up.
                full_checkpoint_bytes=sum(2 * 4 * schemas[b].num_values * count for b, count in arrived),
                evaluations=tuple(map(EvaluationState.model_validate_json, reversed(evaluations))),
                references=self._display.references(),
                speaking=self._display.speaking,
                reports=reports,
                ledger_length=run.ledger_length,
                ledger_head=run.ledger_hash,
                gateway=self._display.gateway,
                pin=self._display.pin,
            )


def _work(session: Session) -> WorkCounts:
    """From the updates themselves, so that page, list and share cannot disagree."""
    counts: dict[str, int] = {}
    carried = UpdateRow.reason == VerdictReason.CARRIED
    found = session.execute(
        select(UpdateRow.state, carried, UpdateRow.held_against, func.count())
        .where(UpdateRow.verdict_sequence.is_not(None))
        .group_by(UpdateRow.state, carried, UpdateRow.held_against)
    )
    for state, is_carried, held_against, count in found:
        if state == UpdateState.MERGED:
            state = merged_outcome(VerdictReason.CARRIED if is_carried else None)
        word = verdict_word(state, held_against)
        counts[word] = counts.get(word, 0) + count
    # Of rounds that are over: what was lent and not handed back, less what arrived. A lease that was called
    # off because its round had passed brought nothing either.
    lent = session.scalar(
        select(func.count())
        .select_from(AssignmentRow)
        .join(BlockRow, BlockRow.block == AssignmentRow.block)
        .where(
            AssignmentRow.round < BlockRow.version,
            AssignmentRow.state.in_(
                (*LIVE, AssignmentState.WITHHELD, AssignmentState.REFUSED, AssignmentState.RECALLED)
            ),
        )
    )
    came = session.scalar(
        select(func.count())
        .select_from(UpdateRow)
        .join(BlockRow, BlockRow.block == UpdateRow.block)
        .where(UpdateRow.round < BlockRow.version, UpdateRow.revealed.is_not(None))
    )
    return WorkCounts(**counts, missing=max(0, (lent or 0) - (came or 0)))


def _tokens_per_second(reports: Sequence[RoundReport], per_update: int, blocks: int) -> float | None:
    """Training tokens of the updates of the last rounds, over the time from the first's end to the last's."""
    recent = reports[-(MEASURED_ROUNDS * blocks + 1) :]
    if len(recent) < 2 or recent[0].closed is None or recent[-1].closed is None:
        return None
    seconds = recent[-1].closed - recent[0].closed
    updates = sum(one.on_time + one.late + one.unused + one.refused for one in recent[1:])
    return updates * per_update / seconds if seconds > 0 else None
