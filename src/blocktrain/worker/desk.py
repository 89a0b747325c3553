"""The desk: keeps the next assignment ready, so that the trainer never waits for an answer.

Asks shortly before the running assignment ends (`decisions.asks_for_next`) and brings meanwhile the snapshot
of a block that is new to this worker, and those of frozen blocks. An assignment that names a frozen snapshot
which the coordinator no longer has is handed back, and another asked for. Heartbeats run beside, so that a
long download does not cost the lease. Both give way to a stop within a fraction of a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from blocktrain.client.coordinator import CoordinatorClient, Refusal
from blocktrain.client.snapshots import Base
from blocktrain.errors import BlocktrainError, WireError
from blocktrain.wire.messages import (
    Assignment,
    AssignmentRequest,
    Finished,
    HeartbeatRequest,
    Wait,
)
from blocktrain.worker.decisions import MAX_UNSENT, asks_for_next, slept_seconds
from blocktrain.worker.progress import Progress
from blocktrain.worker.standing import Standing

TICK_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
JOIN_AGAIN_REASONS = {"not_joined"}
FORGOTTEN_REASONS = {"not_found", "not_yours"}
GONE_STATUS = 404
MAX_DECLINED = 3
"""Assignments in a row with a snapshot that nobody has: then it is the operator's affair."""


@dataclass
class Task:
    """An assignment and where this worker stands in its block."""

    assignment: Assignment
    standing: Standing
    frozen: Mapping[int, Base] = field(default_factory=dict)
    """The other blocks' snapshots that it names, by block, in the order they run."""
    cancelled: bool = False
    begun: float | None = None
    step: int = 0
    loss: float | None = None


class Desk:
    def __init__(
        self,
        client: CoordinatorClient,
        progress: Progress,
        stop: threading.Event,
        standing_in: Callable[[int], Standing],
        bring: Callable[[Assignment], Mapping[int, Base]],
        join: Callable[[], None],
        prefer_block: int | None,
    ) -> None:
        self.client, self.progress, self.stop = client, progress, stop
        self.standing_in, self.bring, self.join = standing_in, bring, join
        self.prefer_block = prefer_block
        self._changed = threading.Condition()
        self._current: Task | None = None
        self._next: Task | None = None
        self._preparing: Assignment | None = None
        self._trained: Task | None = None
        """The task last handed to the trainer, also when it was given up: asking names it as in hand."""
        self._finished = False
        self._declined = 0
        self._beaten_at = 0.0

    # --- the trainer

    def next(self) -> Task | None:
        """The next task, as soon as there is one; None when the run is finished or the worker stops."""
        with self._changed:
            while not (self._next is not None or self._finished or self.stop.is_set()):
                self._changed.wait(TICK_SECONDS)  # a signal sets `stop` and notifies nobody
            if self.stop.is_set() or self._next is None:
                return None
            task, self._current, self._trained, self._next = self._next, self._next, self._next, None
            task.begun = time.monotonic()
            self._changed.notify_all()
            return task

    def stepped(self, task: Task, step: int, loss: float | None) -> None:
        task.step, task.loss = step, loss if loss is not None else task.loss
        self.progress.stepped(step, loss)

    def going_on(self, task: Task) -> bool:
        return not (task.cancelled or self.stop.is_set())

    def give_up(self, task: Task) -> None:
        """The task was cancelled: its progress stays in the local weights, and is part of the next update."""
        with self._changed:
            if self._current is task:
                self._current = None

    def leases(self) -> list[str]:
        """Assignments in hand that are not finished."""
        with self._changed:
            held = [task for task in (self._current, self._next) if task is not None]
            return [task.assignment.assignment_id for task in held if task.step < task.assignment.steps]

    def blocks(self) -> set[int]:
        """Blocks that are being trained, or will be next."""
        with self._changed:
            tasks = {task.standing.block for task in (self._trained, self._next) if task is not None}
            return tasks if self._preparing is None else tasks | {self._preparing.block}

    # --- asking

    def run_asking(self) -> None:
        while not self.stop.is_set() and not self._finished:
            if self._should_ask():
                self._ask()
            else:
                self.stop.wait(TICK_SECONDS)

    def _should_ask(self) -> bool:
        with self._changed:
            task = self._current
            if self._next is not None:
                return False
        if task is None:
            return True
        unsent = sum(1 for flight in task.standing.flights() if flight.sent is None)
        return unsent <= MAX_UNSENT and asks_for_next(
            steps_done=task.step,
            steps=task.assignment.steps,
            elapsed_seconds=time.monotonic() - (task.begun or 0.0),
        )

    def _ask(self) -> None:
        task = self._trained
        request = AssignmentRequest(
            holding={str(task.standing.block): task.standing.base.version} if task is not None else {},
            prefer_block=task.standing.block if task is not None else self.prefer_block,
            after=task.assignment.assignment_id if task is not None else None,
        )
        try:
            answer = self.client.ask(request)
        except Refusal as refusal:
            self._refused(refusal, task)
            return
        if isinstance(answer, Assignment):
            self._take(answer)
        elif isinstance(answer, Wait):
            self._pause(task, answer)
        elif isinstance(answer, Finished):
            self._finish(answer.reason)

    def _pause(self, task: Task | None, answer: Wait) -> None:
        """As long as asked, but no longer than until the block moves on, which is what is waited for."""
        if task is None or task.step >= task.assignment.steps:
            self.progress.waiting(answer.reason)
        seconds = min(max(answer.seconds, TICK_SECONDS), LONGEST_PAUSE_SECONDS)
        if task is None:
            self.stop.wait(seconds)
        else:
            task.standing.wait_for_version(task.standing.base.version + 1, seconds)

    def _refused(self, refusal: Refusal, task: Task | None) -> None:
        if refusal.reason in JOIN_AGAIN_REASONS:
            self.join()
        elif task is not None and refusal.reason in FORGOTTEN_REASONS:
            self.give_up(task)
            with self._changed:
                self._trained = None
        else:
            raise refusal

    def _take(self, assignment: Assignment) -> None:
        with self._changed:
            if self._current is not None and self._current.assignment == assignment:
                return
            self._preparing = assignment
        task = self._prepared(assignment)
        with self._changed:
            self._next, self._preparing = task, None
            self._changed.notify_all()

    def _prepared(self, assignment: Assignment) -> Task | None:
        """With everything it takes to begin; None where a frozen snapshot is gone, and the lease with it."""
        standing = self.standing_in(assignment.block)
        try:
            task = Task(assignment, standing, self.bring(assignment))
        except Refusal as refusal:
            if refusal.status != GONE_STATUS:
                raise
            self._decline(assignment, refusal)
            return None
        self._declined = 0
        return task

    def _decline(self, assignment: Assignment, refusal: Refusal) -> None:
        named = ", ".join(f"block {one.block} version {one.version}" for one in assignment.frozen)
        what = f"block {assignment.block} round {assignment.round} needs {named}: {refusal}"
        self._declined += 1
        if self._declined >= MAX_DECLINED:
            raise WireError(
                f"{what}; so it was {MAX_DECLINED} times in a row: ask the operator to restore the snapshots"
            )
        self.progress.line(f"declined {what}; asking for another assignment")
        with contextlib.suppress(BlocktrainError):
            self.client.hand_back(assignment.assignment_id)

    def _finish(self, reason: str) -> None:
        self.progress.line(f"finished reason={reason!r}")
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    # --- heartbeats

    def run_heartbeats(self) -> None:
        wall, monotonic = time.time(), time.monotonic()
        while not self.stop.wait(TICK_SECONDS):
            slept = slept_seconds(wall=time.time() - wall, monotonic=time.monotonic() - monotonic)
            wall, monotonic = time.time(), time.monotonic()
            if slept is not None:
                self.progress.line(f"woke after {slept:.0f} s asleep; opening new connections")
                self.client.reconnect()
                self._beaten_at = 0.0
            for held in self._due(monotonic):
                self._beat(held) if isinstance(held, Task) else self._beat_ahead(held)

    def beat_now(self) -> None:
        """After a refusal: the next heartbeat says that the round ahead is off, so it should not wait."""
        self._beaten_at = 0.0

    def _due(self, now: float) -> list[Task | Assignment]:
        """Tasks under way, and an assignment whose snapshots are still coming."""
        with self._changed:
            held = [task for task in (self._current, self._next) if task is not None]
            ahead = [] if self._preparing is None else [self._preparing]
        leases = [*ahead, *(task.assignment for task in held)]
        if not leases or now - self._beaten_at < min(lease.heartbeat_seconds for lease in leases):
            return []
        self._beaten_at = now
        return [*ahead, *(task for task in held if not task.cancelled and task.step < task.assignment.steps)]

    def _beat_ahead(self, assignment: Assignment) -> None:
        """A long download must not cost the lease; whether it still counts is asked again when it begins."""
        with contextlib.suppress(Refusal):
            self.client.heartbeat(assignment.assignment_id, HeartbeatRequest(step=0))

    def _beat(self, task: Task) -> None:
        elapsed = time.monotonic() - (task.begun or time.monotonic())
        request = HeartbeatRequest(
            step=task.step,
            loss=task.loss,
            steps_per_second=task.step / elapsed if elapsed > 0 else None,
        )
        try:
            answer = self.client.heartbeat(task.assignment.assignment_id, request)
        except Refusal as refusal:
            self._cancel(task, str(refusal))
            return
        if answer.cancel:
            self._cancel(task, answer.reason)

    def _cancel(self, task: Task, reason: str) -> None:
        assignment = task.assignment
        self.progress.line(f"cancelled block={assignment.block} round={assignment.round} reason={reason!r}")
        task.cancelled = True
        with self._changed:
            if self._next is task:
                self._next = None
