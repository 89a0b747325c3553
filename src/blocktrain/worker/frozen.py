"""Snapshots of other blocks that assignments name: brought ahead of time, kept in host memory.

They come by the same ways as the worker's own block: from disk, from the seed, by the payloads of the merges
in between, or whole. The last version of each block stays here, so that the next one costs its payloads only;
now and then it is written to disk for the next start. Used by the asking thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.errors import WireError
from blocktrain.wire.messages import Assignment, FrozenSnapshot
from blocktrain.worker.decisions import SNAPSHOT_SAVING_SECONDS, saving_is_due
from blocktrain.worker.state import StateFolder


class FrozenSnapshots:
    def __init__(
        self, snapshots: Snapshots, state: StateFolder, trained: Callable[[int], Base | None]
    ) -> None:
        """`trained` gives the snapshot of a block that this worker trains too."""
        self.snapshots, self.state, self.trained = snapshots, state, trained
        self._held: dict[int, Base] = {}
        self._saved_at: dict[int, float] = {}
        self._saving_seconds = 0.0

    def bring(self, assignment: Assignment) -> dict[int, Base]:
        """The snapshots by block, in the order named; a Refusal where the coordinator has one no longer."""
        self._check(assignment)
        found = {}
        for one in assignment.frozen:
            base = self.snapshots.named(one.block, one.version, one.hash, self._nearest(one))
            found[one.block] = self._held[one.block] = base
            self._save(one.block, base)
        return found

    def _check(self, assignment: Assignment) -> None:
        wanted = self.snapshots.setup.objective.upstream(assignment.block)
        named = tuple(one.block for one in assignment.frozen)
        if named != wanted:
            raise WireError(
                f"round {assignment.round} of block {assignment.block} needs blocks {list(wanted)} frozen, "
                f"the coordinator names {list(named)}; is it another version? update one of the two"
            )

    def _nearest(self, wanted: FrozenSnapshot) -> Base | None:
        """What is here to start from: the newest that is not newer."""
        here = (self._held.get(wanted.block) or self._kept(wanted.block), self.trained(wanted.block))
        usable = [base for base in here if base is not None and base.version <= wanted.version]
        return max(usable, key=lambda base: base.version, default=None)

    def _kept(self, block: int) -> Base | None:
        """What an earlier process wrote down."""
        kept = self.state.load_snapshot_name(block)
        return None if kept is None else self.snapshots.on_disk(block, kept.version, kept.hash)

    def _save(self, block: int, base: Base) -> None:
        now = time.monotonic()
        saved_at, cost = self._saved_at.get(block), self._saving_seconds
        if saving_is_due(
            now=now, saved_at=saved_at, cost_seconds=cost, least_seconds=SNAPSHOT_SAVING_SECONDS
        ):
            self.snapshots.keep(base)
            self.state.save_snapshot_name(block, base.version, base.hash)
            self._saved_at[block] = time.monotonic()
            self._saving_seconds = self._saved_at[block] - now
