"""Local weights, snapshot and error feedback always add up, whatever order things happen in."""

from __future__ import annotations

import numpy as np

from blocktrain.client.snapshots import Base
from blocktrain.training.update import Weights
from blocktrain.wire.messages import Assignment
from blocktrain.worker.decisions import Sent
from blocktrain.worker.standing import Flight, Standing
from tests.coordinator.peer import an_assignment


def weights(value: float) -> Weights:
    return {"w": np.full(4, value, np.float32)}


def value(tensors: Weights | None) -> float:
    assert tensors is not None
    return float(tensors["w"][0])


def base(version: int, at: float) -> Base:
    return Base(version, f"{version:064x}", weights(at))


def assignment(round_: int) -> Assignment:
    return an_assignment(assignment_id=f"{round_:032x}", round=round_, base_version=round_, steps=1)


class Trainer:
    """Stands for the local weights: trains by adding, picks up moves."""

    def __init__(self, standing: Standing) -> None:
        self.standing, self.at = standing, value(standing.begin())

    def train(self, progress: float, share: float = 1.0) -> None:
        shift = self.standing.take_move(share)
        self.at += (value(shift) if shift is not None else 0.0) + progress

    def finish(self, round_: int) -> Flight:
        return self.standing.finish(assignment(round_), weights(self.at), 1.0)


def form(standing: Standing, flight: Flight, name: str) -> float:
    """Form an update that sends everything; returns the progress in it."""
    draft = standing.draft(flight)
    standing.formed(flight, Sent(name, draft.base.version), None)
    return value(draft.place.now()) - value(draft.origin.now())


def test_a_merged_update_moves_nothing_twice() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    first = trainer.finish(0)
    trainer.train(0.5)
    assert form(standing, first, "a") == 1.0
    standing.judged(first, gone=False)
    standing.advance(base(1, 1.0 + 10.0), {"a"})
    trainer.train(0.0)
    assert trainer.at == 11.5
    assert standing.flights() == []


def test_a_refused_update_leaves_the_local_weights() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    first = trainer.finish(0)
    form(standing, first, "a")
    trainer.train(0.5)
    standing.returned({"w": np.full(4, -1.0, np.float32)}, 1.0)
    standing.judged(first, gone=True)
    trainer.train(0.0)
    assert trainer.at == 0.5
    assert value(standing.feedback) == -1.0


def test_a_snapshot_of_others_keeps_progress_on_its_way() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    first = trainer.finish(0)
    form(standing, first, "a")
    standing.judged(first, gone=False)
    standing.advance(base(1, 10.0), set())
    trainer.train(0.5)
    assert trainer.at == 11.5
    standing.advance(base(2, 11.0), {"a"})
    trainer.train(0.0)
    assert trainer.at == 11.5


def test_the_second_update_holds_only_its_own_progress() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    first = trainer.finish(0)
    form(standing, first, "a")
    trainer.train(2.0)
    second = trainer.finish(1)
    standing.judged(first, gone=False)
    standing.advance(base(1, 1.0), {"a"})
    assert form(standing, second, "b") == 2.0
    standing.advance(base(2, 3.0), {"b"})
    trainer.train(0.0)
    assert trainer.at == 3.0


def test_a_move_the_trainer_has_not_picked_up_is_in_its_mark() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    standing.advance(base(1, 10.0), set())
    flight = trainer.finish(1)
    draft = standing.draft(flight)
    assert value(draft.place.now()) - value(draft.origin.now()) == 1.0
    trainer.train(0.0)
    assert trainer.at == 11.0


def test_a_move_taken_in_part_is_in_the_mark_as_a_whole() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    standing.advance(base(1, 8.0), set())
    trainer.train(1.0, share=0.25)
    assert trainer.at == 3.0
    trainer.train(1.0, share=0.25)
    assert trainer.at == 4.0, "the rest waits for the next change"
    draft = standing.draft(trainer.finish(1))
    assert value(draft.place.now()) - value(draft.origin.now()) == 2.0
    standing.advance(base(2, 9.0), set())
    trainer.train(0.0)
    assert trainer.at == 11.0, "all that was pending, and the new move"


def test_progress_of_an_interrupted_round_is_kept_as_feedback() -> None:
    standing = Standing(0, base(0, 0.0), weights(0.25), 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    standing.abandon(weights(trainer.at))
    assert value(standing.feedback) == 0.25 - 1.0


def test_an_update_that_was_never_formed_returns_to_feedback() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    standing.drop(trainer.finish(0))
    assert value(standing.feedback) == -1.0
    assert standing.flights() == []
    trainer.train(0.0)
    assert trainer.at == 0.0


def test_returning_to_a_block_goes_on_from_updates_on_their_way() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    form(standing, trainer.finish(0), "a")
    again = Trainer(standing)
    standing.advance(base(1, 1.0), {"a"})
    again.train(0.5)
    assert again.at == 1.5


def test_a_dense_move_of_zero_keeps_the_snapshot_object() -> None:
    standing = Standing(0, base(0, 0.0), None, 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    first = trainer.finish(0)
    form(standing, first, "a")
    new = base(1, 1.0)
    standing.advance(new, {"a"})
    second = trainer.finish(1)
    draft = standing.draft(second)
    assert draft.origin.now() is new.weights


def test_feedback_that_is_going_into_an_update_is_still_there_to_be_saved() -> None:
    standing = Standing(0, base(0, 0.0), weights(0.25), 3)
    trainer = Trainer(standing)
    trainer.train(1.0)
    flight = trainer.finish(0)
    draft = standing.draft(flight)
    assert value(draft.feedback) == 0.25
    standing.returned({"w": np.full(4, 1.0, np.float32)}, 0.5)
    assert value(standing.feedback) == 0.75
    standing.formed(flight, Sent("a", 0), weights(0.125))
    assert value(standing.feedback) == 0.625
