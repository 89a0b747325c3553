"""A serial run whose loss rises merges with half the weight, says so, and its ledger still verifies."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command

from blocktrain.config import ModelConfig, ObjectiveConfig, Recipe, TrustConfig
from blocktrain.coordinator.decisions.merging import DIVERGED, LEAST_SHARE, merging_weight
from blocktrain.coordinator.storage.ledger import verify_ledger
from blocktrain.coordinator.storage.queries import held_out_losses
from blocktrain.coordinator.storage.store import EvaluationRow, Store, migrations
from blocktrain.wire.messages import EvaluationState, JudgeTask
from tests.coordinator.conftest import Place, Running, tiny_recipe
from tests.coordinator.test_frozen_names import entries_of

BROKEN = '{"consensus_ce": null}'
"""A loss that is no number, as JSON has it."""


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], 1.0),
        ([3.0, 2.9, 2.8], 1.0),
        ([3.0, 3.0 + 0.9 * DIVERGED, 2.9, 2.9 + 0.9 * DIVERGED], 1.0),
        ([3.0, 2.9, 2.9 + 1.1 * DIVERGED], 0.5),
        ([2.9, 3.0, 2.99, 2.98, 2.9], 0.5),
        ([2.9, 2.91, 2.915, 2.9 + 1.1 * DIVERGED], 0.5),
        ([2.9, 3.0, 3.1, 2.8, 2.9], 0.125),
        ([float(n) for n in range(20)], LEAST_SHARE),
    ],
    ids=[
        "no score",
        "falling",
        "small rises",
        "one rise",
        "one rise, coming back",
        "a slow rise",
        "three",
        "all",
    ],
)
def test_each_rise_halves_the_weight(losses: list[float], expected: float) -> None:
    assert merging_weight(1.0, losses) == expected
    assert merging_weight(0.4, losses) == pytest.approx(0.4 * expected)


def recipe_of(kind: Any) -> Recipe:
    recipe = tiny_recipe(blocks=2, replicas=1)
    llama = ModelConfig(family="llama", width=16, heads=2, blocks=2, layers_per_block=1, context=16)
    model = llama if kind == "serial" else recipe.model
    return replace(recipe, model=model, objective=ObjectiveConfig(kind=kind, hint_probability=0.0))


def scored(running: Running, loss: float, time: float) -> None:
    """As the scorer writes what it found."""
    state = EvaluationState(
        time=time, versions=(int(time), 0), scored_bytes=100, consensus_ce=loss, euler_ce=None,
        block_ce=(loss, loss), weights=(0.0, 1.0),
    )  # fmt: skip
    with running.coordinator.resources.store.write() as session:
        record = state.model_dump_json()
        session.add(EvaluationRow(versions=str(time), time=time, consensus_ce=loss, record=record))


@pytest.mark.parametrize(("kind", "expected"), [("serial", [1.0, 0.5]), ("chain", [1.0, 1.0])])
def test_a_serial_run_whose_loss_rises_merges_with_half_the_weight(
    local: Place, kind: Any, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with local.serve(recipe_of(kind)) as running, caplog.at_level(logging.WARNING):
        peer = running.peer()
        lent = peer.lend()
        scored(running, 3.0, 1.0)
        peer.deliver(lent)
        running.wait_for_version(lent.block, 1)
        scored(running, 3.1, 2.0)
        following = peer.lend(after=lent.assignment_id)
        peer.deliver(following, seed=1)
        running.wait_for_version(following.block, following.round + 1)
        entries = entries_of(running)

        def fetch(kind: str) -> Any:
            return lambda wanted: peer.get(f"/v1/{kind}/{wanted}").content

        assert verify_ledger(entries, fetch("updates"), fetch("snapshots")).ok
    assert [entry.body["alpha"] for entry in entries if entry.kind == "merge"] == expected
    told = [message for message in caplog.messages if "the held-out loss rose to 3.1000" in message]
    assert len(told) == (kind == "serial")


def test_losses_of_an_older_database_are_read_from_their_records_once(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    store = Store(f"sqlite:///{path}")
    with store.engine.begin() as connection:
        command.upgrade(migrations(connection), "0007")
    with closing(sqlite3.connect(path)) as old, old:
        for time, record in ((2.0, '{"consensus_ce": 2.5}'), (1.0, '{"consensus_ce": 3.5}'), (3.0, BROKEN)):
            old.execute("INSERT INTO evaluations VALUES (?, ?, ?)", (f"[{time}]", time, record))
    store.migrate()
    with store.read() as session:
        assert held_out_losses(session) == [3.5, 2.5], "oldest first, and only numbers"
    with closing(sqlite3.connect(path)) as new:
        query = "EXPLAIN QUERY PLAN SELECT consensus_ce FROM evaluations ORDER BY time"
        [*_, plan] = new.execute(query).fetchone()
    assert plan == "SCAN evaluations USING COVERING INDEX evaluations_by_time"
    store.close()


def test_what_a_serial_run_starts_from_is_scored_so_that_its_first_merge_may_be_worse(local: Place) -> None:
    with local.serve(recipe_of("serial"), scoring=True) as running:

        def versions() -> list[tuple[int, ...]]:
            return [one.versions for one in running.coordinator.reports.status({}, {}).evaluations]

        running.wait_for(lambda: bool(versions()))
        assert versions() == [(0, 0)]


def test_an_update_is_judged_with_the_weight_that_its_merge_will_take(local: Place) -> None:
    recipe = replace(recipe_of("serial"), trust=TrustConfig(judge="external", stamp_bits=0))
    with local.serve(recipe) as running:
        scored(running, 3.0, 1.0)
        scored(running, 3.1, 2.0)
        peer = running.peer()
        peer.deliver(peer.lend())
        task = running.coordinator.judging.lease("judge")
        assert isinstance(task, JudgeTask)
        assert task.step == 0.5
