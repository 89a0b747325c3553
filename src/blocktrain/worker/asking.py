"""Two threads: one keeps the next assignment ready, one keeps the leases of those in hand.

The next assignment is asked for shortly before the running one ends, and what it needs is brought meanwhile,
so that the trainer never waits for an answer: the snapshot of a block that is new here, and those of frozen
blocks. An assignment that names a frozen snapshot which the coordinator no longer has is handed back, and
another asked for. Heartbeats run beside, so that a long download does not cost the lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from blocktrain.client.coordinator import CoordinatorClient, RequestRefused
from blocktrain.client.snapshots import Base
from blocktrain.errors import WireError
from blocktrain.wire.messages import Assignment, ErrorReason, Finished, HeartbeatRequest, Wait
from blocktrain.worker.block_progress import PendingState, PendingUpdate
from blocktrain.worker.joining import Membership
from blocktrain.worker.live_view import PlainView
from blocktrain.worker.logic import TICK_SECONDS, WorkerLogic
from blocktrain.worker.watching import SnapshotKeeper, Watching

ASLEEP_SECONDS = 20.0
LONGEST_PAUSE_SECONDS = 1.0
UNKNOWN_REASONS = {"not_found", "not_yours"}
GONE_STATUS = 404
MAX_DECLINED = 3
"""Assignments in a row with a snapshot that nobody has: then it is the operator's affair."""


def slept_seconds(*, wall: float, monotonic: float) -> float | None:
    """How long this machine was suspended, from what both clocks say has passed; None if it was not.

    The monotonic clock stands still in suspension on Linux and macOS; the wall clock does not. A wall clock
    set back is no sleep.
    """
    gap = wall - monotonic
    return gap if gap > ASLEEP_SECONDS else None


class FrozenSnapshots:
    """Snapshots of other blocks that assignments name: brought ahead of time, kept in host memory.

    They come by the same ways as the worker's own block: from disk, from the seed, by the payloads of the
    merges in between, or whole. The last version of each block stays here, so that the next one costs its
    payloads only; now and then it is written to disk for the next start.
    """

    def __init__(self, keeper: SnapshotKeeper, logic: WorkerLogic) -> None:
        self.keeper, self.logic = keeper, logic
        self._held: dict[int, Base] = {}

    def bring(self, assignment: Assignment) -> dict[int, Base]:
        """The snapshots by block, in the order named; RequestRefused where one is no longer kept."""
        snapshots = self.keeper.snapshots
        wanted = snapshots.setup.objective.frozen(assignment.block)
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


class Asking:
    def __init__(
        self,
        logic: WorkerLogic,
        client: CoordinatorClient,
        membership: Membership,
        watching: Watching,
        frozen: FrozenSnapshots,
        view: PlainView,
        bring_text: Callable[[Assignment], None] = lambda assignment: None,
    ) -> None:
        self.bring_text = bring_text
        self.logic, self.client, self.membership = logic, client, membership
        self.watching, self.frozen, self.view = watching, frozen, view
        self._declined = 0

    # --- the next assignment

    def run(self) -> None:
        logic = self.logic
        while not logic.stop.is_set() and not logic.run_is_finished:
            if not logic.should_ask(time.monotonic()):
                logic.stop.wait(TICK_SECONDS)
                continue
            try:
                answer = self.client.ask(logic.request())
            except RequestRefused as refusal:
                # The coordinator was restored from an older copy, or never knew us: neither ends a worker.
                if refusal.reason == ErrorReason.NOT_JOINED:
                    self.membership.join()
                elif logic.current is not None and refusal.reason in UNKNOWN_REASONS:
                    logic.forget_current()
                else:
                    raise
                continue
            if isinstance(answer, Assignment):
                self.view.run_seconds_left = answer.run_seconds_left
                update = logic.lent(answer)
                if update is not None:
                    self._prepare(update, answer)
            elif isinstance(answer, Wait):
                self._pause(answer)
            elif isinstance(answer, Finished):
                self.view.line(f"finished reason={answer.reason!r}")
                logic.finish_run()

    def _pause(self, answer: Wait) -> None:
        """As long as asked, but not longer than until the block moves on, which is what is waited for."""
        current, seconds = self.logic.current, min(max(answer.seconds, TICK_SECONDS), LONGEST_PAUSE_SECONDS)
        if current is None or current.state is not PendingState.ASSIGNED:
            # While it trains ahead, waiting for the next assignment is no news.
            self.view.waiting(answer.reason)
        progress = None if current is None else self.logic.blocks.get(current.block)
        if progress is None:
            self.logic.stop.wait(seconds)
        else:
            version = progress.base.version
            self.logic.wait(lambda: progress.base.version > version, seconds)

    def _prepare(self, update: PendingUpdate, assignment: Assignment) -> None:
        """Bring everything it takes to begin; hand the lease back where a frozen snapshot is gone."""
        self.bring_text(assignment)
        try:
            self.watching.progress_of(assignment.block)
            update.frozen = self.frozen.bring(assignment)
            self._declined = 0
        except RequestRefused as refusal:
            if refusal.status != GONE_STATUS:
                raise
            named = ", ".join(f"block {one.block} version {one.version}" for one in assignment.frozen)
            what = f"block {assignment.block} round {assignment.round} needs {named}: {refusal}"
            self._declined += 1
            if self._declined >= MAX_DECLINED:
                raise WireError(
                    f"{what}; this happened {MAX_DECLINED} times: ask the operator to restore the snapshots"
                ) from None
            self.view.line(f"declined {what}; asking for another assignment")
            self.client.let_go(update.assignment_id)
            self.logic.cancel(update)
        self.logic.prepared(update)

    # --- heartbeats

    def run_heartbeats(self) -> None:
        logic, wall, monotonic = self.logic, time.time(), time.monotonic()
        while not logic.stop.wait(TICK_SECONDS):
            slept = slept_seconds(wall=time.time() - wall, monotonic=time.monotonic() - monotonic)
            wall, monotonic = time.time(), time.monotonic()
            # Connections from before a sleep look alive and are not; our leases may have lapsed.
            if slept is not None:
                self.view.line(f"woke after {slept:.0f} s asleep; opening new connections")
                self.client.reconnect()
                logic.hurry_heartbeats()
            for update in logic.heartbeats_due(monotonic):
                request = HeartbeatRequest(step=update.step, loss=update.loss)
                try:
                    answer = self.client.heartbeat(update.assignment_id, request)
                    cancel, reason = answer.cancel, answer.reason
                    self.view.run_seconds_left = answer.run_seconds_left
                except RequestRefused as refusal:
                    cancel, reason = True, str(refusal)
                if cancel and logic.cancel(update):
                    self.view.line(f"cancelled block={update.block} round={update.round} reason={reason!r}")
                    self.client.let_go(update.assignment_id)
