"""Workers' standing in the database: reading, writing, bans; and what anybody may see of it.

The arithmetic is `validation.reputation`'s. A ban, and its end, is a row and a ledger entry.
"""

from __future__ import annotations

import dataclasses
import json
import logging

from sqlalchemy import select
from sqlalchemy.orm import Session

from blocktrain.config import TrustConfig
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import BanRow, UpdateRow, WorkerRow
from blocktrain.validation.reputation import (
    GRACE_SECONDS,
    Mark,
    Standing,
    after_silence,
    after_verdict,
    after_withholding,
    deserves_ban,
    on_probation,
    penalties_paused,
)
from blocktrain.wire.messages import ErrorReason, Receipt

log = logging.getLogger(__name__)

RECENT_SCORES = 16


def standing_of(worker: WorkerRow) -> Standing:
    return Standing(**json.loads(worker.standing or "{}"))


def keep_standing(worker: WorkerRow, standing: Standing) -> None:
    worker.standing = json.dumps(dataclasses.asdict(standing))


def seen(worker: WorkerRow, now: float) -> None:
    """A request came; a long silence before it costs uptime."""
    silence = now - worker.last_seen
    if silence > GRACE_SECONDS:
        keep_standing(worker, after_silence(standing_of(worker), silence))
    worker.last_seen = max(worker.last_seen, now)


def withheld(worker: WorkerRow) -> None:
    keep_standing(worker, after_withholding(standing_of(worker)))


def note_verdict(
    session: Session,
    ledger: Ledger,
    trust: TrustConfig,
    worker: WorkerRow,
    row: UpdateRow,
    mark: Mark,
    compared: int | None,
    now: float,
) -> None:
    """What a verdict does to its worker's standing; a rating too low means a ban, then probation."""
    paused = penalties_paused(established_scores(session, row.block))
    standing = after_verdict(standing_of(worker), mark, compared, paused=paused)
    keep_standing(worker, standing)
    worker.established = worker.established or not on_probation(standing, trust.probation_verdicts)
    if deserves_ban(standing, trust.ban_below):
        reason = f"rating {standing.rating:.2f} after {standing.verdicts} verdicts, last: {row.reason}"
        ban(session, ledger, worker.worker_id, reason, trust.ban_seconds, now)
        keep_standing(worker, dataclasses.replace(standing, good=0.0, bad=0.0, good_verdicts=0))
        worker.established = False


def counted_scores(session: Session, block: int) -> list[float]:
    """Scores of the block's last updates that counted."""
    return _scores(session, block, UpdateRow.state.in_(("accepted", "late", "merged")))


def established_scores(session: Session, block: int) -> list[float]:
    """Scores of the last updates of established workers, whatever became of them."""
    established = select(WorkerRow.worker_id).where(WorkerRow.established.is_(True))
    return _scores(session, block, UpdateRow.worker_id.in_(established))


def _scores(session: Session, block: int, condition: object) -> list[float]:
    rows = session.scalars(
        select(UpdateRow.score)
        .where(UpdateRow.block == block, UpdateRow.score.is_not(None), condition)  # type: ignore[arg-type]
        .order_by(UpdateRow.verdict_sequence.desc())
        .limit(RECENT_SCORES)
    )
    return [score for score in rows if score is not None]


# --- bans -------------------------------------------------------------------------------------------------


def ban(session: Session, ledger: Ledger, worker_id: str, reason: str, seconds: float, now: float) -> Receipt:
    """A new ban takes the place of an older one; 0 seconds lift it."""
    row = session.get(BanRow, worker_id) or BanRow(worker_id=worker_id)
    row.reason, row.made, row.until = reason, now, now + seconds
    session.add(row)
    session.flush()
    log.warning("banned worker=%s seconds=%.0f reason=%r", worker_id, seconds, reason)
    return ledger.append(session, now, "ban", {"worker_id": worker_id, "reason": reason, "until": row.until})


def refuse_banned(session: Session, worker_id: str, now: float) -> None:
    row = session.get(BanRow, worker_id)
    if row is not None and now < row.until:
        raise Refusal(
            ErrorReason.BANNED,
            f"worker {worker_id} is banned for another {row.until - now:.0f} s: {row.reason}",
            "wait until then, or write to the operator",
        )
