"""Reading a ledger from a data folder or a coordinator's address, and what verifying it says."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient, public_client
from blocktrain.client.texts import FetchedText
from blocktrain.config import with_settings
from blocktrain.coordinator.service import DATABASE_FILE
from blocktrain.coordinator.storage.blobs import Blobs, payload_key, snapshot_key
from blocktrain.coordinator.storage.ledger import (
    VerificationReport,
    check_receipts,
    first_difference,
    read_entries,
    verify_ledger,
)
from blocktrain.coordinator.storage.store import EvaluationRow, Store
from blocktrain.data.dataset import Dataset
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.errors import UserError
from blocktrain.wire.messages import MAX_LEDGER_PAGE, EvaluationState, LedgerEntry, Receipt

MAX_OBJECT_BYTES = 1 << 34
"""No block is larger; an endless answer is cut off here."""


@dataclass(frozen=True)
class Source:
    """A copy of a ledger, and where its objects are."""

    name: str
    entries: list[LedgerEntry]
    payload: Callable[[str], bytes]
    snapshot: Callable[[str], bytes]
    evaluation: Callable[[], EvaluationState | None]
    """The coordinator's last score of the assembled model."""
    tokenizer: Callable[[], Tokenizer]
    """That of the run's text: the blocks' shapes follow from its vocabulary."""

    def recipe(self) -> dict[str, Any]:
        """The run's recipe as the ledger tells it: the first entry's, with every change made since."""
        first, *later = (entry.body for entry in self.entries if entry.kind == "run")
        settings: dict[str, Any] = {}
        for body in later:
            settings |= body["settings"]
        return with_settings(first["recipe"], settings)


def is_data_folder(folder: Path) -> bool:
    return (folder / DATABASE_FILE).exists()


@contextlib.contextmanager
def open_source(place: str) -> Iterator[Source]:
    """The ledger at an address or in a data folder; its objects can be asked for while it is open."""
    if "://" not in place:
        yield _from_folder(Path(place).expanduser())
        return
    with public_client(place) as client:
        yield _from_client(client)


def _from_folder(folder: Path) -> Source:
    database = folder / DATABASE_FILE
    if not is_data_folder(folder):
        raise UserError(
            f"no ledger at {folder}: expected a coordinator's --data-dir, with {DATABASE_FILE}; where the "
            "run is kept by --database, give the coordinator's address instead"
        )
    store, blobs = Store(f"sqlite:///{database.absolute()}"), Blobs.from_url(str(folder / "blobs"))
    try:
        entries = list(_stored_entries(store))
        with store.read() as session:
            newest = select(EvaluationRow.record).order_by(EvaluationRow.time.desc()).limit(1)
            record = session.scalar(newest)
    finally:
        store.close()

    def tokenizer() -> Tokenizer:
        dataset = source.recipe()["data"].get("dataset")
        return ByteTokenizer() if dataset is None else Dataset.open(Path(dataset).expanduser()).tokenizer()

    source = Source(
        str(folder),
        entries,
        lambda wanted: blobs.get(payload_key(wanted)),
        lambda wanted: blobs.get(snapshot_key(wanted)),
        lambda: None if record is None else EvaluationState.model_validate_json(record),
        tokenizer,
    )
    return source


def _stored_entries(store: Store) -> Iterator[LedgerEntry]:
    since = 0
    while True:
        with store.read() as session:
            page = read_entries(session, since, MAX_LEDGER_PAGE)
        if not page:
            return
        yield from page
        since = page[-1].sequence + 1


def _from_client(client: CoordinatorClient) -> Source:
    run = client.run()  # says in words what else lives at this address
    entries: list[LedgerEntry] = []
    # Whole, before anything is checked: a coordinator cannot choose its later pages by what we ask for next.
    while page := client.ledger(len(entries)).entries:
        entries += page

    def tokenizer() -> Tokenizer:
        # Older coordinators name no dataset; their text is bytes.
        if run.dataset is None:
            return ByteTokenizer()
        with tempfile.TemporaryDirectory() as temporary:
            cache = BlobCache(Path(temporary), max_bytes=0)
            return FetchedText(client, run, cache, lambda _: None).tokenizer()

    return Source(
        client.url,
        entries,
        lambda wanted: client.fetch(f"/v1/updates/{wanted}", MAX_OBJECT_BYTES),
        lambda wanted: client.fetch(f"/v1/snapshots/{wanted}", MAX_OBJECT_BYTES),
        lambda: next(iter(client.status().evaluations[-1:]), None),
        tokenizer,
    )


def read_receipts(folder: Path) -> list[Receipt]:
    """All receipts a worker kept, in any run under its data folder."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("receipts.jsonl"))
    if not files:
        raise UserError(f"no receipts in {folder}: expected a worker's --data-dir")
    receipts = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                receipts.append(Receipt.model_validate_json(line))
            except ValidationError:
                raise UserError(f"{file}:{number} is not a receipt; remove the line or restore it") from None
    return receipts


@dataclass(frozen=True)
class Findings:
    report: VerificationReport
    problems: list[str]
    receipts: int

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.problems


def verify_place(
    place: str, receipts: Sequence[Receipt] = (), against: str | None = None, key: str | None = None
) -> Findings:
    """Replay the copy at an address or in a folder, then hold receipts and another copy against it."""
    with open_source(place) as source:
        report = verify_ledger(source.entries, source.payload, source.snapshot, key)
    problems = []
    # A ledger that replays may still be another one than a worker was promised, or than others are shown.
    if receipts and source.entries:
        found = bytes.fromhex(str(source.entries[0].body.get("coordinator_key", "")))
        problems += check_receipts([entry.entry_hash for entry in source.entries], found, receipts)
    if against is not None:
        with open_source(against) as other:
            number = first_difference(source.entries, other.entries)
        if number is not None:
            problems.append(f"two heads: {source.name} and {other.name} differ from entry {number} on")
    return Findings(report, problems, len(receipts))
