"""What a worker does next: it is told what happened and says what to do. Two drivers, one logic.

The threads of the worker program and the virtual clock of the simulation both drive it. What happens comes in
as a call: an assignment was lent, its snapshots are here, it was trained or cancelled, an update was
delivered. What to do is a question: ask now? train which step? send which update? Weights, snapshots and
error feedback of a block are in its `BlockProgress`. Time is an argument; nothing here knows sockets, files,
tensors or clocks.

One condition guards everything, also in the blocks. It is notified with every change; the drivers wait on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from blocktrain.client.snapshots import Base
from blocktrain.config import SwarmConfig
from blocktrain.wire.messages import Assignment, AssignmentRequest
from blocktrain.worker.block_progress import BlockProgress, PendingState, PendingUpdate

PREFETCH_SECONDS = 5.0
PREFETCH_SHARE = 0.8
MAX_UNFORMED = 1
"""Finished rounds that may wait behind the one being sent; each costs a copy of the weights."""
TICK_SECONDS = 0.1
"""A signal handler can set `stop` but must not take a lock, so nobody waits longer than this without
looking."""


def own_steps(assignment: Assignment) -> int:
    """Steps on the worker's own shard, without the extra ones it runs for an absent replica."""
    return assignment.steps - (0 if assignment.stand_in is None else assignment.stand_in.steps)


def batch_of(assignment: Assignment, step: int) -> tuple[int, int]:
    """Place in the schedule, and data shard, of a step of an assignment.

    Extra steps are on the absent replica's shard and at its places: the learning rate of the round is the
    same for both, and the next round starts where this one ends, however many stood in.
    """
    own = own_steps(assignment)
    if step < own or assignment.stand_in is None:
        return assignment.first_step + step, assignment.shard
    return assignment.first_step + step - own, assignment.stand_in.shard


def may_step(*, step: int, steps: int, version: int, round_: int, run_ahead: float) -> bool:
    """Whether to train on, though the snapshot of version `round_` may still be missing.

    Running ahead hides the time of transfers and merging. Too far ahead, gradients are of weights so old that
    the others' moves overshoot: `swarm.run_ahead` bounds it to a share of a round.
    """
    return version >= round_ or step < run_ahead * steps


def asks_for_next(*, steps_done: int, steps: int, elapsed_seconds: float) -> bool:
    """Whether to ask for the next assignment now, so that it is there when this one ends.

    Late enough that the answer is fresh, early enough for a slow network: when a fifth of the round, or a few
    seconds, are left.
    """
    if steps_done >= steps or steps_done >= PREFETCH_SHARE * steps:
        return True
    # Before the first step nobody knows how long one takes.
    if not steps_done:
        return False
    return elapsed_seconds / steps_done * (steps - steps_done) <= PREFETCH_SECONDS


class WorkerLogic:
    def __init__(
        self, swarm: SwarmConfig, stop: threading.Event | None = None, prefer_block: int | None = None
    ) -> None:
        self.swarm, self.stop, self.prefer_block = swarm, stop or threading.Event(), prefer_block
        self.changed = threading.Condition()
        self.blocks: dict[int, BlockProgress] = {}
        """Blocks that this worker trains, or that it left while an update of theirs is on its way."""
        self.current: PendingUpdate | None = None
        """The update last handed to the trainer, also when it was cancelled: asking names it as in hand."""
        self.next: PendingUpdate | None = None
        """Ready to begin when the current one ends."""
        self.preparing: PendingUpdate | None = None
        """Its snapshots are on their way here."""
        self.sending: PendingUpdate | None = None
        self._unsent: deque[PendingUpdate] = deque()
        self._beaten_at: float | None = None
        """Time of the last heartbeats; None makes the next ones due at once."""
        self.run_is_finished = False

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Until the condition holds, the worker stops, or the time is over; whether it holds."""
        with self.changed:
            if seconds is not None:
                self.changed.wait_for(lambda: until() or self.stop.is_set(), seconds)
                return until()
            while not until() and not self.stop.is_set():
                self.changed.wait(TICK_SECONDS)
            return until()

    # --- asking and assignments

    def should_ask(self, now: float) -> bool:
        with self.changed:
            if self.run_is_finished or self.next is not None or self.preparing is not None:
                return False
            update = self.current
            if update is None or update.state is PendingState.GONE:
                return True
            assert update.assignment is not None
            # A worker whose uploads are slower than its training waits here, or its copies would pile up.
            if self.blocks[update.block].num_unformed() > MAX_UNFORMED:
                return False
            return asks_for_next(
                steps_done=update.step,
                steps=update.assignment.steps,
                elapsed_seconds=now - (update.begun or 0.0),
            )

    def request(self) -> AssignmentRequest:
        with self.changed:
            update = self.current
            if update is None:
                return AssignmentRequest(holding={}, prefer_block=self.prefer_block, after=None)
            progress = self.blocks.get(update.block)
            return AssignmentRequest(
                holding={} if progress is None else {str(update.block): progress.base.version},
                prefer_block=update.block,
                after=update.assignment_id,
            )

    def lent(self, assignment: Assignment) -> PendingUpdate | None:
        """The coordinator lent an assignment; None if it is the one in hand, lent a second time."""
        with self.changed:
            # The coordinator repeats an open lease, as its first answer may have been lost on the way.
            if self.current is not None and self.current.assignment == assignment:
                return None
            self.preparing = PendingUpdate.of(assignment)
            return self.preparing

    def prepared(self, update: PendingUpdate) -> None:
        """Everything it takes to begin is here, or it was cancelled meanwhile."""
        with self.changed:
            self.preparing = None
            if update.state is PendingState.ASSIGNED:
                self.next = update
            self.changed.notify_all()

    def begin_next(self, now: float) -> PendingUpdate | None:
        """The update to train now, if one is ready."""
        with self.changed:
            update, self.next = self.next, None
            if update is not None:
                self.current, update.begun = update, now
                self.changed.notify_all()
            return update

    def trained(self, update: PendingUpdate) -> None:
        """Its last step is done, and marked in its block: it is to be sent."""
        with self.changed:
            self._unsent.append(update)
            self.changed.notify_all()

    def cancel(self, update: PendingUpdate) -> bool:
        """Give up an update whose steps are not done; whether that was still possible.

        What was trained of it stays in the local weights, and so becomes part of the next update.
        """
        with self.changed:
            if update.state is not PendingState.ASSIGNED:
                return False
            update.enter(PendingState.GONE)
            if self.next is update:
                self.next = None
            self.changed.notify_all()
            return True

    def forget_current(self) -> None:
        """The coordinator does not know the assignment in hand, or it is somebody else's."""
        with self.changed:
            if self.current is not None:
                self.cancel(self.current)
            self.current = None

    def finish_run(self) -> None:
        with self.changed:
            self.run_is_finished = True
            self.changed.notify_all()

    def leases(self) -> list[PendingUpdate]:
        """Assignments in hand whose steps are not all done."""
        with self.changed:
            held = (self.preparing, self.current, self.next)
            return [one for one in held if one is not None and one.state is PendingState.ASSIGNED]

    def heartbeats_due(self, now: float) -> list[PendingUpdate]:
        """The leases to renew now, those included whose snapshots are still coming."""
        with self.changed:
            leases = self.leases()
            pauses = [one.assignment.heartbeat_seconds for one in leases if one.assignment is not None]
            if not leases or (self._beaten_at is not None and now - self._beaten_at < min(pauses)):
                return []
            self._beaten_at = now
            return leases

    def hurry_heartbeats(self) -> None:
        """After a refusal the next heartbeat says that the round ahead is off, and after a sleep nothing is
        sure."""
        with self.changed:
            self._beaten_at = None

    # --- sending: one update at a time, in the order they were trained

    def can_send(self) -> bool:
        """Whether an update waits, its block has reached its round, and no other is being sent.

        The coordinator refuses an update of round r on a snapshot older than r (`round_not_open`).
        """
        with self.changed:
            if self.sending is not None or not self._unsent:
                return False
            return self.blocks[self._unsent[0].block].base.version >= self._unsent[0].round

    def next_to_send(self) -> PendingUpdate | None:
        with self.changed:
            # Oldest first: a later update is formed against the mark of the one before it.
            self.sending = self._unsent.popleft() if self.can_send() else self.sending
            return self.sending

    def delivered(self, update: PendingUpdate) -> None:
        """It has its verdict, or was refused; the line is free."""
        with self.changed:
            assert self.sending is update
            self.sending = None
            self.changed.notify_all()

    def is_idle(self) -> bool:
        with self.changed:
            return self.sending is None and not self._unsent

    def drop_unsent(self) -> list[PendingUpdate]:
        """At the end: updates that were never formed return to error feedback."""
        with self.changed:
            dropped = list(self._unsent)
            self._unsent.clear()
        for update in dropped:
            self.blocks[update.block].drop(update)
        return dropped

    # --- blocks

    def add_block(self, progress: BlockProgress) -> None:
        with self.changed:
            self.blocks[progress.block] = progress

    def retire(self, block: int) -> bool:
        """Let go of a block that was left, once nothing of it is on its way; whether it is gone."""
        with self.changed:
            used = {one.block for one in (self.current, self.next, self.preparing) if one is not None}
            # An update on its way needs its block: a late share of it may still return as error feedback.
            if block in used or self.blocks[block].pending():
                return False
            del self.blocks[block]
            return True

    def base_of(self, block: int) -> Base | None:
        """The snapshot of a block that this worker trains."""
        with self.changed:
            progress = self.blocks.get(block)
            return None if progress is None else progress.base
