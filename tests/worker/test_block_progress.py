"""Local weights, snapshot and error feedback always add up, whatever order things happen in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from blocktrain.client.run import Layout
from blocktrain.client.snapshots import Base
from blocktrain.codec_spec import CodecSpec
from blocktrain.config import SwarmConfig
from blocktrain.training.update import Weights, decoded_delta
from blocktrain.wire.codec import Schema, decode, frame_length
from blocktrain.wire.messages import Outcome, VerdictReason
from blocktrain.worker.block_progress import (
    NEXT_STATES,
    BlockProgress,
    MovedWeights,
    PendingState,
    PendingUpdate,
    is_discarded,
    move_share,
    share_to_return,
)
from tests.coordinator.peer import an_assignment

SCHEMA = Schema((("w", (4,)),))
DENSE = CodecSpec.parse("dense")
LAYOUT = Layout(0, DENSE, SCHEMA, frame_length(DENSE, SCHEMA), "")
SWARM = replace(SwarmConfig(), max_age=3, error_feedback=1.0)


@dataclass(frozen=True)
class Ruling:
    outcome: Outcome
    weight: float
    reason: VerdictReason


ACCEPTED = Ruling(Outcome.ACCEPTED, 1.0, VerdictReason.ON_TIME)
LATE = Ruling(Outcome.LATE, 0.25, VerdictReason.CARRIED)
TOO_OLD = Ruling(Outcome.REFUSED, 0.0, VerdictReason.TOO_OLD)
HARMFUL = Ruling(Outcome.REFUSED, 0.0, VerdictReason.HARMFUL)


def weights(value: float) -> Weights:
    return {"w": np.full(4, value, np.float32)}


def value(tensors: Weights | None) -> float:
    assert tensors is not None
    return float(tensors["w"][0])


def base(version: int, at: float) -> Base:
    return Base(version, f"{version:064x}", weights(at))


class Trainer:
    """The local weights of one worker: it trains by adding, and picks up moves."""

    def __init__(self, progress: BlockProgress | None = None, feedback: Weights | None = None) -> None:
        self.progress = progress or BlockProgress(LAYOUT, base(0, 0.0), feedback, SWARM)
        self.at = value(self.progress.begin())

    def train(self, amount: float, share: float = 1.0) -> None:
        shift = self.progress.take_move(share)
        self.at += (value(shift) if shift is not None else 0.0) + amount

    def finish(self, round_: int) -> PendingUpdate:
        update = PendingUpdate.of(an_assignment(assignment_id=f"{round_:032x}", round=round_, steps=1))
        self.progress.finish(update, weights(self.at), 1.0)
        return update

    def form(self, update: PendingUpdate) -> float:
        """Form an update, which sends everything; returns the progress in it."""
        self.progress.form(update)
        assert update.base is not None
        return -value(decoded_delta(DENSE, SCHEMA, update.payload, update.base.weights))

    def trained_and_formed(self, amount: float, round_: int = 0) -> PendingUpdate:
        self.train(amount)
        update = self.finish(round_)
        assert self.form(update) == amount
        return update


def test_a_merged_update_moves_nothing_twice() -> None:
    trainer = Trainer()
    trainer.train(1.0)
    first = trainer.finish(0)
    trainer.train(0.5)
    assert trainer.form(first) == 1.0
    trainer.progress.judged(first, ACCEPTED)
    trainer.progress.advance(base(1, 1.0 + 10.0), {first.payload_hash})
    trainer.train(0.0)
    assert trainer.at == 11.5
    assert trainer.progress.pending() == []


@pytest.mark.parametrize("verdict", [TOO_OLD, None])
def test_an_update_that_came_too_late_returns_to_feedback_and_leaves_the_local_weights(
    verdict: Ruling | None,
) -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    trainer.train(0.5)
    trainer.progress.judged(first, verdict)
    trainer.train(0.0)
    assert trainer.at == 0.5
    assert value(trainer.progress.feedback) == -1.0
    assert first.state is PendingState.GONE


def test_a_rejected_update_is_discarded_with_the_error_feedback() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    trainer.progress.abandon(weights(1.5))
    trainer.progress.judged(first, HARMFUL)
    trainer.train(0.0)
    assert trainer.at == 0.0
    assert trainer.progress.feedback is None
    assert trainer.progress.kept() == (None, [])


def test_the_share_of_a_late_update_that_does_not_count_returns() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    trainer.progress.judged(first, LATE)
    assert value(trainer.progress.feedback) == -0.75
    assert first.state is PendingState.CARRIED
    assert trainer.progress.kept()[1] == [], "delivered again, its share would return twice"
    trainer.progress.advance(base(1, 0.25), {first.payload_hash})
    trainer.train(0.0)
    assert trainer.at == 0.25


def test_a_snapshot_of_others_keeps_progress_on_its_way() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    trainer.progress.judged(first, ACCEPTED)
    trainer.progress.advance(base(1, 10.0), set())
    trainer.train(0.5)
    assert trainer.at == 11.5
    trainer.progress.advance(base(2, 11.0), {first.payload_hash})
    trainer.train(0.0)
    assert trainer.at == 11.5


def test_the_second_update_holds_only_its_own_progress() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    trainer.train(2.0)
    second = trainer.finish(1)
    trainer.progress.judged(first, ACCEPTED)
    trainer.progress.advance(base(1, 1.0), {first.payload_hash})
    assert trainer.form(second) == 2.0
    trainer.progress.advance(base(2, 3.0), {second.payload_hash})
    trainer.train(0.0)
    assert trainer.at == 3.0


def test_a_move_the_trainer_has_not_picked_up_is_in_its_mark() -> None:
    trainer = Trainer()
    trainer.train(1.0)
    trainer.progress.advance(base(1, 10.0), set())
    assert trainer.form(trainer.finish(1)) == 1.0
    trainer.train(0.0)
    assert trainer.at == 11.0


def test_a_move_taken_in_part_is_in_the_mark_as_a_whole() -> None:
    trainer = Trainer()
    trainer.progress.advance(base(1, 8.0), set())
    trainer.train(1.0, share=0.25)
    assert trainer.at == 3.0
    trainer.train(1.0, share=0.25)
    assert trainer.at == 4.0, "the rest waits for the next change"
    assert trainer.form(trainer.finish(1)) == 2.0
    trainer.progress.advance(base(2, 9.0), set())
    trainer.train(0.0)
    assert trainer.at == 11.0, "all that was waiting, and the new move"


def test_progress_of_an_interrupted_round_is_kept_as_feedback() -> None:
    trainer = Trainer(feedback=weights(0.25))
    trainer.train(1.0)
    trainer.progress.abandon(weights(trainer.at))
    assert value(trainer.progress.feedback) == 0.25 - 1.0


def test_an_update_that_was_never_formed_returns_to_feedback() -> None:
    trainer = Trainer()
    trainer.train(1.0)
    trainer.progress.drop(trainer.finish(0))
    assert value(trainer.progress.feedback) == -1.0
    assert trainer.progress.pending() == []
    trainer.train(0.0)
    assert trainer.at == 0.0


def test_returning_to_a_block_goes_on_from_updates_on_their_way() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    again = Trainer(trainer.progress)
    trainer.progress.advance(base(1, 1.0), {first.payload_hash})
    again.train(0.5)
    assert again.at == 1.5


def test_a_dense_move_of_zero_keeps_the_weights_bit_for_bit() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(0.125)
    new = Base(1, "1" * 64, weights(0.125))
    trainer.progress.advance(new, {first.payload_hash})
    trainer.at = 0.3
    second = trainer.finish(1)
    trainer.progress.form(second)
    sent = decode(DENSE, SCHEMA, second.payload)
    np.testing.assert_array_equal(sent["w"], weights(0.3)["w"])


def test_feedback_that_is_going_into_an_update_is_still_there_to_be_saved() -> None:
    trainer = Trainer(feedback=weights(0.25))
    trainer.train(1.0)
    update = trainer.finish(0)
    seen: list[float] = []

    class Looked(MovedWeights):
        """Added up while the update is being formed, and so sees what another thread would save then."""

        def now(self) -> Weights:
            seen.append(value(trainer.progress.feedback))
            return super().now()

    update.weights = Looked(update.weights.weights)
    assert trainer.form(update) == 1.0 - 0.25
    assert seen == [0.25]
    assert trainer.progress.feedback is None, "a dense update sends all of it"


def test_what_is_kept_on_disk_names_the_updates_without_an_end() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0, 0)
    trainer.train(2.0)
    second = trainer.finish(1)
    assert trainer.progress.kept()[1] == [first], "the second has no payload yet"
    trainer.progress.judged(first, ACCEPTED)
    assert trainer.progress.kept()[1] == [first]
    trainer.progress.form(second)
    trainer.progress.advance(base(1, 1.0), {first.payload_hash})
    assert trainer.progress.kept()[1] == [second]


def test_merged_and_refused_updates_are_settled_in_order() -> None:
    trainer = Trainer()
    first, second, third = (trainer.trained_and_formed(1.0 + n, n) for n in range(3))
    trainer.progress.judged(first, ACCEPTED)
    trainer.progress.judged(second, TOO_OLD)
    assert trainer.progress.pending() == [first, second, third], "the first may still be merged"
    trainer.progress.advance(base(1, 1.0), {first.payload_hash})
    assert trainer.progress.pending() == [third]
    trainer.progress.advance(base(2, 2.0), {third.payload_hash})
    assert trainer.progress.pending() == []


def test_an_update_that_was_never_merged_is_given_up_and_returns() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    trainer.progress.judged(first, ACCEPTED)
    assert trainer.progress.advance(base(SWARM.max_age + 1, 0.0), set()) == []
    assert trainer.progress.advance(base(SWARM.max_age + 2, 0.0), set()) == [first]
    assert value(trainer.progress.feedback) == -1.0
    trainer.train(0.0)
    assert trainer.at == 0.0


def test_an_update_without_a_verdict_is_not_given_up() -> None:
    trainer = Trainer()
    first = trainer.trained_and_formed(1.0)
    assert trainer.progress.advance(base(100, 0.0), set()) == []
    assert trainer.progress.pending() == [first]


def test_states_change_only_as_the_table_says() -> None:
    assert set(NEXT_STATES) == set(PendingState)
    update = PendingUpdate.of(an_assignment())
    with pytest.raises(AssertionError, match="assigned cannot become accepted"):
        update.enter(PendingState.ACCEPTED)


def test_what_does_not_count_returns() -> None:
    assert share_to_return(Outcome.ACCEPTED, 1.0) == 0.0
    assert share_to_return(Outcome.LATE, 0.25) == 0.75
    assert share_to_return(Outcome.REFUSED, 0.0) == 1.0


@pytest.mark.parametrize(
    "reason", [VerdictReason.NO_GAIN, VerdictReason.HARMFUL, VerdictReason.GUARD, VerdictReason.PROBATION]
)
def test_an_update_that_was_judged_and_rejected_is_discarded(reason: VerdictReason) -> None:
    assert is_discarded(Outcome.REFUSED, reason)


@pytest.mark.parametrize("reason", [VerdictReason.DROPPED, VerdictReason.TOO_OLD])
def test_an_update_that_came_too_late_is_not_discarded(reason: VerdictReason) -> None:
    assert not is_discarded(Outcome.REFUSED, reason)
    assert not is_discarded(Outcome.LATE, VerdictReason.CARRIED)


def test_a_move_in_time_is_applied_in_full_and_a_late_one_in_part() -> None:
    assert move_share(0.0) == 1.0
    assert 1.0 > move_share(0.25) > move_share(1.0) > move_share(2.0) > 0.0
