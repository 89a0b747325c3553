"""Who may join, by the run's admission mode; caps per address; lists the operator keeps in files.

Covered: joins without a stamp, with another's, an old or a forged one; invitations used twice, expired or
forged; ids not on the list; too many identities from one network. Not covered: many networks and much
hashing; what they get is probation.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from blocktrain.config import TrustConfig
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.run import Run
from blocktrain.coordinator.storage.store import InviteRow, WorkerRow
from blocktrain.listening import network_name
from blocktrain.wire.messages import ChallengeAnswer, ErrorReason, JoinRequest
from blocktrain.wire.tokens import CHALLENGE_SECONDS, challenge, is_challenge, is_stamp, read_invite

ALLOWLIST_FILE = "allowlist.txt"
JUDGES_FILE = "judges.txt"
MAX_LIST_BYTES = 4 << 20  # 120,000 ids of 33 bytes; read at every join, so that edits count at once


def listed_ids(path: Path) -> frozenset[str]:
    """Worker ids in a file, one a line, `#` begins a comment; none where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")[:MAX_LIST_BYTES]
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(line.split("#")[0].strip() for line in text.splitlines()) - {""}


def network_of(address: str, secret: bytes) -> str:
    """A keyed hash of the address's network: enough to count by, useless to a thief of the database."""
    return blake3(f"network/{network_name(address)}".encode(), key=secret).digest(length=16).hex()


class Admission:
    def __init__(self, run: Run, secret: bytes, data_dir: Path) -> None:
        self._run, self._run_id, self._secret = run, run.run_id, secret
        self._key, self._data_dir = bytes.fromhex(run.coordinator_key), data_dir

    @property
    def _trust(self) -> TrustConfig:
        return self._run.recipe.trust

    def challenge(self, worker_id: str, now: float) -> ChallengeAnswer:
        return ChallengeAnswer(
            admission=self._trust.admission,
            challenge=challenge(self._secret, self._run_id, worker_id, now),
            bits=self._trust.stamp_bits if self._trust.admission == "open" else 0,
            valid_seconds=CHALLENGE_SECONDS,
        )

    def is_judge(self, worker_id: str) -> bool:
        return worker_id in listed_ids(self._data_dir / JUDGES_FILE)

    def precheck(self, worker_id: str, request: JoinRequest, now: float) -> Refusal | None:
        """Everything that needs no database, so that a flood of joins does not wait for one another."""
        # A stamp makes a thousand identities cost a thousand times the work of one; the cap per network does
        # the rest: of 1,000 joins at once from one address 32 got in (docs/history, attack 13).
        bits = self._trust.stamp_bits
        if self._trust.admission == "open":
            good = not bits or (
                request.challenge is not None
                and request.stamp is not None
                and is_challenge(self._secret, self._run_id, worker_id, request.challenge, now)
                and is_stamp(request.challenge, request.stamp, bits)
            )
            if good:
                return None
            return Refusal(
                ErrorReason.STAMP_REQUIRED,
                f"expected a stamp of {bits} bits on a fresh challenge",
                f"GET /v1/challenge/{worker_id}, find a stamp, and join with both",
            )
        if self._trust.admission == "invite":
            problem = self._invite_problem(request.invite, now)
            return None if problem is None else _invite_refusal(problem)
        if worker_id in listed_ids(self._data_dir / ALLOWLIST_FILE):
            return None
        return Refusal(
            ErrorReason.NOT_LISTED,
            f"worker {worker_id} is not on this run's list",
            f"ask the operator to add the id to {ALLOWLIST_FILE}",
        )

    def _invite_problem(self, token: str | None, now: float) -> str | None:
        if token is None:
            return "missing: this run takes invited workers only"
        if read_invite(self._key, token, now) is not None:
            return None
        if read_invite(self._key, token, 0.0) is not None:
            return "expired"
        return "damaged, or another coordinator's"

    def enter(
        self, session: Session, worker_id: str, request: JoinRequest, address: str | None, now: float
    ) -> str | None:
        """The last checks, in the transaction that makes the worker; the network it is counted under."""
        if self._trust.admission == "invite":
            # Read again: between the pre-check and this transaction it may have expired, or been used.
            found = read_invite(self._key, request.invite or "", now)
            if found is None:
                raise _invite_refusal(self._invite_problem(request.invite, now) or "expired")
            if session.get(InviteRow, found.invite_id[:32]) is not None:
                raise _invite_refusal("used already")
            session.add(InviteRow(invite_id=found.invite_id[:32], worker_id=worker_id, used=now))
        if address is None:
            return None
        network = network_of(address, self._secret)
        count = session.scalar(select(func.count()).where(WorkerRow.address == network))
        if (count or 0) >= self._trust.max_workers_per_address:
            raise Refusal(
                ErrorReason.ADDRESS_FULL,
                f"{count} workers have joined from this network address, as many as this run takes",
                "use a key that has joined before, or ask the operator",
            )
        return network


def _invite_refusal(problem: str) -> Refusal:
    return Refusal(
        ErrorReason.INVITE_REQUIRED,
        f"the invitation is {problem}",
        "ask the operator for one (`blocktrain invite`) and pass it with --invite, or join by its link",
    )
