"""Updates of chained blocks are judged beside the snapshots that their assignment named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import ObjectiveConfig, Recipe
from blocktrain.validation.evidence import evidence_budget, report_of, training_tokens
from blocktrain.validation.scorer import Scorer, Work, applied
from blocktrain.wire.codec import decode, encode
from blocktrain.wire.messages import Assignment, Outcome, VerdictReason
from tests.coordinator.conftest import Running
from tests.trust.kit import Trainer, flipped, judged, judged_recipe
from tests.validation.kit import Weights, corpus


def chain_recipe(**trust: Any) -> Recipe:
    recipe = judged_recipe(guard=False, probation_verdicts=0, **trust)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, blocks=2),
        objective=ObjectiveConfig(kind="chain", hint_probability=0.0),
    )


def second_block(running: Running, recipe: Recipe) -> tuple[Trainer, Assignment]:
    """A worker of block 1, beside version 1 of block 0, which another has trained."""
    first = Trainer(running, recipe)
    assert first.round().outcome is Outcome.ACCEPTED
    running.wait_for_version(0, 1)
    worker = Trainer(running, recipe)
    assignment = worker.peer.lend(prefer_block=1)
    assert [(one.block, one.version) for one in assignment.frozen] == [(0, 1)]
    return worker, assignment


def initial(worker: Trainer, block: int) -> Weights:
    return worker.peer.snapshot(block, worker.peer.run.blocks[block].initial_hash)


def last_evidence(running: Running) -> dict[str, object]:
    with running.coordinator.resources.store.read() as session:
        from sqlalchemy import select

        from blocktrain.coordinator.storage.store import UpdateRow

        row = session.scalars(select(UpdateRow).order_by(UpdateRow.verdict_sequence.desc())).first()
        assert row is not None
        assert row.evidence is not None
        return dict(json.loads(row.evidence))


def test_an_update_trained_beside_other_weights_than_named_is_judged_by_its_loss(tmp_path: Path) -> None:
    recipe = chain_recipe()
    with judged(tmp_path, recipe) as running:
        worker, assignment = second_block(running, recipe)
        named, other = worker.named(assignment), {0: initial(worker, 0)}
        delta = worker.train(assignment, frozen=other)
        verdict = worker.send(assignment, delta)
        assert verdict.outcome is Outcome.ACCEPTED, verdict.sentence
        found = last_evidence(running)
        schema, codec = worker.peer.schema(1), worker.peer.codec
        base = worker.peer.snapshot(1, assignment.base_hash)
        decoded = decode(codec, schema, encode(codec, schema, delta))
        after = applied(codec, base, base, decoded, recipe.swarm.outer_lr)
    work, seed = Work(assignment.shard, assignment.first_step, assignment.steps), found.pop("seed")
    scorer = Scorer(recipe, corpus())
    beside_named = report_of(scorer.evidence(1, base, after, work, int(str(seed)), named))
    beside_other = report_of(scorer.evidence(1, base, after, work, int(str(seed)), other))
    unsaid = {"protocol", "own", "rest"}  # the ledger speaks of clusters where blocks have some
    assert beside_named.model_dump(mode="json", exclude=unsaid) == found
    assert beside_other.model_dump(mode="json", exclude=unsaid) != found


def test_an_update_that_does_not_help_is_refused_beside_frozen_blocks_too(tmp_path: Path) -> None:
    recipe = chain_recipe()
    with judged(tmp_path, recipe) as running:
        worker, assignment = second_block(running, recipe)
        verdict = worker.send(assignment, flipped(worker.train(assignment)))
        assert verdict.outcome is Outcome.REFUSED
        assert verdict.reason in (VerdictReason.NO_GAIN, VerdictReason.HARMFUL), verdict.sentence


@pytest.mark.parametrize("frozen", [0, 1, 3, 30])
def test_judging_beside_frozen_blocks_stays_within_its_share(frozen: int) -> None:
    recipe = judged_recipe(compute_share=0.1)
    budget = evidence_budget(recipe, frozen)
    windows = budget.held_out + budget.assigned + budget.other
    guard = budget.guard_windows(merged=1, candidates=1) * budget.guard_forwards(1)
    spent = (windows * budget.forwards + guard) * budget.length
    assert spent <= 0.1 * training_tokens(recipe, frozen)
