"""One worker's progress in one block: its snapshot, its updates on their way, its error feedback.

Knows no network, disk or clock. Threads of a worker meet here: the trainer marks its weights when a round is
done and picks up moves between steps; the sender forms updates from marks; the watcher brings new snapshots.
Nothing computes for long under the lock, so the trainer never waits for the others. The simulation calls the
same methods one after the other.

    local weights = snapshot + progress of the updates on their way + progress since the last of them

A new snapshot, or a refusal, settles the oldest updates: everything after them moves by (snapshot - where the
last settled one was marked). So all progress is in the snapshot, in the local weights or in the error
feedback, and never in two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base
from blocktrain.config import SwarmConfig
from blocktrain.training.update import (
    Weights,
    decoded_delta,
    difference,
    encode_update,
    fold_back,
    is_finite,
    is_same,
    moved,
)
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.messages import Assignment, Outcome, VerdictReason

RETURNED_REASONS = frozenset({VerdictReason.DROPPED, VerdictReason.TOO_OLD, VerdictReason.RUN_FINISHED})
"""Refusals that say nothing against the work itself: it came too late."""
MOVE_DAMPING = 2.0


class Ruled(Protocol):
    """What a verdict says that matters to its worker."""

    @property
    def outcome(self) -> Outcome: ...
    @property
    def weight(self) -> float: ...
    @property
    def reason(self) -> VerdictReason: ...


def share_to_return(outcome: Outcome, weight: float) -> float:
    """The share of an update that goes back to error feedback: what will not be in the snapshot."""
    if outcome is Outcome.ACCEPTED:
        return 0.0
    if outcome is Outcome.LATE:
        return 1.0 - min(1.0, max(0.0, weight))
    return 1.0


def is_discarded(outcome: Outcome, reason: VerdictReason) -> bool:
    """True if an update is given up altogether, with what compression left of it.

    Work that came too late is sound and returns to error feedback. Work that was judged and rejected does
    not: the round is trained again from the same snapshot, so the next update would contain this one twice,
    and the one after it three times (docs/decisions/0007).
    """
    return outcome is Outcome.REFUSED and reason not in RETURNED_REASONS


def move_share(rounds_ahead: float) -> float:
    """The share of a new snapshot's move to apply at once, by how far training has gone on without it.

    By then the worker's own gradient has corrected part of what the others' updates correct. Applied in full,
    a move that comes a round late overshoots, and two replicas end up worse than one (docs/history).
    A move in time (0 rounds ahead) is applied in full.
    """
    return 1.0 / (1.0 + MOVE_DAMPING * rounds_ahead)


class PendingState(StrEnum):
    ASSIGNED = "assigned"
    """Its steps are running, or will be next."""
    TRAINED = "trained"
    """The last step is done; it waits to be encoded."""
    FORMED = "formed"
    """Its payload exists; it is being sent, or waits for its verdict."""
    ACCEPTED = "accepted"
    """It will count in full in a merge to come."""
    CARRIED = "carried"
    """It was late and will count in part; the rest is back in error feedback."""
    GONE = "gone"
    """It will never be merged."""


NEXT_STATES: Mapping[PendingState, frozenset[PendingState]] = {
    PendingState.ASSIGNED: frozenset({PendingState.TRAINED, PendingState.GONE}),
    PendingState.TRAINED: frozenset({PendingState.FORMED, PendingState.GONE}),
    PendingState.FORMED: frozenset({PendingState.ACCEPTED, PendingState.CARRIED, PendingState.GONE}),
    PendingState.ACCEPTED: frozenset({PendingState.GONE}),
    PendingState.CARRIED: frozenset({PendingState.GONE}),
    PendingState.GONE: frozenset(),
}


@dataclass(frozen=True)
class MovedWeights:
    """Weights of the past and the moves that came since; added up only when somebody needs them."""

    weights: Weights
    moves: tuple[Weights, ...] = ()

    def moved(self, *shifts: Weights) -> MovedWeights:
        return MovedWeights(self.weights, (*self.moves, *shifts))

    def now(self) -> Weights:
        weights = self.weights
        for shift in self.moves:
            weights = moved(weights, shift)
        return weights


@dataclass(eq=False)
class PendingUpdate:
    """An update on its way: from the assignment, over its steps and its payload, until it is settled."""

    assignment_id: str
    block: int
    round: int
    assignment: Assignment | None = None
    """None for an update that an earlier process had formed."""
    frozen: Mapping[int, Base] = field(default_factory=dict)
    """The other blocks' snapshots that the assignment names, by block, in the order they run."""
    state: PendingState = PendingState.ASSIGNED
    step: int = 0
    """Steps done."""
    loss: float | None = None
    """The last one read while its steps run, their mean afterwards."""
    begun: float | None = None
    """Monotonic time of its first step."""
    weights: MovedWeights = field(default_factory=lambda: MovedWeights({}))
    """The local weights after its last step."""
    base: Base | None = None
    """The snapshot it was formed against; with its weights only where decoding needs them."""
    payload: bytes = field(default=b"", repr=False)
    payload_hash: str = ""
    told: bool = False
    """Its verdict came before a pause or a restart, which sends it again until it is merged."""

    @classmethod
    def of(cls, assignment: Assignment) -> PendingUpdate:
        return cls(assignment.assignment_id, assignment.block, assignment.round, assignment)

    def enter(self, state: PendingState) -> None:
        assert state in NEXT_STATES[self.state], f"an update that is {self.state} cannot become {state}"
        self.state = state


class BlockProgress:
    def __init__(
        self,
        layout: Layout,
        base: Base,
        feedback: Weights | None,
        swarm: SwarmConfig,
        changed: threading.Condition | None = None,
        pending: Iterable[PendingUpdate] = (),
    ) -> None:
        self.layout, self.block, self.swarm = layout, layout.block, swarm
        self.changed = changed or threading.Condition()
        """Held for every change, and notified; a worker gives all its blocks the same one."""
        self._settling = threading.Lock()
        self._base = base
        self._feedback = feedback
        self._pending = list(pending)
        self._being_encoded: Weights | None = None
        """Error feedback that is just going into an update; on disk it still belongs to the feedback."""
        self._move: MovedWeights | None = None
        """What new snapshots have still to add to the local weights."""
        self._move_is_new = False
        """The trainer has not yet seen its last change."""

    # --- what anybody may ask

    @property
    def base(self) -> Base:
        with self.changed:
            return self._base

    @property
    def feedback(self) -> Weights | None:
        return self.kept()[0]

    def kept(self) -> tuple[Weights | None, list[PendingUpdate]]:
        """What must be on disk, of one moment: error feedback, and the updates that are not part of it.

        A process that is killed delivers those updates again. Of a carried update a share is already back in
        the feedback, so delivering it again would return that share twice.
        """
        with self.changed:
            # Killed while encoding, a worker has no payload yet, so the feedback must still be whole on disk.
            feedback = self._feedback
            if self._being_encoded is not None:
                feedback = fold_back(feedback, self._being_encoded)
            unsettled = (PendingState.FORMED, PendingState.ACCEPTED)
            return feedback, [update for update in self._pending if update.state in unsettled]

    def pending(self) -> list[PendingUpdate]:
        """Updates whose steps are done and that are not settled, oldest first."""
        with self.changed:
            return list(self._pending)

    def num_formed(self) -> int:
        with self.changed:
            return sum(update.state is not PendingState.TRAINED for update in self._pending)

    def num_unformed(self) -> int:
        with self.changed:
            return sum(update.state is PendingState.TRAINED for update in self._pending)

    # --- the trainer

    def begin(self) -> Weights:
        """The weights to start from: the snapshot, and updates on their way if there are any."""
        with self.changed:
            # The weights to start from contain every move so far.
            self._move, self._move_is_new = None, False
            newest = self._newest()
        return newest.now()

    def _newest(self) -> MovedWeights:
        return self._pending[-1].weights if self._pending else MovedWeights(self._base.weights)

    def _marked(self, weights: Weights) -> MovedWeights:
        """Local weights as they are, with the moves that the trainer has not added yet."""
        if self._move is None:
            return MovedWeights(weights)
        return MovedWeights(weights, (self._move.weights, *self._move.moves))

    def take_move(self, share: float = 1.0) -> Weights | None:
        """What to add to the local weights now: once for each change, a share of what is still to be added.

        The rest stays for the next change; marks and updates count it as done, so nothing is lost or counted
        twice.
        """
        with self.changed:
            if not self._move_is_new:
                return None
            waiting, self._move, self._move_is_new = self._move, None, False
        assert waiting is not None
        shift = waiting.now()
        # A move of zero is the normal case of a worker that is alone on its block: its own update made the
        # snapshot. It must leave every bit of the weights alone.
        if share == 1.0 or not any(value.any() for value in shift.values()):
            return shift
        taken = {name: np.asarray(np.float32(share) * value) for name, value in shift.items()}
        with self.changed:
            rest, later = MovedWeights(difference(shift, taken)), self._move
            self._move = rest if later is None else rest.moved(later.weights, *later.moves)
        return taken

    def finish(self, update: PendingUpdate, weights: Weights, loss: float) -> None:
        """The last step of an update is done at these weights."""
        with self.changed:
            update.enter(PendingState.TRAINED)
            update.weights, update.loss = self._marked(weights), loss
            self._pending.append(update)
            self.changed.notify_all()

    def abandon(self, weights: Weights) -> None:
        """Put the progress since the last mark into error feedback; the local weights are given up."""
        with self.changed:
            origin, local = self._newest().now(), self._marked(weights).now()
            delta = difference(origin, local)
            # A diverged block must not poison the feedback: one NaN in it would be in every later update.
            if not is_same(origin, local) and is_finite(delta):
                self._feedback = fold_back(self._feedback, delta)

    # --- the sender

    def form(self, update: PendingUpdate) -> None:
        """Encode a trained update. All error feedback goes into it; what the codec leaves out is the new one.

        Without error feedback a codec that sends 1 value in 64 would lose the small ones for good; with it
        they add up until they are sent. It is multiplied by `swarm.error_feedback` (0.95), because a
        correction that waited many rounds was computed for weights that have changed since.
        """
        with self.changed:
            base, origin = self._base, self._origin(update)
            # Taken out under the lock: a share that returns meanwhile belongs to the next update.
            feedback, self._being_encoded, self._feedback = self._feedback, self._feedback, None
        encoded = encode_update(
            self.layout.codec,
            self.layout.schema,
            base=base.weights,
            origin=origin.now(),
            local=update.weights.now(),
            feedback=feedback,
            beta=self.swarm.error_feedback,
        )
        payload_hash = content_hash(encoded.payload)
        with self.changed:
            # Only frames that hold weights are decoded against their base; it may be gigabytes.
            weights = base.weights if self.layout.codec.sends_weights else {}
            update.base = Base(base.version, base.hash, weights)
            update.payload, update.payload_hash = encoded.payload, payload_hash
            update.enter(PendingState.FORMED)
            self._being_encoded = None
            if encoded.feedback is not None:
                self._feedback = fold_back(self._feedback, encoded.feedback)
            self.changed.notify_all()

    def _origin(self, update: PendingUpdate) -> MovedWeights:
        """Where an update's own progress starts: at the mark of the one before it, or at the snapshot."""
        index = self._pending.index(update)
        return self._pending[index - 1].weights if index else MovedWeights(self._base.weights)

    def judged(self, update: PendingUpdate, verdict: Ruled | None) -> None:
        """An update has its verdict; None if the coordinator would not even take the commit."""
        if verdict is not None and is_discarded(verdict.outcome, verdict.reason):
            with self.changed:
                self._feedback = None
                update.enter(PendingState.GONE)
            self.advance(None, ())
            return
        share = 1.0 if verdict is None else share_to_return(verdict.outcome, verdict.weight)
        delta = self._delta(update) if share else None
        with self.changed:
            if verdict is None or verdict.outcome is Outcome.REFUSED:
                update.enter(PendingState.GONE)
            else:
                update.enter(PendingState.CARRIED if share else PendingState.ACCEPTED)
            if delta is not None:
                self._feedback = fold_back(self._feedback, delta, share)
        if update.state is PendingState.GONE:
            self.advance(None, ())

    def _delta(self, update: PendingUpdate) -> Weights | None:
        """What a receiver reads out of the payload; None if it needs a base that is no longer here."""
        assert update.base is not None
        if self.layout.codec.sends_weights and not update.base.weights:
            return None
        return decoded_delta(self.layout.codec, self.layout.schema, update.payload, update.base.weights)

    def drop(self, update: PendingUpdate) -> None:
        """Give up an update that was never formed: its progress goes to error feedback."""
        with self.changed:
            origin = self._origin(update)
            update.enter(PendingState.GONE)
        delta = difference(origin.now(), update.weights.now())
        with self.changed:
            self._feedback = fold_back(self._feedback, delta)
        self.advance(None, ())

    # --- the watcher

    def advance(self, base: Base | None, merged: Iterable[str]) -> list[PendingUpdate]:
        """A new snapshot (None: the same one) that holds the payloads `merged`; returns updates given up.

        Updates are settled oldest first, up to the first that may still be merged, because the local weights
        hold its progress on top of the snapshot. An update counts in the next merge after its verdict, so one
        that is in no merge up to max_age rounds later was taken out by the coordinator: it is given up, and
        its progress returns to error feedback.
        """
        with self._settling:
            with self.changed:
                base, merged = base or self._base, set(merged)
                settled, given_up = 0, []
                for update in self._pending:
                    # It has no payload yet, so no merge can hold it.
                    if update.state is PendingState.TRAINED:
                        break
                    if update.state is not PendingState.GONE and update.payload_hash not in merged:
                        assert update.base is not None
                        waiting = update.state is PendingState.FORMED
                        if waiting or base.version <= update.base.version + self.swarm.max_age + 1:
                            break
                        given_up.append(update)
                    settled += 1
                last = self._pending[settled - 1].weights if settled else MovedWeights(self._base.weights)
            # The moves are whole copies of a block: computed without the lock, which the trainer may want.
            shift = difference(base.weights, last.now())
            returned = [self._delta(update) for update in given_up]
            with self.changed:
                self._pending = self._pending[settled:]
                # Marks move along, or an update formed later would take back what others did to the block.
                for update in self._pending:
                    update.weights = update.weights.moved(shift)
                self._move = MovedWeights(shift) if self._move is None else self._move.moved(shift)
                self._move_is_new = True
                self._base = base
                for update, delta in zip(given_up, returned, strict=True):
                    update.enter(PendingState.GONE)
                    if delta is not None:
                        self._feedback = fold_back(self._feedback, delta)
                self.changed.notify_all()
            return given_up
