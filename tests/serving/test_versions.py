"""A folder of models taken from a run: what is kept and served, and what a damaged one is answered with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from blocktrain.errors import CheckpointError, UserError
from blocktrain.local.following import KEPT_CHECKPOINTS, Follower
from blocktrain.serving.versions import (
    VERSIONS,
    current_checkpoint,
    kept_checkpoints,
    publish,
    roll_back,
    versions_of,
)
from tests.coordinator.conftest import served, tiny_recipe
from tests.coordinator.test_changing_a_run import train
from tests.forked import quick_python
from tests.waiting import PATIENCE_SECONDS


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


@pytest.mark.parametrize("verb", ["stage", "gateway"])
def test_a_server_that_can_no_longer_follow_its_folder_says_why_and_fails(
    checkpoint: Path, tmp_path: Path, verb: str
) -> None:
    """Before, the look ended without a word and the old model was served for good."""
    models = tmp_path / "models"
    shutil.copytree(checkpoint, models / "1")
    (models / "2").mkdir()
    (models / "2" / "config.json").write_text("[" * 100_000)  # too deep for the reader, which nobody foresaw
    publish(models / "1")
    flags = ["--blocks", "0", "--listen", "127.0.0.1:0"] if verb == "stage" else ["--port", "0"]
    command = [quick_python(), "-m", "blocktrain", verb, str(models), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert " ready " in server.stdout.readline()
            publish(models / "2")
            _, told = server.communicate(timeout=PATIENCE_SECONDS)
        finally:
            server.kill()
    assert server.returncode == 1
    assert "no longer following" in told
    assert "RecursionError" in told
