"""Simulated workers: real training steps, real updates and error feedback, in virtual time.

`CarryWorker` does what the worker program does: it trains on from its own weights while transfers run
beside it, sends one update after the other, and moves when a new snapshot is here; `Standing` and the
decisions are the program's own. `DropWorker` follows the litepaper: it waits for the round's snapshot,
trains, uploads, and begins anew with the next round; what comes too late is lost.

Not simulated: control bytes, heartbeats (an absent machine's lease lapses all the same), asking (the
program asks ahead, so that the answer is there in time; here frozen snapshots are fetched after it, and
waited for).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from blocktrain.client.snapshots import Base, snapshot_route
from blocktrain.coordinator.decisions.deadlines import Lateness, lateness
from blocktrain.coordinator.decisions.scheduling import Offer
from blocktrain.model.block import Block
from blocktrain.simulation.clock import VirtualClock
from blocktrain.simulation.coordinator import SimulatedCoordinator, Update
from blocktrain.simulation.networks import Machine
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.snapshot import load_into, tensors_of
from blocktrain.training.update import Weights, decoded_delta, encode_update, move
from blocktrain.wire.codec import frame_length
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, Outcome
from blocktrain.worker.decisions import (
    IDLE_WATCH_SECONDS,
    MAX_UNSENT,
    Sent,
    batch_of,
    may_step,
    move_share,
    own_steps,
    share_to_return,
)
from blocktrain.worker.standing import Flight, Standing

Frozen = dict[int, Base]
"""Other blocks' snapshots by block, in the order they run."""


@dataclass
class Site:
    """What a worker of either kind is made of, and its accounts."""

    index: int
    machine: Machine
    clock: VirtualClock
    coordinator: SimulatedCoordinator
    build_trainer: Callable[[int], BlockTrainer]
    build_frozen: Callable[[int, Base], Block]
    stands_for: int
    """Parameters of the block that a simulated one stands for; bytes are scaled to it."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    frozen_versions: Counter[int] = field(default_factory=Counter)
    """Block to the version that is here as a frozen one; version 0 comes from the seed."""
    seconds_computing: float = 0.0

    def scaled(self, block: int, num_bytes: float) -> float:
        return num_bytes * self.stands_for / self.coordinator.blocks[block].schema.num_values

    def payload_bytes(self, block: int) -> float:
        length = frame_length(self.coordinator.codec, self.coordinator.blocks[block].schema)
        return self.scaled(block, length)

    def snapshot_bytes(self, block: int) -> float:
        return self.scaled(block, 4 * self.coordinator.blocks[block].schema.num_values)

    def fetched_bytes(self, block: int, held: int, wanted: int) -> float:
        """By the cheaper way: others' payloads of the merges in between, or the whole snapshot."""
        merges = self.coordinator.blocks[block].merges[held:wanted]
        others = sum(one.worker != self.index for merge in merges for one in merge.inputs)
        chain, snapshot = others * self.payload_bytes(block), self.snapshot_bytes(block)
        rebuild, _ = snapshot_route(
            wanted=wanted, held=held, chain_bytes=round(chain), snapshot_bytes=round(snapshot)
        )
        return chain if rebuild else snapshot

    def bring(self, assignment: Assignment, *, whole: bool) -> tuple[Frozen, float]:
        """What an assignment just lent names, and the bytes it takes; with `whole` no deltas are used."""
        frozen, num_bytes = {}, 0.0
        for named in assignment.frozen:
            block, held = named.block, self.frozen_versions[named.block]
            frozen[block] = self.coordinator.blocks[block].head
            if named.version > held:
                num_bytes += (
                    self.snapshot_bytes(block) if whole else self.fetched_bytes(block, held, named.version)
                )
            self.frozen_versions[block] = named.version
        return frozen, num_bytes

    def after_download(self, num_bytes: float, action: Callable[[], None]) -> None:
        self.num_bytes["down"] += round(num_bytes)
        seconds = self.machine.down_seconds(num_bytes) if num_bytes else 0.0
        self.clock.at(self.machine.done_at(self.clock.now, seconds), action)

    def upload(self, update: Update, done: Callable[[Lateness | None], None]) -> None:
        """Commit, then reveal; `done` gets the verdict, or None if the commit was refused."""
        if self.coordinator.commit(update) is not None:
            self.clock.at(self.clock.now + self.machine.network.latency_seconds, lambda: done(None))
            return
        num_bytes = self.payload_bytes(update.assignment.block)
        self.num_bytes["up"] += round(num_bytes)
        seconds = self.machine.network.latency_seconds + self.machine.up_seconds(num_bytes)
        arrival = self.machine.done_at(self.clock.now, seconds)
        self.clock.at(arrival, lambda: done(self.coordinator.reveal(update)))


class Steps:
    """The steps of one assignment, taken as virtual time passes, up to as many as are allowed."""

    def __init__(self, site: Site, trainer: BlockTrainer, assignment: Assignment, frozen: Frozen) -> None:
        self.site, self.trainer, self.assignment = site, trainer, assignment
        trainer.freeze([site.build_frozen(block, base) for block, base in frozen.items()])
        trainer.window_end = assignment.first_step + own_steps(assignment)
        self.taken = 0
        self.allowed = 0
        self._seconds = site.machine.compute_seconds() / own_steps(assignment)
        self._since, self._taken_then = site.clock.now, 0
        self._losses = torch.zeros((), device=trainer.device)

    def allow(self, steps: int) -> float:
        """May go on until `steps` are taken; returns when that will be."""
        self.catch_up()
        if self.taken == self.allowed:
            self._since, self._taken_then = self.site.clock.now, self.taken
        self.allowed = steps
        return self.site.machine.done_at(self._since, (steps - self._taken_then) * self._seconds)

    def catch_up(self) -> None:
        """Take the steps that are due by now."""
        worked = self.site.machine.worked_seconds(self._since, self.site.clock.now)
        due = min(self.allowed, self._taken_then + math.floor(worked / self._seconds + 1e-6))
        for step in range(self.taken, due):
            self._losses += self.trainer.step(*batch_of(self.assignment, step))
            self.site.seconds_computing += self._seconds
        self.taken = max(self.taken, due)

    @property
    def share_taken(self) -> float:
        return self.taken / self.assignment.steps

    @property
    def mean_loss(self) -> float:
        return float(self._losses) / max(1, self.taken)


class DropWorker:
    """The litepaper's worker: always on one block, one round at a time."""

    def __init__(self, site: Site, block: int) -> None:
        self.site, self.block = site, block
        self.trainer = site.build_trainer(block)
        self.feedback: Weights | None = None
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
        offer = Offer(self.block, head.version, "its block's next round")
        assignment = coordinator.lend(self.site.index, offer)
        frozen, num_bytes = self.site.bring(assignment, whole=True)
        num_bytes += self.site.snapshot_bytes(self.block) if head.version else 0.0
        self.site.after_download(num_bytes, lambda: self._begin(assignment, head, frozen))

    def _begin(self, assignment: Assignment, base: Base, frozen: Frozen) -> None:
        if assignment.round == self._round:
            load_into(self.trainer.block, base.weights)
            steps = Steps(self.site, self.trainer, assignment, frozen)
            self.site.clock.at(steps.allow(assignment.steps), lambda: self._finish(steps, base))

    def _finish(self, steps: Steps, base: Base) -> None:
        if steps.assignment.round != self._round:
            return
        steps.catch_up()
        coordinator = self.site.coordinator
        encoded = encode_update(
            coordinator.codec,
            coordinator.blocks[self.block].schema,
            base=base.weights,
            origin=base.weights,
            local=tensors_of(self.trainer.block),
            feedback=self.feedback,
            beta=coordinator.swarm.error_feedback,
        )
        self.feedback = encoded.feedback
        digest = content_hash(encoded.payload)
        update = Update(self.site.index, steps.assignment, base, encoded.payload, digest)
        self.site.upload(update, lambda verdict: None)


class CarryWorker:
    """The worker program's ways: never idle while there is work, nothing lost."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.standings: dict[int, Standing] = {}
        self._trainers: dict[int, BlockTrainer] = {}
        self._left: dict[int, Weights | None] = {}
        """Error feedback of blocks this worker has left."""
        self._training: int | None = None
        self._steps: Steps | None = None
        self._preparing = False
        self._queue: list[tuple[Standing, Flight]] = []
        self._sending = False
        self._fetching: set[int] = set()
        self._payloads: dict[str, bytes] = {}
        site.coordinator.watchers.append(self._new_head)

    def start(self) -> None:
        self._ask()

    # --- training

    def _ask(self) -> None:
        if self._steps is not None or self._preparing:
            return
        standing = self._standing()
        if standing is not None and sum(one.sent is None for one in standing.flights()) > MAX_UNSENT:
            return
        holding = {block: one.base.version for block, one in self.standings.items()}
        decision = self.site.coordinator.next_decision(self.site.index, holding)
        if isinstance(decision, Offer):
            self._take(self.site.coordinator.lend(self.site.index, decision))

    def _standing(self) -> Standing | None:
        return None if self._training is None else self.standings.get(self._training)

    def _take(self, assignment: Assignment) -> None:
        block = assignment.block
        frozen, num_bytes = self.site.bring(assignment, whole=False)
        if block in self.standings and not frozen:
            self._begin(assignment, frozen)
            return
        self._preparing = True
        base = self.site.coordinator.blocks[block].head
        if block not in self.standings:
            num_bytes += self.site.snapshot_bytes(block) if base.version else 0.0
        self.site.after_download(num_bytes, lambda: self._arrive(assignment, base, frozen))

    def _arrive(self, assignment: Assignment, base: Base, frozen: Frozen) -> None:
        """With all that the assignment needs; its block may be new here, or one that was left."""
        self._preparing = False
        block, max_age = assignment.block, self.site.coordinator.swarm.max_age
        if block not in self.standings:
            self.standings[block] = Standing(block, base, self._left.pop(block, None), max_age)
        self._begin(assignment, frozen)
        self._look(block)

    def _begin(self, assignment: Assignment, frozen: Frozen) -> None:
        block = assignment.block
        if block not in self._trainers:
            self._trainers[block] = self.site.build_trainer(block)
        if self._training != block:
            self._leave()
            self._training = block
            load_into(self._trainers[block].block, self.standings[block].begin())
        self._steps = Steps(self.site, self._trainers[block], assignment, frozen)
        self._go_on()

    def _go_on(self) -> None:
        """Train as far as this worker may: to the end of its round, or for a while without its snapshot."""
        steps = self._steps
        if steps is None:
            return
        assignment = steps.assignment
        version = self.standings[assignment.block].base.version
        run_ahead = self.site.coordinator.swarm.run_ahead
        allowed = sum(
            may_step(
                step=step,
                steps=own_steps(assignment),
                version=version,
                round_=assignment.round,
                run_ahead=run_ahead,
            )
            for step in range(assignment.steps)
        )
        if allowed > steps.allowed:
            self.site.clock.at(steps.allow(allowed), lambda: self._reached(steps, allowed))

    def _reached(self, steps: Steps, allowed: int) -> None:
        if self._steps is steps and allowed == steps.assignment.steps:
            self._finish(steps)

    def _leave(self) -> None:
        standing = self._standing()
        if standing is not None:
            standing.abandon(tensors_of(self._trainers[standing.block].block))
            self._training = None
            self._retire(standing)

    def _retire(self, standing: Standing) -> None:
        """Forget a block that was left, once nothing of it is on its way; keep what it is owed."""
        if standing.block != self._training and not standing.flights():
            self._left[standing.block] = standing.feedback
            self.standings.pop(standing.block, None)

    def _finish(self, steps: Steps) -> None:
        steps.catch_up()
        self._steps = None
        standing = self.standings[steps.assignment.block]
        weights = tensors_of(steps.trainer.block)
        flight = standing.finish(steps.assignment, weights, steps.mean_loss)
        self._queue.append((standing, flight))
        self._send_next()
        self._ask()

    def _moving(self, standing: Standing, change: Callable[[], None]) -> None:
        """Change where this worker stands: steps due before it come first, then its weights move."""
        trained = standing.block == self._training
        if trained and self._steps is not None:
            self._steps.catch_up()
        change()
        if trained:
            ahead = len(standing.flights()) + (0.0 if self._steps is None else self._steps.share_taken)
            shift = standing.take_move(move_share(ahead))
            if shift is not None:
                move(self._trainers[standing.block].block, shift)

    # --- sending

    def _send_next(self) -> None:
        if self._sending or not self._queue:
            return
        standing, flight = self._queue[0]
        if standing.base.version < flight.assignment.round:
            return
        self._queue.pop(0)
        self._sending = True
        update = self._form(standing, flight)
        self.site.upload(update, lambda verdict: self._judged(standing, flight, update, verdict))

    def _form(self, standing: Standing, flight: Flight) -> Update:
        coordinator, draft = self.site.coordinator, standing.draft(flight)
        encoded = encode_update(
            coordinator.codec,
            coordinator.blocks[standing.block].schema,
            base=draft.base.weights,
            origin=draft.origin.now(),
            local=draft.place.now(),
            feedback=draft.feedback,
            beta=coordinator.swarm.error_feedback,
        )
        digest = content_hash(encoded.payload)
        standing.formed(flight, Sent(digest, draft.base.version), encoded.feedback)
        self._payloads[digest] = encoded.payload
        return Update(self.site.index, flight.assignment, draft.base, encoded.payload, digest)

    def _judged(self, standing: Standing, flight: Flight, update: Update, verdict: Lateness | None) -> None:
        share = 1.0 if verdict is None else share_to_return(verdict.outcome, verdict.weight)
        gone = verdict is None or verdict.outcome is Outcome.REFUSED
        if share:
            self._take_back(standing, update.payload, update.base, share)
        self._moving(standing, lambda: standing.judged(flight, gone=gone))
        if gone:
            self._payloads.pop(update.payload_hash, None)
        self._retire(standing)
        self._sending = False
        self._send_next()
        self._ask()

    def _take_back(self, standing: Standing, payload: bytes, base: Base, share: float) -> None:
        coordinator = self.site.coordinator
        schema = coordinator.blocks[standing.block].schema
        standing.returned(decoded_delta(coordinator.codec, schema, payload, base.weights), share)

    # --- new snapshots

    def _new_head(self, block: int) -> None:
        self._cancel_if_too_late()
        if block in self.standings:
            self.site.clock.at(self.site.clock.now + IDLE_WATCH_SECONDS, lambda: self._look(block))
        self._ask()

    def _cancel_if_too_late(self) -> None:
        """What a heartbeat's answer says: the progress stays in the local weights, for the next update."""
        steps, coordinator = self._steps, self.site.coordinator
        if steps is None:
            return
        age = coordinator.blocks[steps.assignment.block].version - steps.assignment.round
        if lateness(age, coordinator.swarm).outcome is Outcome.REFUSED:
            steps.catch_up()
            self._steps = None

    def _look(self, block: int) -> None:
        """Fetch the newest snapshot, unless it is here or on its way."""
        standing = self.standings.get(block)
        state = self.site.coordinator.blocks[block]
        if standing is None or block in self._fetching or state.version <= standing.base.version:
            return
        self._fetching.add(block)
        head = state.head
        num_bytes = self.site.fetched_bytes(block, standing.base.version, head.version)
        self.site.after_download(num_bytes, lambda: self._fetched(standing, head))

    def _fetched(self, standing: Standing, head: Base) -> None:
        block = standing.block
        self._fetching.discard(block)
        merges = self.site.coordinator.blocks[block].merges[standing.base.version : head.version]
        mine = {one.payload_hash for merge in merges for one in merge.inputs if one.worker == self.site.index}
        base = standing.base
        self._moving(standing, lambda: self._advance(standing, base, head, mine))
        for digest in mine:
            self._payloads.pop(digest, None)
        self._retire(standing)
        self._go_on()
        self._send_next()
        self._ask()
        self._look(block)

    def _advance(self, standing: Standing, base: Base, head: Base, mine: set[str]) -> None:
        for flight in standing.advance(head, mine):
            assert flight.sent is not None
            payload = self._payloads.pop(flight.sent.payload_hash)
            self._take_back(standing, payload, base, 1.0)
