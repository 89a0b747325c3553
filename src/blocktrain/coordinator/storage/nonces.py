"""Signed requests that were received, so that none is carried out twice: also after a restart, and by any of
several processes.

On SQLite there is one process, and its memory answers. A nonce is written with the next transaction, which is
that of its own request where this changes anything: what was done is never kept without it. On PostgreSQL the
primary key of the table refuses the second of two requests, in whichever process.
"""

from __future__ import annotations

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from blocktrain.coordinator.storage.store import NonceRow, Prepared, Store
from blocktrain.wire.signing import VerifiedRequest

_NONCE = Prepared(insert(NonceRow))


class Nonces:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.in_memory = store.is_sqlite
        """Whether `is_new` answers at once, without a transaction."""
        self._known: dict[str, float] = {}
        """Replay key to the time after which it may be forgotten; only where there is one process."""

    def load(self) -> None:
        if self.in_memory:
            with self._store.read() as session:
                rows = session.scalars(select(NonceRow))
                self._known = {row.replay_key: row.forget_after for row in rows}

    def is_new(self, request: VerifiedRequest) -> bool:
        """Whether no request with this nonce came before; from now on one has."""
        key, forget_after = request.replay_key, float(request.forget_after)
        row = {"replay_key": key, "forget_after": forget_after}
        if self.in_memory:
            # In one step, whichever thread asks: only one of two gets its own value back.
            if self._known.setdefault(key, forget_after) is not forget_after:
                return False
            self._store.write_later(_NONCE, row)
            return True
        try:
            with self._store.write() as session:
                _NONCE(session, **row)
        except IntegrityError:
            return False
        return True

    def forget_old(self, now: float) -> None:
        with self._store.write() as session:
            session.execute(delete(NonceRow).where(NonceRow.forget_after < now))
        for key in [key for key, forget_after in list(self._known.items()) if forget_after < now]:
            del self._known[key]
