"""The watcher: sees a block's new snapshots, rebuilds them, and moves the worker's standing.

One per block this worker stands in. It looks often while an own update is about to be merged and seldom
otherwise (`decisions.watch_seconds`), and it writes a snapshot to disk now and then for the next start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.wire.identity import WorkerId
from blocktrain.worker.decisions import SNAPSHOT_SAVING_SECONDS, saving_is_due, watch_seconds
from blocktrain.worker.progress import Progress
from blocktrain.worker.sender import Sender
from blocktrain.worker.standing import Flight, Standing
from blocktrain.worker.state import StateFolder


class Watcher:
    def __init__(
        self,
        standing: Standing,
        worker_id: WorkerId,
        snapshots: Snapshots,
        state: StateFolder,
        sender: Sender,
        progress: Progress,
        retired: Callable[[], bool],
    ) -> None:
        self.standing, self.worker_id, self.snapshots = standing, worker_id, snapshots
        self.state, self.sender, self.progress, self.retired = state, sender, progress, retired
        self._saved_at: float | None = None
        self._saving_seconds = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until the worker stops, or has left this block and nothing of it is on its way."""
        changed_at = time.monotonic()
        in_flight = 0
        while not stop.is_set() and not self.retired():
            if self._look():
                changed_at = time.monotonic()
            flights = len([flight for flight in self.standing.flights() if flight.sent is not None])
            if flights != in_flight:
                in_flight, changed_at = flights, time.monotonic()
            pause = watch_seconds(waiting=flights > 0, quiet_seconds=time.monotonic() - changed_at)
            self.standing.wait_for_flight(flights, pause)

    def _look(self) -> bool:
        before = self.standing.base
        if self.snapshots.client.block(self.standing.block).head_version <= before.version:
            return False
        base, merges = self.snapshots.newest(self.standing.block, before)
        mine = {
            one.payload_hash for merge in merges for one in merge.inputs if one.worker_id == self.worker_id
        }
        for flight in self.standing.advance(base, mine):
            self._give_up(flight)
        self.progress.rebased(self.standing.block, base.version)
        self._save(base)
        return True

    def _give_up(self, flight: Flight) -> None:
        """An update that should have been merged and was not: take its progress back."""
        assert flight.sent is not None
        payload = self.snapshots.kept_payload(flight.sent.payload_hash)
        if payload is not None:
            self.sender.take_back(self.standing, flight.sent.payload_hash, payload, None, 1.0)

    def _save(self, base: Base) -> None:
        now = time.monotonic()
        if not saving_is_due(
            now=now,
            saved_at=self._saved_at,
            cost_seconds=self._saving_seconds,
            least_seconds=SNAPSHOT_SAVING_SECONDS,
        ):
            return
        self.snapshots.keep(base)
        self.state.save_snapshot_name(self.standing.block, base.version, base.hash)
        self._saved_at = time.monotonic()
        self._saving_seconds = self._saved_at - now
