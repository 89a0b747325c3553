"""Where this worker stands in one block: its snapshot, its updates on their way, its error feedback.

Shared by three threads and the only thing they share. The trainer marks its weights when a round is
done and picks up moves between steps; the sender forms updates from marks; the watcher brings new
snapshots. Nothing here computes for long under the lock, so the trainer never waits for the others.

Local weights = snapshot + progress of the updates on their way + progress since. A new snapshot, or a
refusal, settles the oldest of them: everything after it moves by (snapshot - where it was marked).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from blocktrain.client.snapshots import Base
from blocktrain.training.update import Weights, difference, fold_back, is_finite, is_same, moved
from blocktrain.wire.messages import Assignment
from blocktrain.worker.decisions import Sent, settle


@dataclass(frozen=True)
class Place:
    """Weights of the past and the moves that came since; added up only when somebody needs them."""

    weights: Weights
    moves: tuple[Weights, ...] = ()

    def moved(self, *shifts: Weights) -> Place:
        return Place(self.weights, (*self.moves, *shifts))

    def now(self) -> Weights:
        weights = self.weights
        for shift in self.moves:
            weights = moved(weights, shift)
        return weights


@dataclass
class Flight:
    """One finished assignment, from the end of its last step until its progress is settled."""

    assignment: Assignment
    place: Place
    loss: float
    sent: Sent | None = None
    """None until its payload is formed."""


@dataclass(frozen=True)
class Draft:
    """What an update is formed from, taken at one moment."""

    base: Base
    origin: Place
    place: Place
    feedback: Weights | None


class Standing:
    def __init__(self, block: int, base: Base, feedback: Weights | None, max_age: int) -> None:
        self.block, self.max_age = block, max_age
        self._changed = threading.Condition()
        self._settling = threading.Lock()
        self._base = base
        self._feedback = feedback
        self._taken: Weights | None = None
        self._flights: list[Flight] = []
        self._pending: Place | None = None
        """What new snapshots have still to add to the local weights."""
        self._news = False
        """The trainer has not yet seen the last change of it."""
        self._closed = False

    # --- the trainer

    def begin(self) -> Weights:
        """The weights to start from: the snapshot, and updates on their way if there are any."""
        with self._changed:
            self._pending, self._news = None, False
            return self._newest().now()

    def _newest(self) -> Place:
        return self._flights[-1].place if self._flights else Place(self._base.weights)

    def take_move(self, share: float = 1.0) -> Weights | None:
        """What to add to the local weights now: once for each change, a share of what is still to be added.

        The rest stays pending; marks and updates count it as done, so nothing is lost or counted twice.
        """
        with self._changed:
            if not self._news:
                return None
            pending, self._pending, self._news = self._pending, None, False
        assert pending is not None
        shift = pending.now()
        if share == 1.0 or not any(value.any() for value in shift.values()):
            return shift
        taken = {name: np.asarray(np.float32(share) * value) for name, value in shift.items()}
        with self._changed:
            rest = Place(difference(shift, taken))
            later = self._pending
            self._pending = rest if later is None else rest.moved(later.weights, *later.moves)
        return taken

    def finish(self, assignment: Assignment, weights: Weights, loss: float) -> Flight:
        """A round is done at `weights`; moves not yet taken are still to be added to them."""
        with self._changed:
            flight = Flight(assignment, self._place(weights), loss)
            self._flights.append(flight)
            self._changed.notify_all()
            return flight

    def abandon(self, weights: Weights) -> None:
        """Put the progress since the last mark into error feedback; the local weights are given up."""
        with self._changed:
            origin, place = self._newest().now(), self._place(weights).now()
            delta = difference(origin, place)
            if not is_same(origin, place) and is_finite(delta):
                self._feedback = fold_back(self._feedback, delta)

    def _place(self, weights: Weights) -> Place:
        if self._pending is None:
            return Place(weights)
        return Place(weights, (self._pending.weights, *self._pending.moves))

    # --- the sender

    def draft(self, flight: Flight) -> Draft:
        """What the update is formed from; the error feedback goes into it, so it is taken."""
        with self._changed:
            self._taken, self._feedback = self._feedback, None
            return Draft(self._base, self._origin(flight), flight.place, self._taken)

    def _origin(self, flight: Flight) -> Place:
        index = self._flights.index(flight)
        return self._flights[index - 1].place if index else Place(self._base.weights)

    def formed(self, flight: Flight, sent: Sent, feedback: Weights | None) -> None:
        with self._changed:
            flight.sent, self._taken = sent, None
            if feedback is not None:
                self._feedback = fold_back(self._feedback, feedback)
            self._changed.notify_all()

    def returned(self, delta: Weights, share: float) -> None:
        """Put the share of an update that will not count back into error feedback."""
        with self._changed:
            self._feedback = fold_back(self._feedback, delta, share)

    def forget(self) -> None:
        """Give up error feedback: it is what is left of updates that were found wanting."""
        with self._changed:
            self._feedback = None

    def drop(self, flight: Flight) -> None:
        """Give up an update that was never formed: its progress goes to error feedback."""
        with self._changed:
            origin, place = self._origin(flight), flight.place
            flight.sent = Sent("", self._base.version, gone=True)
        self.returned(difference(origin.now(), place.now()), 1.0)
        self.advance(None, ())

    def judged(self, flight: Flight, *, gone: bool) -> None:
        with self._changed:
            assert flight.sent is not None
            flight.sent = replace(flight.sent, judged=True, gone=gone)
        if gone:
            self.advance(None, ())

    # --- the watcher

    def advance(self, base: Base | None, merged: Iterable[str]) -> list[Flight]:
        """A new snapshot (None: the same) and the payloads that went into it; returns those given up."""
        with self._settling:
            with self._changed:
                base = base or self._base
                sent = [flight.sent for flight in self._flights if flight.sent is not None]
                done = settle(sent, merged, base.version, self.max_age)
                before = self._flights[done.settled - 1].place if done.settled else Place(self._base.weights)
            shift = difference(base.weights, before.now())
            with self._changed:
                settled, self._flights = self._flights[: done.settled], self._flights[done.settled :]
                self._move(base, shift)
            return [settled[index] for index in done.given_up]

    def _move(self, base: Base, shift: Weights) -> None:
        for flight in self._flights:
            flight.place = flight.place.moved(shift)
        self._pending = Place(shift) if self._pending is None else self._pending.moved(shift)
        self._news = True
        self._base = base
        self._changed.notify_all()

    # --- anybody

    @property
    def base(self) -> Base:
        with self._changed:
            return self._base

    @property
    def feedback(self) -> Weights | None:
        """All of it, also what is just going into an update that is not formed yet."""
        with self._changed:
            if self._taken is None:
                return self._feedback
            return fold_back(self._feedback, self._taken)

    def flights(self) -> list[Flight]:
        with self._changed:
            return list(self._flights)

    def wait_for_version(self, version: int, seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._base.version >= version or self._closed, seconds)
            return self._base.version >= version

    def close(self) -> None:
        """The worker stops: nobody waits any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_flight(self, known: int, seconds: float) -> None:
        """Until there are more formed updates than `known`, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_formed() > known or self._closed, seconds)

    def _num_formed(self) -> int:
        return sum(1 for flight in self._flights if flight.sent is not None)
