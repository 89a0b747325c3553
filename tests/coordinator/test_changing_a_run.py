"""A run is extended, finished early, closed to strangers and begun from a checkpoint (A3, first point)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.config import CHANGEABLE, FIXED, Recipe, TrustConfig, changed_settings, resolve_recipe
from blocktrain.coordinator.operator_notes import KEY_FILE
from blocktrain.coordinator.service import opened
from blocktrain.errors import CheckpointError, UserError
from blocktrain.judge.ledger_check import open_source, verify_place
from blocktrain.local.assembly import save_model
from blocktrain.training.checkpoint import starting_blocks
from blocktrain.training.setup import Setup
from blocktrain.wire.identity import load_or_create
from tests.cli.program import run_main
from tests.coordinator.conftest import CORPUS, Place, Running, served, tiny_recipe
from tests.coordinator.peer import Refused

ROOT = Path(__file__).parents[2]


def train(running: Running, version: int) -> None:
    """Bring the one block of a run to this version."""
    peer = running.peers[0] if running.peers else running.peer()
    while running.coordinator.reports.block(0).head_version < version:
        assignment = peer.lend()
        peer.deliver(assignment, seed=assignment.round)
        running.wait_for_version(0, assignment.round + 1)


def test_a_finished_run_goes_on_with_more_rounds_and_the_ledger_says_so(place: Place) -> None:
    with place.serve(tiny_recipe(blocks=1, rounds=1)) as running:
        train(running, 1)
        assert running.coordinator.status().finished
        run_id, member = running.coordinator.resources.run.run_id, running.peers[0].identity
    with place.serve(tiny_recipe(blocks=1, rounds=3)) as running:
        status = running.coordinator.status()
        assert (status.run_id, status.finished, status.rounds) == (run_id, False, 3)
        assignment = running.peer(member).lend()
        # The schedule is that of the longer run from here on.
        assert (assignment.first_step, assignment.total_steps) == (2, 6)
        with open_source(running.url) as source:
            assert [entry.body["settings"] for entry in source.entries[1:] if entry.kind == "run"] == [
                {"swarm.rounds": 3}
            ]
            assert source.recipe()["swarm"]["rounds"] == 3
        assert verify_place(running.url).ok
        assert running.peers[0].run.recipe["swarm"]["rounds"] == 3
    with place.serve(tiny_recipe(blocks=1, rounds=3)) as running, open_source(running.url) as source:
        assert sum(entry.kind == "run" for entry in source.entries) == 2


def test_an_open_run_becomes_invite_only(local: Place) -> None:
    recipe = tiny_recipe()
    with local.serve(recipe) as running:
        member = running.peer().identity
    closed = replace(recipe, trust=replace(recipe.trust, admission="invite"))
    with local.serve(closed) as running:
        running.peer(member).lend()
        with pytest.raises(Refused, match="invite_required"):
            running.peer()


def test_the_operator_finishes_a_run_early_and_it_stays_finished(local: Place) -> None:
    recipe = tiny_recipe(blocks=1, rounds=4)
    with local.serve(recipe) as running:
        running.clock.now = time.time()  # the program has no other clock
        early = run_main("finish", "--coordinator", running.url, "--data-dir", local.data_dir)
        assert early.code == 1
        assert "block 0 has had no round yet" in early.complaint
    with local.serve(recipe) as running:
        train(running, 2)
        stranger = running.peers[0]
        with pytest.raises(Refused, match="not_operator"):
            stranger.call("POST", "/v1/finish")
        operator = running.peer(load_or_create(local.data_dir / KEY_FILE), join=False)
        operator.call("POST", "/v1/finish")
        assert running.coordinator.status().finished
        assert stranger.ask().kind == "finished"
        with pytest.raises(Refused, match="finished already"):
            operator.call("POST", "/v1/finish")
    with local.serve(recipe) as running:
        assert running.coordinator.status().finished
        assert verify_place(running.url).ok
    with local.serve(tiny_recipe(blocks=1, rounds=5)) as running:
        assert not running.coordinator.status().finished
        running.peer(stranger.identity)
        train(running, 3)


def test_a_second_process_hears_that_the_run_was_finished(tmp_path: Path, postgres_url: str) -> None:
    recipe, folder = tiny_recipe(blocks=1, rounds=4), tmp_path
    with (
        served(folder, recipe, database_url=postgres_url) as one,
        served(folder, recipe, one.clock, database_url=postgres_url) as other,
    ):
        train(one, 1)
        one.coordinator.finish()
        other.coordinator.sweep()
        assert other.coordinator.status().finished


def test_a_run_begins_from_a_checkpoint_and_goes_on_from_there(tmp_path: Path) -> None:
    with served(tmp_path / "first", tiny_recipe(blocks=1)) as running:
        train(running, 2)
        head = running.coordinator.reports.block(0).head_hash
        save_model(running.url, tmp_path / "model")
    recipe = tiny_recipe(blocks=1, rounds=2)
    blocks, _ = starting_blocks(tmp_path / "model", Setup.of_swarm(recipe))
    with opened(recipe, CORPUS, tmp_path / "second", scoring=False, start=blocks) as coordinator:
        assert coordinator.reports.block(0).head_hash == head
    # The same command again goes on; without --from too; from elsewhere it is refused.
    with opened(recipe, CORPUS, tmp_path / "second", scoring=False, start=blocks):
        pass
    with served(tmp_path / "second", recipe) as running:
        peer = running.peer()
        assert peer.run.blocks[0].initial_hash == head == peer.lend().base_hash
        train(running, 1)
        assert verify_place(running.url).ok
    fresh = [Setup.of_swarm(recipe).initial(0)]
    with (
        pytest.raises(UserError, match="began from other weights than --from names"),
        opened(recipe, CORPUS, tmp_path / "second", scoring=False, start=fresh),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"blocks": 2}, "has 1 blocks, the recipe 2"),
        ({"width": 32}, "for the recipe's model"),
        ({}, "set seed = 0"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_setting(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    recipe = tiny_recipe(blocks=1)
    with served(tmp_path / "first", recipe) as running:
        save_model(running.url, tmp_path / "model")
    other = replace(recipe, model=replace(recipe.model, **changes), seed=0 if changes else 1)
    with pytest.raises(CheckpointError, match=told):
        starting_blocks(tmp_path / "model", Setup.of_swarm(other))


def test_every_setting_may_change_or_says_why_not() -> None:
    def keys(values: dict[str, object], prefix: str = "") -> set[str]:
        found: set[str] = set()
        for key, value in values.items():
            found |= keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
        return found

    known = keys(Recipe().to_dict())
    assert CHANGEABLE.keys() <= known
    assert {key.split(".")[0] for key in known - CHANGEABLE.keys()} == FIXED.keys()
    assert changed_settings(Recipe().to_dict(), resolve_recipe({}, ["trust.admission=invite"])) == {
        "trust.admission": (TrustConfig().admission, "invite")
    }


def test_the_page_for_hosts_lists_what_may_change() -> None:
    page = (ROOT / "docs" / "host.md").read_text(encoding="utf-8")
    for key, effect in CHANGEABLE.items():
        assert f"| `{key}` | {effect} |" in page
    for section, why in FIXED.items():
        assert f"| `{section}` | {why} |" in page
