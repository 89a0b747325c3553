"""Deleting payloads that no update needs any more: refused ones, and those whose commit was given up.

Only merged payloads are public and replayed, so nothing that is deleted here could ever be asked for again;
the ledger keeps its hash. A worker's stored bytes are thus bounded by what waits for a judge or a merge: one
payload for each block and snapshot that may still count.

Covered: a payload that several updates share. Not covered: a process that dies between a verdict and the
delete leaves that one payload behind until the next start, which looks at the last hour.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from blocktrain.coordinator.states import UpdateState
from blocktrain.coordinator.storage.blobs import DRAFTS, Blobs, payload_key
from blocktrain.coordinator.storage.queries import lock_run
from blocktrain.coordinator.storage.store import Store, UpdateRow

UNNEEDED = (UpdateState.REFUSED, UpdateState.WITHHELD)
LOOKED_BACK_SECONDS = 3600.0
UPLOAD_SECONDS = 3600.0
"""How long an object may lie at a presigned upload place; the address itself is good for a quarter of it."""


class UnneededPayloads:
    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store, self._blobs = store, blobs
        self._queue: deque[str] = deque()

    def add(self, payload_hash: str) -> None:
        """Delete it soon, unless another update needs it; any thread may ask."""
        self._queue.append(payload_hash)

    def find(self, now: float) -> None:
        """On start: what a predecessor refused and may not have deleted."""
        with self._store.read() as session:
            recent = UpdateRow.committed > now - LOOKED_BACK_SECONDS
            self._queue.extend(
                session.scalars(
                    select(UpdateRow.payload_hash).where(UpdateRow.state.in_(UNNEEDED), recent).distinct()
                )
            )

    def delete_next(self) -> bool:
        """Delete one; whether there was one."""
        if not self._queue:
            return False
        payload_hash = self._queue[0]
        # Under the run's lock, which a commit takes too: nobody can promise the same bytes meanwhile.
        with self._store.write() as session:
            lock_run(session)
            needed = select(UpdateRow.update_id).where(
                UpdateRow.payload_hash == payload_hash, UpdateRow.state.not_in(UNNEEDED)
            )
            if session.scalars(needed.limit(1)).first() is None:
                self._blobs.delete(payload_key(payload_hash))
        self._queue.popleft()
        return True

    def sweep_uploads(self, now: float) -> None:
        """Objects that were put at an upload place and never spoken of again, and drafts of dead merges."""
        # By the disk's own clock, as a draft's age is; no merge takes as long.
        self._blobs.delete_older(f"{DRAFTS}/", datetime.now(UTC) - timedelta(seconds=UPLOAD_SECONDS))
        if self._blobs.shared:
            self._blobs.delete_older("uploads/", datetime.fromtimestamp(now - UPLOAD_SECONDS, UTC))
