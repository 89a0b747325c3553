"""Getting a block's snapshot, the newest or a named one: from the seed, from payloads, or whole; always
checked against its hash.

The cheapest way wins (`decisions.cheapest_route`). Own payloads are still in the cache, so a worker that
trains a block alone downloads nothing. A rebuilt snapshot whose hash differs is not used: the whole one
is downloaded, from where an interrupted download stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blocktrain.client.coordinator import CoordinatorClient, Refusal
from blocktrain.config import Recipe
from blocktrain.errors import WireError
from blocktrain.ids import derive_seed
from blocktrain.model.objective import Objective
from blocktrain.training.merge import replay_merge
from blocktrain.training.snapshot import (
    SnapshotError,
    from_safetensors,
    max_snapshot_bytes,
    snapshot_hash,
    tensors_of,
    to_safetensors,
)
from blocktrain.training.update import Weights
from blocktrain.wire.codec import CodecSpec, FrameError, Schema, decode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import BlockLayout, MergeRecord
from blocktrain.worker.cache import BlobCache
from blocktrain.worker.decisions import MERGES_PER_DOWNLOAD, Route, cheapest_route
from blocktrain.worker.standing import Base

DOWNLOAD_ATTEMPTS = 3


class _BrokenChain(Exception):
    """A payload or base is missing, or a rebuilt snapshot has another hash."""


@dataclass(frozen=True)
class Layout:
    """What every frame and snapshot of a block looks like."""

    block: int
    codec: CodecSpec
    schema: Schema
    payload_bytes: int
    initial_hash: str

    @classmethod
    def of(cls, layout: BlockLayout) -> Layout:
        schema = Schema(tuple((tensor.name, tensor.shape) for tensor in layout.tensors))
        return cls(
            layout.block, CodecSpec.parse(layout.codec), schema, layout.payload_bytes, layout.initial_hash
        )


class Snapshots:
    def __init__(
        self,
        client: CoordinatorClient,
        cache: BlobCache,
        recipe: Recipe,
        objective: Objective,
        layouts: Sequence[Layout],
        report: Callable[[str], None],
    ) -> None:
        self.client, self.cache, self.recipe, self.objective = client, cache, recipe, objective
        self.layouts, self.report = layouts, report
        self._downloading = [threading.Lock() for _ in layouts]
        """One download of a block at a time: its watcher may want what the desk brings as a frozen one."""

    def newest(self, block: int, held: Base) -> tuple[Base, list[MergeRecord]]:
        """The block's head, and every merge since `held`."""
        version, wanted_hash, merges = self._merges(block, held.version)
        return self._reach(self.layouts[block], held, version, wanted_hash, merges), merges

    def named(self, block: int, version: int, wanted_hash: str, held: Base | None) -> Base:
        """This version, for somebody who has an older one, or none; the head may have moved on since."""
        if held is not None and held.hash == wanted_hash:
            return held
        if (found := self.on_disk(block, version, wanted_hash)) is not None:
            return found
        if held is None or held.version >= version:
            held = self.initial(block) if version <= MERGES_PER_DOWNLOAD else None
        if held is None or version - held.version > MERGES_PER_DOWNLOAD:
            return self._whole(self.layouts[block], version, wanted_hash, "no version near it is here")
        merges = self._merges(block, held.version, version)[2] if version > held.version else []
        return self._reach(self.layouts[block], held, version, wanted_hash, merges)

    def _reach(
        self, layout: Layout, held: Base, version: int, wanted_hash: str, merges: Sequence[MergeRecord]
    ) -> Base:
        """Version `version`, which these merges lead to from `held`, by the cheaper way."""
        if held.hash == wanted_hash:
            return held
        route, reason = cheapest_route(
            wanted=version,
            held=held.version,
            chain_bytes=self._missing_bytes(layout, merges),
            snapshot_bytes=4 * layout.schema.num_values,
        )
        if route is Route.CHAIN:
            try:
                return self._rebuild(layout, held, merges, wanted_hash)
            except _BrokenChain as broken:
                reason = str(broken)
        return self._whole(layout, version, wanted_hash, reason)

    def _whole(self, layout: Layout, version: int, wanted_hash: str, reason: str) -> Base:
        self.report(f"downloading block={layout.block} version={version} ({reason})")
        return Base(version, wanted_hash, self._download(layout, wanted_hash))

    def newest_for_joiner(self, block: int, held: Base | None) -> Base:
        """The block's head for somebody who has an old snapshot or none; a long history is not listed."""
        head = self.client.block(block)
        start = held.version if held is not None else 0
        if head.head_version - start > MERGES_PER_DOWNLOAD:
            reason = f"have version {start}"
            return self._whole(self.layouts[block], head.head_version, head.head_hash, reason)
        return self.newest(block, held or self.initial(block))[0]

    def initial(self, block: int) -> Base:
        """Version 0, regenerated from the recipe's seed, or downloaded where this torch draws otherwise."""
        layout = self.layouts[block]
        weights = tensors_of(self.objective.build(block, derive_seed("init", self.recipe.seed, block)))
        if snapshot_hash(weights) != layout.initial_hash:
            self.report(f"this torch draws other initial weights for block {block}; downloading them")
            weights = self._download(layout, layout.initial_hash)
        return Base(0, layout.initial_hash, weights)

    def whole(self, block: int, wanted_hash: str) -> Weights:
        """One snapshot by its hash, downloaded."""
        return self._download(self.layouts[block], wanted_hash)

    def keep(self, base: Base) -> None:
        """Write a snapshot to disk, for the next start."""
        if self.cache.path(_file(base.hash)) is None:
            self.cache.put(_file(base.hash), to_safetensors(base.weights))

    def on_disk(self, block: int, version: int, wanted_hash: str) -> Base | None:
        weights = self._cached(self.layouts[block], wanted_hash)
        return None if weights is None else Base(version, wanted_hash, weights)

    def _merges(self, block: int, since: int, until: int | None = None) -> tuple[int, str, list[MergeRecord]]:
        """The head, and the merges since a version, up to the head or to version `until`."""
        merges: list[MergeRecord] = []
        while True:
            page = self.client.merges(block, since + len(merges))
            merges += page.merges
            end = page.head_version if until is None else until
            if not page.merges or since + len(merges) >= end:
                return page.head_version, page.head_hash, merges[: max(0, end - since)]

    def _missing_bytes(self, layout: Layout, merges: Sequence[MergeRecord]) -> int:
        inputs = [one for merge in merges for one in merge.inputs]
        missing = [one for one in inputs if self.cache.path(_payload_file(one.payload_hash)) is None]
        return len(missing) * layout.payload_bytes

    def _rebuild(self, layout: Layout, held: Base, merges: Sequence[MergeRecord], wanted_hash: str) -> Base:
        known = {held.hash: held.weights}
        base = held
        for merge in merges:
            if merge.base_hash != base.hash or merge.version != base.version + 1:
                raise _BrokenChain(f"merge {merge.version} does not follow version {base.version}")
            weights = self._replayed(layout, merge, base, known)
            if snapshot_hash(weights) != merge.result_hash:
                raise _BrokenChain(f"rebuilt version {merge.version} has another hash")
            base = Base(merge.version, merge.result_hash, weights)
            known[base.hash] = weights
        if base.hash != wanted_hash:
            raise _BrokenChain(f"the merges end at version {base.version}")
        return base

    def _replayed(self, layout: Layout, merge: MergeRecord, base: Base, known: dict[str, Weights]) -> Weights:
        try:
            decoded = {
                one.payload_hash: decode(layout.codec, layout.schema, self._payload(layout, one.payload_hash))
                for one in merge.inputs
            }
            return replay_merge(merge, base.weights, decoded, known)
        except FrameError as error:
            raise _BrokenChain(f"a payload of merge {merge.version} cannot be read: {error}") from None
        except KeyError as missing:
            raise _BrokenChain(f"the base {missing} of a late update is not here") from None

    def _payload(self, layout: Layout, payload_hash: str) -> bytes:
        payload = self.cache.read(_payload_file(payload_hash))
        if payload is None or content_hash(payload) != payload_hash:
            payload = self._fetched_payload(layout, payload_hash)
            if content_hash(payload) != payload_hash:
                raise _BrokenChain(f"payload {payload_hash[:12]} came with another hash")
            self.cache.put(_payload_file(payload_hash), payload)
        return payload

    def _fetched_payload(self, layout: Layout, payload_hash: str) -> bytes:
        try:
            return self.client.payload(payload_hash, layout.payload_bytes)
        except Refusal as refusal:
            raise _BrokenChain(f"payload {payload_hash[:12]} cannot be had: {refusal}") from None

    def keep_payload(self, payload_hash: str, payload: bytes) -> None:
        self.cache.put(_payload_file(payload_hash), payload)

    def kept_payload(self, payload_hash: str) -> bytes | None:
        payload = self.cache.read(_payload_file(payload_hash))
        return payload if payload is not None and content_hash(payload) == payload_hash else None

    def _cached(self, layout: Layout, wanted_hash: str) -> Weights | None:
        data = self.cache.read(_file(wanted_hash))
        if data is None:
            return None
        try:
            return _checked(data, layout.schema, wanted_hash)
        except SnapshotError:
            self.cache.remove(_file(wanted_hash))
            return None

    def _download(self, layout: Layout, wanted_hash: str) -> Weights:
        with self._downloading[layout.block]:
            cached = self._cached(layout, wanted_hash)
            return cached if cached is not None else self._downloaded(layout, wanted_hash)

    def _downloaded(self, layout: Layout, wanted_hash: str) -> Weights:
        name = _file(wanted_hash)
        for _ in range(DOWNLOAD_ATTEMPTS):
            target = self.cache.partial(name)
            self.client.download(f"/v1/snapshots/{wanted_hash}", target, max_snapshot_bytes(layout.schema))
            try:
                weights = _checked(target.read_bytes(), layout.schema, wanted_hash)
            except SnapshotError as error:
                self.report(f"snapshot {wanted_hash[:12]} is damaged ({error}); downloading it again")
                self.cache.remove(name)
                continue
            self.cache.complete(name)
            return weights
        raise WireError(
            f"snapshot {wanted_hash[:12]} of block {layout.block} came damaged {DOWNLOAD_ATTEMPTS} times; "
            "the coordinator, or something on the way to it, changes what it serves: ask its operator"
        )


def _checked(data: bytes, schema: Schema, wanted_hash: str) -> Weights:
    weights = from_safetensors(data, schema)
    if snapshot_hash(weights) != wanted_hash:
        raise SnapshotError(f"expected hash {wanted_hash[:12]}, found {snapshot_hash(weights)[:12]}")
    return weights


def _file(wanted_hash: str) -> str:
    return f"{wanted_hash}.safetensors"


def _payload_file(payload_hash: str) -> str:
    return f"{payload_hash}.update"
