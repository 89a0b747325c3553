"""Simulated workers: real training steps, real updates and error feedback, in virtual time.

`CarryWorker` drives the worker program's own logic: `WorkerLogic`, `BlockProgress` and `LocalTraining`. It
does what the program's threads do, as events of the virtual clock. `DropWorker` follows the litepaper: it
waits for the round's snapshot, trains, uploads, and starts again with the next round; what comes too late is
lost.

Not simulated: control bytes, heartbeats (an absent machine's lease lapses all the same), asking ahead (the
program asks early enough for the answer to be there in time; here an assignment is asked for when the one
before it ends, and its frozen snapshots are fetched and waited for).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base, fetched_bytes
from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.coordinator import SimulatedCoordinator
from blocktrain.simulation.networks import Machine
from blocktrain.training.update import Weights
from blocktrain.wire.messages import Assignment, Verdict
from blocktrain.worker.block_progress import BlockProgress, PendingUpdate
from blocktrain.worker.logic import WorkerLogic, may_step, own_steps
from blocktrain.worker.training import LocalTraining
from blocktrain.worker.watching import IDLE_WATCH_SECONDS


@dataclass
class Site:
    """What a worker of either kind is made of, and its accounts."""

    index: int
    machine: Machine
    clock: VirtualClock
    coordinator: SimulatedCoordinator
    training: LocalTraining
    stands_for: int
    """Parameters of the block that a simulated one stands for; bytes are scaled to it."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    frozen_versions: Counter[int] = field(default_factory=Counter)
    """Block to the version that is here as a frozen one; version 0 comes from the seed."""
    seconds_computing: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.coordinator.worker_ids[self.index]

    def layout(self, block: int) -> Layout:
        return self.coordinator.blocks[block].layout

    def payload_bytes(self, block: int) -> float:
        return self.layout(block).payload_bytes * self.stands_for / self.layout(block).schema.num_values

    def snapshot_bytes(self, block: int, version: int) -> float:
        return 4.0 * self.stands_for if version else 0.0  # version 0 comes from the seed

    def fetched_bytes(self, block: int, held: int, wanted: int) -> float:
        """By the cheaper way: others' payloads of the merges in between, or the whole snapshot."""
        # A worker has its own payloads; only the others' must be fetched.
        merges = self.coordinator.blocks[block].merges[held:wanted]
        others = sum(one.worker_id != self.worker_id for merge in merges for one in merge.inputs)
        return fetched_bytes(
            merges=wanted - held,
            payloads=others,
            payload_bytes=self.payload_bytes(block),
            snapshot_bytes=self.snapshot_bytes(block, wanted),
        )

    def bring(self, assignment: Assignment, *, whole: bool) -> tuple[dict[int, Base], float]:
        """What an assignment just lent names, and the bytes it takes; with `whole` no deltas are used."""
        frozen, num_bytes = {}, 0.0
        for named in assignment.frozen:
            block, held = named.block, self.frozen_versions[named.block]
            frozen[block] = self.coordinator.blocks[block].head
            if named.version > held and whole:
                num_bytes += self.snapshot_bytes(block, named.version)
            elif named.version > held:
                num_bytes += self.fetched_bytes(block, held, named.version)
            self.frozen_versions[block] = named.version
        return frozen, num_bytes

    def after_download(self, num_bytes: float, action: Callable[[], None]) -> None:
        self.num_bytes["down"] += round(num_bytes)
        seconds = self.machine.down_seconds(num_bytes) if num_bytes else 0.0
        self.clock.at(self.machine.done_at(self.clock.now, seconds), action)

    def upload(self, update: PendingUpdate, done: Callable[[Verdict | None], None]) -> None:
        """Commit, then reveal; `done` gets the verdict, or None if the commit was refused."""
        # A refused commit costs a round trip and no payload.
        if not self.coordinator.commit(self.index, update):
            self.clock.at(self.clock.now + self.machine.network.latency_seconds, lambda: done(None))
            return
        num_bytes = self.payload_bytes(update.block)
        self.num_bytes["up"] += round(num_bytes)
        seconds = self.machine.network.latency_seconds + self.machine.up_seconds(num_bytes)
        arrival = self.machine.done_at(self.clock.now, seconds)
        self.clock.at(arrival, lambda: done(self.coordinator.reveal(self.index, update)))


class TimedSteps:
    """The steps of one update, taken as virtual time passes, up to as many as are allowed.

    The seconds of a round are drawn once. Steps are computed when something happens that needs them, not one
    event per step: a snapshot that arrives moves the weights after the steps that were due before it.
    """

    def __init__(self, site: Site, update: PendingUpdate) -> None:
        assert update.assignment is not None
        self.site, self.update = site, update
        self.allowed = 0
        model = site.training.setup.recipe.model
        cost = model.step_cost(update.block) / model.layers_per_block
        self._seconds = cost * site.machine.compute_seconds() / own_steps(update.assignment)
        self._since, self._taken_then = site.clock.now, 0
        site.training.start(update, update.frozen)

    def allow(self, steps: int) -> float:
        """May go on until `steps` are taken; returns when that will be."""
        self.catch_up()
        # It was waiting for a snapshot: the time that passed meanwhile was no training.
        if self.update.step == self.allowed:
            self._since, self._taken_then = self.site.clock.now, self.update.step
        self.allowed = steps
        return self.site.machine.done_at(self._since, (steps - self._taken_then) * self._seconds)

    def catch_up(self) -> None:
        """Take the steps that are due by now."""
        worked = self.site.machine.worked_seconds(self._since, self.site.clock.now)
        # The small number keeps a step that ends at this very moment from being lost to rounding.
        due = min(self.allowed, self._taken_then + math.floor(worked / self._seconds + 1e-6))
        while self.update.step < due:
            self.site.training.step(self.update)
            self.site.seconds_computing += self._seconds


class DropWorker:
    """The litepaper's worker: always on one block, one round at a time."""

    def __init__(self, site: Site, block: int) -> None:
        self.site, self.block = site, block
        self._feedback: Weights | None = None
        self._round = -1
        site.coordinator.watchers.append(self._new_head)

    def start(self) -> None:
        self._new_head(self.block)

    def _new_head(self, block: int) -> None:
        coordinator = self.site.coordinator
        head = coordinator.blocks[self.block].head
        if block != self.block or head.version >= coordinator.swarm.rounds or head.version <= self._round:
            return
        self._round = head.version
        assignment = coordinator.lend(self.site.index, self.block)
        if assignment is None:
            return
        update = PendingUpdate.of(assignment)
        update.frozen, num_bytes = self.site.bring(assignment, whole=True)
        num_bytes += self.site.snapshot_bytes(self.block, head.version)
        self.site.after_download(num_bytes, partial(self._begin, update, head))

    def _begin(self, update: PendingUpdate, base: Base) -> None:
        if update.round != self._round:
            return
        assert update.assignment is not None
        swarm, training = self.site.coordinator.swarm, self.site.training
        progress = BlockProgress(self.site.layout(self.block), base, self._feedback, swarm)
        if training.progress is None:
            training.begin(progress, swarm.total_steps)
        else:
            training.start_again(progress)
        steps = TimedSteps(self.site, update)
        self.site.clock.at(steps.allow(update.assignment.steps), partial(self._finish, steps, progress))

    def _finish(self, steps: TimedSteps, progress: BlockProgress) -> None:
        update, training = steps.update, self.site.training
        if update.round != self._round:
            return
        steps.catch_up()
        progress.finish(update, training.weights(), training.mean_loss(update))
        progress.form(update)
        self._feedback = progress.feedback
        self.site.upload(update, lambda verdict: None)


class CarryWorker:
    """The worker program on a virtual clock: never idle while there is work, nothing lost."""

    def __init__(self, site: Site) -> None:
        self.site, self.training = site, site.training
        self.logic = WorkerLogic(site.coordinator.swarm)
        self._steps: TimedSteps | None = None
        self._left_feedback: dict[int, Weights | None] = {}
        self._left_optimizers: dict[int, dict[str, Tensor]] = {}
        """What it needs to return to a block that it has left; the program keeps both on disk."""
        self._fetching: set[int] = set()
        site.coordinator.watchers.append(self._new_head)

    def start(self) -> None:
        self._ask()

    # --- asking and training

    def _ask(self) -> None:
        if self._steps is not None or not self.logic.should_ask(self.site.clock.now):
            return
        coordinator = self.site.coordinator
        assignment = coordinator.ask(self.site.index, self.logic.request())
        update = None if assignment is None else self.logic.lent(assignment)
        if update is None:
            return
        assert update.assignment is not None
        update.frozen, num_bytes = self.site.bring(update.assignment, whole=False)
        base = coordinator.blocks[update.block].head
        # Nothing to fetch: the local weights are further than any snapshot.
        if update.block in self.logic.blocks and not update.frozen:
            self._begin(update, base)
            return
        if update.block not in self.logic.blocks:
            num_bytes += self.site.snapshot_bytes(update.block, base.version)
        self.site.after_download(num_bytes, partial(self._arrived, update, base))

    def _arrived(self, update: PendingUpdate, base: Base) -> None:
        self._begin(update, base)
        self._look(update.block)  # the head may have moved on during the download

    def _begin(self, update: PendingUpdate, base: Base) -> None:
        """With all that the assignment needs; its block may be new here, or one that was left."""
        logic, training, block, swarm = self.logic, self.training, update.block, self.logic.swarm
        if block not in logic.blocks:
            feedback = self._left_feedback.pop(block, None)
            logic.add_block(BlockProgress(self.site.layout(block), base, feedback, swarm, logic.changed))
        logic.prepared(update)
        logic.begin_next(self.site.clock.now)
        progress, before = logic.blocks[block], training.progress
        if before is not progress:
            # Unfinished progress in the block that is left goes to error feedback; its optimizer is kept.
            if before is not None:
                before.abandon(training.weights())
                self._left_optimizers[before.block] = training.optimizer_state()
                self._retire(before)
            training.begin(progress, swarm.total_steps, self._left_optimizers.get(block))
        self._steps = TimedSteps(self.site, update)
        self._go_on()

    def _go_on(self) -> None:
        """Train as far as this worker may: to the end of its round, or for a while without its snapshot."""
        steps = self._steps
        if steps is None:
            return
        assignment, version = steps.update.assignment, self.logic.blocks[steps.update.block].base.version
        assert assignment is not None
        allowed = sum(
            may_step(
                step=step,
                steps=own_steps(assignment),
                version=version,
                round_=assignment.round,
                run_ahead=self.logic.swarm.run_ahead,
            )
            for step in range(assignment.steps)
        )
        # Allowed in two parts at most: up to the run-ahead bound, and the rest when the snapshot is here.
        if allowed > steps.allowed:
            at = steps.allow(allowed)
            if allowed == assignment.steps:
                self.site.clock.at(at, partial(self._finish, steps))

    def _finish(self, steps: TimedSteps) -> None:
        if self._steps is not steps:
            return
        steps.catch_up()
        self._steps, update = None, steps.update
        progress = self.logic.blocks[update.block]
        progress.finish(update, self.training.weights(), self.training.mean_loss(update))
        self.logic.trained(update)
        self._send_next()
        self._ask()

    def _catch_up(self, progress: BlockProgress) -> None:
        """Before the progress changes: the steps that were due come first."""
        if progress is self.training.progress and self._steps is not None:
            self._steps.catch_up()

    def _pick_up_move(self, progress: BlockProgress) -> None:
        if progress is self.training.progress:
            self.training.pick_up_move(None if self._steps is None else self._steps.update)

    def _retire(self, progress: BlockProgress) -> None:
        if progress.block in self.logic.blocks and self.logic.retire(progress.block):
            self._left_feedback[progress.block] = progress.feedback

    # --- sending

    def _send_next(self) -> None:
        if self.logic.can_send():
            update = self.logic.next_to_send()
            assert update is not None
            self.logic.blocks[update.block].form(update)
            self.site.upload(update, partial(self._judged, update))

    def _judged(self, update: PendingUpdate, verdict: Verdict | None) -> None:
        progress = self.logic.blocks[update.block]
        self._catch_up(progress)
        progress.judged(update, verdict)
        self._pick_up_move(progress)
        self.logic.delivered(update)
        self._retire(progress)
        self._send_next()
        self._ask()

    # --- new snapshots

    def _new_head(self, block: int) -> None:
        steps = self._steps
        here = steps is not None and steps.update.block == block
        if steps is not None and here and self.site.coordinator.cancels(self.site.index, steps.update):
            # The progress stays in the local weights, and is part of the next update.
            steps.catch_up()
            self.logic.cancel(steps.update)
            self._steps = None
        if block in self.logic.blocks:
            self.site.clock.at(self.site.clock.now + IDLE_WATCH_SECONDS, partial(self._look, block))
        self._ask()

    def _look(self, block: int) -> None:
        """Fetch the newest snapshot, unless it is here or on its way."""
        progress, head = self.logic.blocks.get(block), self.site.coordinator.blocks[block].head
        if progress is None or block in self._fetching or head.version <= progress.base.version:
            return
        self._fetching.add(block)
        num_bytes = self.site.fetched_bytes(block, progress.base.version, head.version)
        self.site.after_download(num_bytes, partial(self._fetched, progress, head))

    def _fetched(self, progress: BlockProgress, head: Base) -> None:
        self._fetching.discard(progress.block)
        merges = self.site.coordinator.blocks[progress.block].merges[progress.base.version : head.version]
        # Own updates in these merges are settled: their progress is part of the new snapshot.
        inputs, worker_id = [one for merge in merges for one in merge.inputs], self.site.worker_id
        mine = {one.payload_hash for one in inputs if one.worker_id == worker_id}
        self._catch_up(progress)
        progress.advance(head, mine)
        self._pick_up_move(progress)
        self._retire(progress)
        self._go_on()
        self._send_next()
        self._ask()
        self._look(progress.block)
