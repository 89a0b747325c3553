"""The one writer of verdicts: all that rules on an update (reveal, judge, guard, operator) calls `settle`."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from blocktrain.config import SwarmConfig
from blocktrain.coordinator.reputation_rows import keep_or_ban, standing_of
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.states import WAITING, AssignmentState, UpdateState, change
from blocktrain.coordinator.storage.queries import recent_scores
from blocktrain.coordinator.storage.store import AssignmentRow, BlockRow, UpdateRow, WorkerRow, after_commit
from blocktrain.validation.reputation import after_verdict, on_probation, penalties_paused
from blocktrain.validation.ruling import Mark, Ruling, age_ruling
from blocktrain.wire.messages import verdict_word


def ruling_by_age(block: BlockRow, update: UpdateRow, swarm: SwarmConfig) -> Ruling:
    # A round that is being merged is over: what arrives, or is judged, now is one version later.
    head = block.version if block.closing_version is None else block.closing_version
    return age_ruling(head - update.base_version, swarm, finished=head >= swarm.rounds)


def settle(
    resources: Resources,
    session: Session,
    worker: WorkerRow | None,
    row: UpdateRow,
    ruling: Ruling,
    now: float,
    *,
    evidence: dict[str, Any] | None = None,
    compared: int | None = None,
) -> None:
    """Write a verdict, and everything that follows from it, in the caller's transaction.

    The caller has locked worker and block. `worker` is None where it was removed from the run; `compared` is
    the evidence's assigned-versus-other mark, None where nothing was scored.
    """
    trust, ledger = resources.run.recipe.trust, resources.ledger
    before = UpdateState(row.state)
    change(row, UpdateState(ruling.outcome))
    block = session.get(BlockRow, row.block)
    assert block is not None
    block.revision += 1
    row.weight, row.reason, row.sentence = ruling.weight, str(ruling.reason), ruling.sentence
    verdict = {
        "update_id": row.update_id,
        "outcome": str(ruling.outcome),
        "weight": row.weight,
        "reason": row.reason,
        "sentence": row.sentence,
        "norm": row.norm,
    }
    more = {} if evidence is None else {"evidence": evidence}
    row.verdict_sequence = ledger.append(session, now, "verdict", {**verdict, **more}).sequence

    # Bad verdicts do not count while honest work does not score above zero: then the run, not the worker, has
    # a problem.
    judged, paused = trust.judge != "off", False
    if ruling.mark is Mark.BAD and judged:
        paused = penalties_paused(recent_scores(session, row.block, established=True))
    row.held_against = ruling.mark is Mark.BAD and not paused

    # An update counts once, under its last outcome: guard and ban take an earlier one back. Of what does not
    # count, only what speaks against its worker is called refused.
    if worker is not None:
        if before in WAITING:
            setattr(worker, before, max(0, getattr(worker, before) - 1))
        counter = verdict_word(ruling.outcome, row.held_against)
        setattr(worker, counter, getattr(worker, counter) + 1)

    # Without a judge only malformed and outdated updates are refused: the worker may try again at once. With
    # one, it must wait (assignments.ask), or it could try until it passes.
    if before is UpdateState.COMMITTED and not ruling.counts and trust.judge == "off":
        assignment = session.get(AssignmentRow, row.assignment_id)
        assert assignment is not None
        change(assignment, AssignmentState.REFUSED)

    # Reputation is for what a judge, or a check before it, found.
    if worker is not None and ruling.mark is not None and judged:
        standing = after_verdict(standing_of(worker), ruling.mark, compared, paused=paused)
        worker.established = worker.established or not on_probation(standing, trust.probation_verdicts)
        keep_or_ban(session, ledger, worker, standing, trust, row.reason, now)

    # Only what is in the database may be told: a transaction that fails has ruled on nothing.
    def tell() -> None:
        resources.metrics.verdict(ruling.outcome, ruling.reason)
        if not ruling.counts:
            resources.weights.forget(row.block, row.payload_hash)
            resources.unneeded.add(row.payload_hash)
        resources.changes.notify()

    after_commit(session, tell)
