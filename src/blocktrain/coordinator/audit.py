"""`blocktrain ledger verify DIR|URL`: the ledger of a data directory, or of a running coordinator.

Reads only what anybody may read: entries, payloads of merged updates, snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2

from blocktrain.coordinator.service import DATABASE_FILE
from blocktrain.coordinator.storage.blobs import Blobs, payload_key, snapshot_key
from blocktrain.coordinator.storage.ledger import VerificationReport, read_entries, verify_ledger
from blocktrain.coordinator.storage.store import Store
from blocktrain.errors import StorageError, UserError
from blocktrain.wire.messages import MAX_LEDGER_PAGE, LedgerAnswer, LedgerEntry

TIMEOUT_SECONDS = 60.0


def audit(place: str, coordinator_key: str | None = None) -> VerificationReport:
    """Verify the ledger at a data directory or a coordinator's URL; with a key, it must be that one's."""
    if place.startswith(("http://", "https://")):
        return _audit_url(place.rstrip("/"), coordinator_key)
    return _audit_folder(Path(place), coordinator_key)


def _audit_folder(folder: Path, coordinator_key: str | None) -> VerificationReport:
    database = folder / DATABASE_FILE
    if not database.is_file():
        raise UserError(
            f"no ledger at {folder}: expected {DATABASE_FILE} there; give a coordinator's data folder or URL"
        )
    store, blobs = Store(f"sqlite:///{database.absolute()}"), Blobs.from_url(str(folder / "blobs"))
    try:
        return verify_ledger(
            _stored_entries(store),
            lambda wanted: blobs.get(payload_key(wanted)),
            lambda wanted: blobs.get(snapshot_key(wanted)),
            coordinator_key,
        )
    finally:
        store.close()


def _stored_entries(store: Store) -> Iterator[LedgerEntry]:
    since = 0
    with store.read() as session:
        while page := read_entries(session, since, MAX_LEDGER_PAGE):
            yield from page
            since += len(page)


def _audit_url(url: str, coordinator_key: str | None) -> VerificationReport:
    with httpx2.Client(timeout=TIMEOUT_SECONDS, follow_redirects=True) as http:

        def fetch(path: str) -> bytes:
            try:
                return http.get(url + path).raise_for_status().content
            except httpx2.HTTPError as error:
                raise StorageError(f"cannot fetch {url}{path}: {error}") from None

        def entries() -> Iterator[LedgerEntry]:
            since = 0
            while page := LedgerAnswer.model_validate_json(fetch(f"/v1/ledger?since={since}")).entries:
                yield from page
                since += len(page)

        return verify_ledger(
            entries(),
            lambda wanted: fetch(f"/v1/updates/{wanted}"),
            lambda wanted: fetch(f"/v1/snapshots/{wanted}"),
            coordinator_key,
        )
