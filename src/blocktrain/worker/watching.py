"""One thread per block that this worker trains: sees its new snapshots, rebuilds them, moves the progress.

It looks often while an own update is about to be merged and rarely otherwise, and it writes a snapshot to
disk now and then for the next start. It ends when the worker stops, or has left the block and nothing of it
is on its way.
"""

from __future__ import annotations

import time
from functools import partial

from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.threads import Threads
from blocktrain.wire.identity import WorkerId
from blocktrain.worker.block_progress import BlockProgress
from blocktrain.worker.live_view import PlainView
from blocktrain.worker.logic import WorkerLogic
from blocktrain.worker.state import StateFolder, saving_is_due

FIRST_WATCH_SECONDS = 0.05
IDLE_WATCH_SECONDS = 2.0
SNAPSHOT_SAVING_SECONDS = 5.0


def watch_seconds(*, waiting: bool, quiet_seconds: float) -> float:
    """How long until the head is looked at again: often while an own update is about to be merged."""
    if not waiting:
        return IDLE_WATCH_SECONDS
    return min(IDLE_WATCH_SECONDS, max(FIRST_WATCH_SECONDS, quiet_seconds / 4))


class SnapshotKeeper:
    """Writes snapshots to disk for the next start, as often as costs little."""

    def __init__(self, snapshots: Snapshots, state: StateFolder) -> None:
        self.snapshots, self.state = snapshots, state
        self._saved_at: dict[int, float] = {}
        self._cost_seconds = 0.0

    def on_disk(self, block: int) -> Base | None:
        """What an earlier process wrote down."""
        kept = self.state.load_snapshot_name(block)
        return None if kept is None else self.snapshots.on_disk(block, kept.version, kept.hash)

    def save_if_due(self, block: int, base: Base) -> None:
        now = time.monotonic()
        if saving_is_due(
            now=now,
            saved_at=self._saved_at.get(block),
            cost_seconds=self._cost_seconds,
            least_seconds=SNAPSHOT_SAVING_SECONDS,
        ):
            self.save(block, base)
            self._saved_at[block] = time.monotonic()
            self._cost_seconds = self._saved_at[block] - now

    def save(self, block: int, base: Base) -> None:
        self.snapshots.keep(base)
        self.state.save_snapshot_name(block, base)


class Watching:
    def __init__(
        self,
        logic: WorkerLogic,
        threads: Threads,
        worker_id: WorkerId,
        snapshots: Snapshots,
        state: StateFolder,
        view: PlainView,
    ) -> None:
        self.logic, self.threads, self.worker_id, self.view = logic, threads, worker_id, view
        self.snapshots, self.state = snapshots, state
        self.keeper = SnapshotKeeper(snapshots, state)

    def progress_of(self, block: int) -> BlockProgress:
        """This worker's progress in a block; brings its snapshot, and begins to watch it, if it is new
        here."""
        progress = self.logic.blocks.get(block)
        if progress is None:
            base = self.snapshots.newest_for_joiner(block, self.keeper.on_disk(block))
            # Updates of an earlier process have been delivered or returned before the first assignment.
            feedback, _ = self.state.load_feedback(block)
            layout = self.snapshots.layouts[block]
            progress = BlockProgress(layout, base, feedback, self.logic.swarm, self.logic.changed)
            self.logic.add_block(progress)
            self.threads.start(f"watching-{block}", partial(self._watch, progress))
        return progress

    def _watch(self, progress: BlockProgress) -> None:
        changed_at, known = time.monotonic(), 0
        while not self.logic.stop.is_set() and not self.logic.retire(progress.block):
            if self._look(progress):
                changed_at = time.monotonic()
            if (formed := progress.num_formed()) != known:
                known, changed_at = formed, time.monotonic()
            # The longer nothing happens, the less a late look matters: a quarter of the wait, at most 2 s.
            pause = watch_seconds(waiting=formed > 0, quiet_seconds=time.monotonic() - changed_at)
            self.logic.wait(lambda: progress.num_formed() > known, pause)  # noqa: B023

    def _look(self, progress: BlockProgress) -> bool:
        """Whether there was a new head."""
        block, before = progress.block, progress.base
        # One small request; merges and payloads are asked for only when there is something new.
        if self.snapshots.client.block(block).head_version <= before.version:
            return False
        base, merges = self.snapshots.newest(block, before)
        mine = {
            one.payload_hash for merge in merges for one in merge.inputs if one.worker_id == self.worker_id
        }
        if progress.advance(base, mine):
            self.state.save_progress(progress)  # what was given up is in error feedback now
        self.view.rebased(block, base.version)
        self.keeper.save_if_due(block, base)
        return True
