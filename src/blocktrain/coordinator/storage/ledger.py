"""The ledger: append-only, hash-chained, signed; and its verification from entries and blobs alone.

`h_n = blake3(h_{n-1} || canonical({sequence, time, kind, body}))`, signed by the run's coordinator key.
An entry is written in the transaction that does what it says. Verification regenerates every snapshot
from the payloads and names the first entry that does not hold.

Covered: changed, missing, reordered or inserted entries, wrong signatures, merges whose result is not what
their inputs give, snapshots or payloads whose bytes were changed, assignments that name snapshots which did
not exist. Not covered: entries cut off at the end (compare the length and head with a receipt), and a
coordinator that never wrote something down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.orm import Session

from blocktrain.codec_spec import CodecSpec
from blocktrain.coordinator.storage.store import LedgerRow, Prepared, RunRow, message_of, must_last
from blocktrain.errors import BlocktrainError
from blocktrain.training.merge import assembled, replay_merge
from blocktrain.training.snapshot import from_safetensors
from blocktrain.wire.codec import Schema, Tensors, UpdateFrame, held
from blocktrain.wire.hashing import GENESIS_HASH, canonical_json, chain_hash, content_hash, snapshot_hash
from blocktrain.wire.identity import Identity, verify
from blocktrain.wire.messages import BlockLayout, LedgerEntry, MergeRecord, Outcome, Receipt

SIGNATURE_CONTEXT = b"blocktrain ledger 1\n"
WRITTEN = "written"
"""In `session.info`: the receipts of this transaction's entries, by their sequence numbers."""
_HEAD = Prepared(select(RunRow.ledger_length, RunRow.ledger_hash).with_for_update())
_RECEIPT = Prepared(
    select(LedgerRow.entry_hash, LedgerRow.signature).where(LedgerRow.sequence == bindparam("sequence"))
)
_ENTRY = Prepared(insert(LedgerRow))
_NEW_HEAD = Prepared(update(RunRow).values(ledger_length=bindparam("length"), ledger_hash=bindparam("hash")))

Body = dict[str, Any]


def entry_hash_of(previous: str, sequence: int, time: float, kind: str, body: Body) -> str:
    return chain_hash(previous, {"sequence": sequence, "time": time, "kind": kind, "body": body})


def signed_bytes(entry_hash: str) -> bytes:
    return SIGNATURE_CONTEXT + bytes.fromhex(entry_hash)


class Ledger:
    """Appends in the caller's transaction; locks the run row, so it comes last in every transaction."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, data: bytes) -> bytes:
        """By the run's coordinator key; the caller brings a context that no other signature has."""
        return self._identity.sign(data)

    def append(self, session: Session, now: float, kind: str, body: Body) -> Receipt:
        # The lock makes writers of several processes queue here, so the chain has no forks. It is the last of
        # all locks (worker, block, run): its holder waits for nobody. Once it is held, no other entry comes.
        written: dict[int, Receipt] = session.info.setdefault(WRITTEN, {})
        if written:
            last = next(reversed(written.values()))
            sequence, last_hash = last.sequence + 1, last.entry_hash
        else:
            [(sequence, last_hash)] = _HEAD(session)
        digest = entry_hash_of(last_hash, sequence, now, kind, body)
        signature = self._identity.sign(signed_bytes(digest)).hex()
        receipt = Receipt(sequence=sequence, entry_hash=digest, signature=signature)
        entry = {"time": now, "kind": kind, "body": canonical_json(body).decode()}
        _ENTRY(session, **receipt.model_dump(), **entry)
        _NEW_HEAD(session, length=sequence + 1, hash=digest)
        must_last(session)
        written[sequence] = receipt
        return receipt


def receipt_of(session: Session, sequence: int) -> Receipt:
    written: dict[int, Receipt] = session.info.get(WRITTEN, {})
    if sequence in written:
        return written[sequence]
    must_last(session)  # of another request perhaps, which still waits for the disk
    [(digest, signature)] = _RECEIPT(session, sequence=sequence)
    return Receipt(sequence=sequence, entry_hash=digest, signature=signature)


def read_entries(session: Session, since: int, limit: int) -> list[LedgerEntry]:
    rows = session.scalars(
        select(LedgerRow).where(LedgerRow.sequence >= since).order_by(LedgerRow.sequence).limit(limit)
    )
    return [message_of(LedgerEntry, row, body=json.loads(row.body)) for row in rows]


# --- verification ------------------------------------------------------------------------------------

Fetch = Callable[[str], bytes]
"""Bytes of an object by its hash, or a BlocktrainError."""


@dataclass
class VerificationReport:
    entries: int = 0
    merges: int = 0
    head_hash: str = GENESIS_HASH
    heads: dict[int, str] = field(default_factory=dict)
    """Block to the hash of its last snapshot."""
    versions: dict[int, int] = field(default_factory=dict)
    """Block to the version of that snapshot."""
    first_bad: int | None = None
    """Sequence number of the first entry that does not hold."""
    reason: str = "every entry holds"

    @property
    def ok(self) -> bool:
        return self.first_bad is None


class _Broken(BlocktrainError):
    pass


def verify_ledger(
    entries: Iterable[LedgerEntry],
    fetch_payload: Fetch | None,
    fetch_snapshot: Fetch,
    coordinator_key: str | None = None,
) -> VerificationReport:
    """Chain, signatures and every merge; with `coordinator_key` the run must be that coordinator's.

    Without `fetch_payload` no merge is done again: its signed record is believed, nothing is fetched, and
    what remains is which snapshot the coordinator has put its name to.
    """
    report = VerificationReport()
    replay = _Replay(fetch_payload, fetch_snapshot, coordinator_key)
    for number, entry in enumerate(entries):
        try:
            if entry.sequence != number:
                raise _Broken(f"expected sequence number {number}, found {entry.sequence}")
            digest = entry_hash_of(report.head_hash, number, entry.time, entry.kind, entry.body)
            if digest != entry.entry_hash:
                raise _Broken("its hash does not follow from its content and the entry before it")
            replay.take(entry)
            # After `take`, since the first entry brings the key that signs them all.
            if not verify(replay.key, signed_bytes(digest), bytes.fromhex(entry.signature)):
                raise _Broken("the signature is not the coordinator's")
        # A body is a stranger's JSON: a missing key or a wrong type in it is a broken entry, not a fault.
        except (BlocktrainError, ValueError, KeyError, TypeError) as error:
            report.first_bad, report.reason = number, f"entry {number} ({entry.kind}): {error}"
            break
        report.entries, report.head_hash = number + 1, digest
    if report.ok and (lost := replay.lost_snapshot()) is not None:
        number, sentence = lost
        report.first_bad, report.reason = number, f"entry {number} (snapshot): {sentence}"
    report.merges, report.heads, report.versions = replay.merges, dict(replay.heads), dict(replay.versions)
    return report


def check_receipts(hashes: Sequence[str], key: bytes, receipts: Iterable[Receipt]) -> list[str]:
    """What receipts prove against a ledger whose entries have these hashes; empty where they agree.

    A receipt with the coordinator's signature on another hash than the ledger's shows two heads: one of them
    was hidden from somebody.
    """
    problems = []
    for receipt in receipts:
        name = f"receipt of entry {receipt.sequence}"
        if not verify(key, signed_bytes(receipt.entry_hash), bytes.fromhex(receipt.signature)):
            problems.append(f"{name}: not signed by this run's coordinator; it proves nothing")
        elif receipt.sequence >= len(hashes):
            problems.append(
                f"{name}: the ledger ends at {len(hashes)} entries; what was acknowledged is gone"
            )
        elif hashes[receipt.sequence] != receipt.entry_hash:
            problems.append(
                f"{name}: two heads: the coordinator signed {receipt.entry_hash[:16]}… and shows "
                f"{hashes[receipt.sequence][:16]}…"
            )
    return problems


def first_difference(one: Sequence[LedgerEntry], other: Sequence[LedgerEntry]) -> int | None:
    """Number of the first entry that two copies of a ledger tell differently; None where one begins with
    the other."""
    for left, right in zip(one, other, strict=False):
        if left.entry_hash != right.entry_hash:
            return left.sequence
    return None


class _Replay:
    """The blocks' weights as the ledger tells them, entry by entry."""

    def __init__(
        self, fetch_payload: Fetch | None, fetch_snapshot: Fetch, coordinator_key: str | None
    ) -> None:
        self._fetch_payload, self._fetch_snapshot = fetch_payload, fetch_snapshot
        self._wanted_key = coordinator_key
        self.key = b""
        self.heads: dict[int, str] = {}
        self.versions: dict[int, int] = {}
        self.merges = 0
        self._tensors: dict[int, Tensors] = {}
        self._schemas: dict[int, Schema] = {}
        self._codec = CodecSpec("dense")
        self._published: set[tuple[int, int, str]] = set()
        """Block, version and hash of every snapshot so far."""
        self._unmerged: dict[str, float] = {}
        """Updates with an accepting verdict and no merge yet, and the weight they were promised."""
        self._missing: list[tuple[int, int, int, str]] = []
        """Entry, block and version of snapshots that are not stored, and what was said instead."""
        self._kept: int | None = None
        """The fewest newest snapshots of a block that the run has said it keeps; None for all."""

    def take(self, entry: LedgerEntry) -> None:
        body = entry.body
        if entry.kind == "run":
            given = body.get("settings", {}).get("swarm.keep_snapshots")
            if entry.sequence == 0:
                given = body["recipe"].get("swarm", {}).get("keep_snapshots")
            if given is not None:
                self._kept = int(given) if self._kept is None else min(self._kept, int(given))
        if entry.sequence == 0:
            if entry.kind != "run":
                raise _Broken("the first entry must describe the run")
            found = body["coordinator_key"]
            if self._wanted_key not in (None, found):
                raise _Broken(f"expected coordinator key {self._wanted_key}, found {found}")
            self.key = bytes.fromhex(found)
            for layout in map(BlockLayout.model_validate, body["blocks"]):
                schema = Schema(tuple((tensor.name, tensor.shape) for tensor in layout.tensors))
                self._schemas[layout.block], self._codec = schema, CodecSpec.parse(layout.codec)
                self.heads[layout.block], self.versions[layout.block] = layout.initial_hash, 0
                self._published.add((layout.block, 0, layout.initial_hash))
                if self._fetch_payload is not None:
                    self._tensors[layout.block] = self._load(layout.block, layout.initial_hash)
        elif entry.kind == "assign":
            # The snapshots that an assignment names were published before it.
            for one in body.get("frozen", ()):
                if (one["block"], one["version"], one["hash"]) not in self._published:
                    raise _Broken(
                        f"names version {one['version']} of block {one['block']}, which was not there yet"
                    )
        elif entry.kind == "verdict":
            # A later refusal (by the guard, or with a ban) takes an earlier promise back.
            if body["outcome"] == Outcome.REFUSED:
                self._unmerged.pop(body["update_id"], None)
            else:
                self._unmerged[body["update_id"]] = body["weight"]
        elif entry.kind == "merge":
            self._merge(MergeRecord.model_validate(body))
        elif entry.kind == "snapshot":
            # The stored file must be the weights that the merges gave.
            if body["hash"] != self.heads[body["block"]]:
                raise _Broken(f"names snapshot {body['hash']}, the merges give {self.heads[body['block']]}")
            if self._fetch_payload is not None:
                try:
                    self._load(body["block"], body["hash"])
                except _Broken:
                    raise
                except BlocktrainError as error:  # whether it may be missing is known at the end
                    self._missing.append((entry.sequence, body["block"], body["version"], str(error)))

    def lost_snapshot(self) -> tuple[int, str] | None:
        """The first entry whose snapshot should be stored and is not, and why it is not found."""
        for sequence, block, version, sentence in self._missing:
            if self._kept is None or version > self.versions[block] - self._kept:
                return sequence, sentence
        return None

    def _merge(self, record: MergeRecord) -> None:
        block, schema = record.block, self._schemas[record.block]
        if record.base_hash != self.heads[block]:
            raise _Broken(f"merges into {record.base_hash}, the head is {self.heads[block]}")
        updates, bases = {}, {}
        for one in record.inputs:
            if self._unmerged.pop(one.update_id, None) != one.weight:
                raise _Broken(f"update {one.update_id} is merged twice, or not as its verdict said")
            if self._fetch_payload is None:
                continue
            payload = self._fetch_payload(one.payload_hash)
            if content_hash(payload) != one.payload_hash:
                raise _Broken(f"the stored payload {one.payload_hash} has other contents")
            updates[one.payload_hash] = UpdateFrame(
                self._codec, schema, np.frombuffer(payload, np.uint8)
            ).read
            # A dense payload is whole weights, so the change it makes is measured from its own base.
            if self._codec.sends_weights and one.base_hash != record.base_hash:
                bases[one.base_hash] = held(self._load(block, one.base_hash))
        if self._fetch_payload is not None:
            bands = replay_merge(record, schema, held(self._tensors[block]), updates, bases)
            self._tensors[block] = assembled(schema, bands)
            result = snapshot_hash(self._tensors[block])
            if result != record.result_hash:
                raise _Broken(f"its inputs give {result}, not {record.result_hash}")
        self.heads[block], self.versions[block] = record.result_hash, record.version
        self._published.add((block, record.version, record.result_hash))
        self.merges += 1

    def _load(self, block: int, wanted: str) -> Tensors:
        tensors = from_safetensors(self._fetch_snapshot(wanted), self._schemas[block])
        if snapshot_hash(tensors) != wanted:
            raise _Broken(f"the stored snapshot {wanted} has other contents")
        return tensors
