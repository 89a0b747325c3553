"""A folder of models taken from a run: what is kept and served, and what a damaged one is answered with."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from blocktrain.errors import CheckpointError, UserError
from blocktrain.local.following import KEPT_CHECKPOINTS, Follower
from blocktrain.serving.versions import (
    VERSIONS,
    current_checkpoint,
    kept_checkpoints,
    roll_back,
    versions_of,
    watch,
)
from tests.coordinator.conftest import served, tiny_recipe
from tests.coordinator.test_changing_a_run import train


def test_a_follower_takes_each_merge_of_a_run_once(tmp_path: Path) -> None:
    with served(tmp_path / "run", tiny_recipe(blocks=1, rounds=KEPT_CHECKPOINTS + 3)) as running:
        follower = Follower(running.url, tmp_path / "models")
        for merges in range(KEPT_CHECKPOINTS + 2):
            found = follower.look()
            assert found is not None
            assert found.versions == versions_of(current_checkpoint(tmp_path / "models")) == (merges,)
            assert follower.look() is None
            train(running, merges + 1)
    kept = [versions_of(path) for path in kept_checkpoints(tmp_path / "models")]
    assert kept == [(merges,) for merges in range(2, KEPT_CHECKPOINTS + 2)]
    assert versions_of(roll_back(tmp_path / "models", 2)) == (KEPT_CHECKPOINTS - 1,)
    with pytest.raises(UserError, match="keeps 5 checkpoints"):
        roll_back(tmp_path / "models", 5)


def test_a_folder_that_names_something_else_is_refused(tmp_path: Path) -> None:
    assert current_checkpoint(tmp_path) == tmp_path
    (tmp_path / "current").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="damaged"):
        current_checkpoint(tmp_path)
    (tmp_path / VERSIONS).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        versions_of(tmp_path)


def test_an_error_that_nobody_foresaw_is_said_once_and_does_not_end_the_look(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktrain.serving.versions.LOOK_SECONDS", 0.0)
    taken = asyncio.Event()
    asked: list[str] = []

    async def take_over(wanted: str) -> None:
        asked.append(wanted)
        if len(asked) < 3:
            raise RecursionError("too deep")
        taken.set()

    async def follow() -> None:
        looking = asyncio.create_task(watch(lambda: "2", "1", take_over))
        await asyncio.wait_for(taken.wait(), 30)
        looking.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(follow())
    assert asked == ["2"] * 3
    assert [record.exc_info is not None for record in caplog.records] == [True]
