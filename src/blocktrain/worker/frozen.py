"""Snapshots of other blocks that assignments name: brought ahead of time, kept in host memory.

They come by the same ways as the worker's own block: from disk, from the seed, by the payloads of the merges
in between, or whole. The last version of each block stays here, so that the next one costs its payloads only;
now and then it is written to disk for the next start. Used by the asking thread alone.
"""

from __future__ import annotations

from blocktrain.client.snapshots import Base
from blocktrain.errors import WireError
from blocktrain.wire.messages import Assignment
from blocktrain.worker.logic import WorkerLogic
from blocktrain.worker.watching import SnapshotKeeper


class FrozenSnapshots:
    def __init__(self, keeper: SnapshotKeeper, logic: WorkerLogic) -> None:
        self.keeper, self.logic = keeper, logic
        self._held: dict[int, Base] = {}

    def bring(self, assignment: Assignment) -> dict[int, Base]:
        """The snapshots by block, in the order named; RequestRefused where one is no longer kept."""
        snapshots = self.keeper.snapshots
        wanted = snapshots.setup.objective.upstream(assignment.block)
        named = tuple(one.block for one in assignment.frozen)
        if named != wanted:
            raise WireError(
                f"round {assignment.round} of block {assignment.block} needs blocks {list(wanted)} frozen, "
                f"the coordinator names {list(named)}; is it another version? update one of the two"
            )
        found = {}
        for one in assignment.frozen:
            # Start from the newest that is here and not newer than what is named.
            held = self._held.get(one.block) or self.keeper.on_disk(one.block)
            here = [base for base in (held, self.logic.base_of(one.block)) if base is not None]
            usable = [base for base in here if base.version <= one.version]
            nearest = max(usable, key=lambda base: base.version, default=None)
            base = snapshots.named(one.block, one.version, one.hash, nearest)
            found[one.block] = self._held[one.block] = base
            self.keeper.save_if_due(one.block, base)
        return found
