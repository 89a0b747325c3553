"""Getting a block's snapshot, the newest or a named one: from the seed, from payloads, or whole.

Every snapshot is checked against its hash. The cheapest way wins (`snapshot_route`): a worker's own payloads
are still in its cache, so a worker that trains a block alone downloads nothing. A rebuilt snapshot with
another hash is not used; the whole one is downloaded, from where an interrupted download stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.client.run import Layout
from blocktrain.errors import WireError
from blocktrain.training.merge import assembled, replay_merge
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import (
    SnapshotError,
    from_safetensors,
    max_snapshot_bytes,
    tensors_of,
    to_safetensors,
)
from blocktrain.training.update import Weights
from blocktrain.wire.codec import FrameError, Schema, UpdateFrame, held
from blocktrain.wire.hashing import content_hash, snapshot_hash
from blocktrain.wire.messages import MergeRecord

DOWNLOAD_ATTEMPTS = 3
MERGES_PER_DOWNLOAD = 16
"""Redoing one merge takes about as long as fetching a sixteenth of the snapshot at 100 Mbit/s."""


@dataclass(frozen=True)
class Base:
    """A snapshot that is here in full."""

    version: int
    hash: str
    weights: Weights = field(repr=False)


def snapshot_route(*, wanted: int, held: int, chain_bytes: int, snapshot_bytes: int) -> tuple[bool, str]:
    """Whether to rebuild version `wanted` from `held` by its merges, or to download it whole; and why.

    `chain_bytes` are the payloads still to fetch.
    """
    merges = wanted - held
    if chain_bytes + merges * snapshot_bytes // MERGES_PER_DOWNLOAD > snapshot_bytes:
        return False, f"{merges} merges cost more than a snapshot of {snapshot_bytes} B"
    return True, f"{chain_bytes} B of payloads instead of {snapshot_bytes} B"


def fetched_bytes(*, merges: int, payloads: int, payload_bytes: float, snapshot_bytes: float) -> float:
    """What a head that is so many merges ahead costs, with so many of their payloads still to fetch."""
    chain = payloads * payload_bytes
    rebuild, _ = snapshot_route(
        wanted=merges, held=0, chain_bytes=round(chain), snapshot_bytes=round(snapshot_bytes)
    )
    return chain if rebuild else snapshot_bytes


class _BrokenChain(Exception):
    """A payload or base is missing, or a rebuilt snapshot has another hash."""


class Snapshots:
    def __init__(
        self,
        client: CoordinatorClient,
        cache: BlobCache,
        setup: Setup,
        layouts: Sequence[Layout],
        report: Callable[[str], None],
    ) -> None:
        self.client, self.cache, self.setup, self.layouts, self.report = client, cache, setup, layouts, report
        # One download of a block at a time: two threads may want the same snapshot, one to train
        # from, the other as a frozen input.
        self._downloading = [threading.Lock() for _ in layouts]

    def newest(self, block: int, held: Base) -> tuple[Base, list[MergeRecord]]:
        """The block's head, and every merge since `held`."""
        version, wanted_hash, merges = self._merges(block, held.version)
        return self._reach(self.layouts[block], held, version, wanted_hash, merges), merges

    def newest_for_joiner(self, block: int, held: Base | None) -> Base:
        """The block's head for somebody who has an old snapshot or none; a long history is not listed."""
        head = self.client.block(block)
        start = held.version if held is not None else 0
        # Listing a long history costs more requests than it can save.
        if head.head_version - start > MERGES_PER_DOWNLOAD:
            return self._whole(block, head.head_version, head.head_hash, f"have version {start}")
        return self.newest(block, held or self.initial(block))[0]

    def named(self, block: int, version: int, wanted_hash: str, held: Base | None) -> Base:
        """This version, for somebody who has an older one, or none; the head may have moved on since."""
        if held is not None and held.hash == wanted_hash:
            return held
        if (found := self.on_disk(block, version, wanted_hash)) is not None:
            return found
        if held is None or held.version >= version:
            held = self.initial(block) if version <= MERGES_PER_DOWNLOAD else None
        if held is None or version - held.version > MERGES_PER_DOWNLOAD:
            return self._whole(block, version, wanted_hash, "no version near it is here")
        merges = self._merges(block, held.version, version)[2] if version > held.version else []
        return self._reach(self.layouts[block], held, version, wanted_hash, merges)

    def initial(self, block: int) -> Base:
        """Version 0, rebuilt from the recipe's seed, or downloaded where this torch draws other numbers."""
        layout = self.layouts[block]
        weights = tensors_of(self.setup.initial(block))
        if snapshot_hash(weights) != layout.initial_hash:
            self.report(f"this torch draws other initial weights for block {block}; downloading them")
            weights = self.whole(block, layout.initial_hash)
        return Base(0, layout.initial_hash, weights)

    def whole(self, block: int, wanted_hash: str) -> Weights:
        """One snapshot by its hash: from the cache, or downloaded."""
        schema, name = self.layouts[block].schema, _file(wanted_hash)
        max_bytes = max_snapshot_bytes(schema)
        with self._downloading[block]:
            if (cached := self.on_disk(block, 0, wanted_hash)) is not None:
                return cached.weights
            for _ in range(DOWNLOAD_ATTEMPTS):
                target = self.cache.partial(name, max_bytes)
                self.client.download(f"/v1/snapshots/{wanted_hash}", target, max_bytes)
                try:
                    weights = _checked(target.read_bytes(), schema, wanted_hash)
                except SnapshotError as error:
                    self.report(f"snapshot {wanted_hash[:12]} is damaged ({error}); downloading it again")
                    self.cache.remove(name)
                    continue
                self.cache.complete(name)
                return weights
        raise WireError(
            f"snapshot {wanted_hash[:12]} of block {block} came damaged {DOWNLOAD_ATTEMPTS} times; "
            "the coordinator, or something on the way to it, changes what it serves: ask its operator"
        )

    # --- the disk

    def on_disk(self, block: int, version: int, wanted_hash: str) -> Base | None:
        data = self.cache.read(_file(wanted_hash))
        if data is None:
            return None
        try:
            return Base(version, wanted_hash, _checked(data, self.layouts[block].schema, wanted_hash))
        except SnapshotError:
            self.cache.remove(_file(wanted_hash))
            return None

    def keep(self, base: Base) -> None:
        """Write a snapshot to disk, for the next start."""
        if self.cache.path(_file(base.hash)) is None:
            self.cache.put(_file(base.hash), to_safetensors(base.weights))

    def keep_payload(self, payload_hash: str, payload: bytes) -> None:
        self.cache.put(_payload_file(payload_hash), payload)

    def kept_payload(self, payload_hash: str) -> bytes | None:
        # The hash again: a disk may have changed the bytes since they were written.
        payload = self.cache.read(_payload_file(payload_hash))
        return payload if payload is not None and content_hash(payload) == payload_hash else None

    # --- how

    def _merges(self, block: int, since: int, until: int | None = None) -> tuple[int, str, list[MergeRecord]]:
        """The head, and the merges since a version, up to the head or to version `until`."""
        merges: list[MergeRecord] = []
        while True:
            page = self.client.merges(block, since + len(merges))
            merges += page.merges
            end = page.head_version if until is None else until
            if not page.merges or since + len(merges) >= end:
                return page.head_version, page.head_hash, merges[: max(0, end - since)]

    def _reach(
        self, layout: Layout, held: Base, version: int, wanted_hash: str, merges: Sequence[MergeRecord]
    ) -> Base:
        """Version `version`, which these merges lead to from `held`, by the cheaper way."""
        if held.hash == wanted_hash:
            return held
        inputs = [one.payload_hash for merge in merges for one in merge.inputs]
        missing = sum(self.cache.path(_payload_file(one)) is None for one in inputs)
        rebuild, reason = snapshot_route(
            wanted=version,
            held=held.version,
            chain_bytes=missing * layout.payload_bytes,
            snapshot_bytes=4 * layout.schema.num_values,
        )
        if rebuild:
            try:
                return self._rebuild(layout, held, merges, wanted_hash)
            except _BrokenChain as broken:
                reason = str(broken)
        return self._whole(layout.block, version, wanted_hash, reason)

    def _whole(self, block: int, version: int, wanted_hash: str, reason: str) -> Base:
        self.report(f"downloading block={block} version={version} ({reason})")
        return Base(version, wanted_hash, self.whole(block, wanted_hash))

    def _rebuild(self, layout: Layout, start: Base, merges: Sequence[MergeRecord], wanted_hash: str) -> Base:
        # A late update was measured from an older snapshot, so every version on the way is kept.
        known = {start.hash: held(start.weights)}
        base = start
        for merge in merges:
            if merge.base_hash != base.hash or merge.version != base.version + 1:
                raise _BrokenChain(f"merge {merge.version} does not follow version {base.version}")
            try:
                payloads = {one.payload_hash: self._payload(layout, one.payload_hash) for one in merge.inputs}
                # Band by band: decoded whole, four updates would take four times the block's memory.
                updates = {
                    name: UpdateFrame(layout.codec, layout.schema, np.frombuffer(payload, np.uint8)).read
                    for name, payload in payloads.items()
                }
                bands = replay_merge(merge, layout.schema, held(base.weights), updates, known)
                weights = assembled(layout.schema, bands)
            except FrameError as error:
                raise _BrokenChain(f"a payload of merge {merge.version} cannot be read: {error}") from None
            except KeyError as missing:
                raise _BrokenChain(f"the base {missing} of a late update is not here") from None
            if snapshot_hash(weights) != merge.result_hash:
                raise _BrokenChain(f"rebuilt version {merge.version} has another hash")
            base = Base(merge.version, merge.result_hash, weights)
            known[base.hash] = held(weights)
        if base.hash != wanted_hash:
            raise _BrokenChain(f"the merges end at version {base.version}")
        return base

    def _payload(self, layout: Layout, payload_hash: str) -> bytes:
        if (kept := self.kept_payload(payload_hash)) is not None:
            return kept
        try:
            payload = self.client.payload(payload_hash, layout.payload_bytes)
        except RequestRefused as refusal:
            raise _BrokenChain(f"payload {payload_hash[:12]} cannot be had: {refusal}") from None
        if content_hash(payload) != payload_hash:
            raise _BrokenChain(f"payload {payload_hash[:12]} came with another hash")
        self.keep_payload(payload_hash, payload)
        return payload


def _checked(data: bytes, schema: Schema, wanted_hash: str) -> Weights:
    weights = from_safetensors(data, schema)
    if snapshot_hash(weights) != wanted_hash:
        raise SnapshotError(f"expected hash {wanted_hash[:12]}, found {snapshot_hash(weights)[:12]}")
    return weights


def _file(wanted_hash: str) -> str:
    return f"{wanted_hash}.safetensors"


def _payload_file(payload_hash: str) -> str:
    return f"{payload_hash}.update"
