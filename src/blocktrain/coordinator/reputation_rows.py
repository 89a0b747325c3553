"""Workers' standing in the database: reading, writing, silence and bans.

The arithmetic is `validation.reputation`'s. A ban, and its end, is a row and a ledger entry.
"""

from __future__ import annotations

import dataclasses
import json
import logging

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from blocktrain.config import TrustConfig
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import BanRow, Prepared, WorkerRow
from blocktrain.validation.reputation import SILENCE_GRACE_SECONDS, Standing, after_silence, deserves_ban
from blocktrain.wire.messages import ErrorReason, Receipt

log = logging.getLogger(__name__)
_BAN = Prepared(select(BanRow.reason, BanRow.until).where(BanRow.worker_id == bindparam("worker")))


def read_standing(stored: str) -> Standing:
    return Standing(**json.loads(stored or "{}"))


def standing_of(worker: WorkerRow) -> Standing:
    return read_standing(worker.standing)


def keep_standing(worker: WorkerRow, standing: Standing) -> None:
    worker.standing = json.dumps(dataclasses.asdict(standing))


def seen(worker: WorkerRow, now: float) -> None:
    """A request came; a long silence before it costs uptime."""
    # Checked when it comes back, not by a timer: a worker that never returns has nobody to show it to.
    silence = now - worker.last_seen
    if silence > SILENCE_GRACE_SECONDS:
        keep_standing(worker, after_silence(standing_of(worker), silence))
    # Clocks of several coordinators may differ a little, and the last one seen must not go back.
    worker.last_seen = max(worker.last_seen, now)


def present_worker(session: Session, worker_id: str, now: float) -> WorkerRow:
    """The worker that sent this request: locked, not banned, and seen alive."""
    row = session.get(WorkerRow, worker_id, with_for_update=True, populate_existing=True)
    if row is None:
        raise Refusal(
            ErrorReason.NOT_JOINED, f"worker {worker_id} has not joined this run", "POST /v1/join first"
        )
    refuse_banned(session, worker_id, now)
    seen(row, now)
    return row


def ban(session: Session, ledger: Ledger, worker_id: str, reason: str, seconds: float, now: float) -> Receipt:
    """A new ban replaces an older one; 0 seconds lift it."""
    # The row is kept after its end: `until` decides, and the ledger has the history.
    row = session.get(BanRow, worker_id) or BanRow(worker_id=worker_id)
    row.reason, row.made, row.until = reason, now, now + seconds
    session.add(row)
    session.flush()
    verb = "banned" if seconds else "lifted the ban of"
    log.warning("%s worker=%s seconds=%.0f reason=%r", verb, worker_id, seconds, reason)
    return ledger.append(session, now, "ban", {"worker_id": worker_id, "reason": reason, "until": row.until})


def keep_or_ban(
    session: Session,
    ledger: Ledger,
    worker: WorkerRow,
    standing: Standing,
    trust: TrustConfig,
    last: str,
    now: float,
) -> None:
    """Write a standing, and the ban that follows from it where its rating is too low."""
    if deserves_ban(standing, trust.ban_below):
        reason = f"rating {standing.rating:.2f} after {standing.verdicts} verdicts, last: {last}"
        ban(session, ledger, worker.worker_id, reason, trust.ban_seconds, now)
        # After the ban it begins again as a newcomer, on probation.
        standing = dataclasses.replace(standing, good=0.0, bad=0.0, good_verdicts=0)
        worker.established = False
    keep_standing(worker, standing)


def refuse_banned(session: Session, worker_id: str, now: float) -> None:
    for reason, until in _BAN(session, worker=worker_id):
        if now < until:
            raise Refusal(
                ErrorReason.BANNED,
                f"worker {worker_id} is banned for another {until - now:.0f} s: {reason}",
                "wait until then, or write to the operator",
            )
