"""The SkyPilot tasks, read by SkyPilot itself from an environment of its own: it needs other versions of
libraries than ours. `make deploy-check` installs it in 20 s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

TASKS = sorted((ROOT / "deploy" / "skypilot").glob("*.yaml"))
PYTHON = Path(sys.prefix, "skypilot", "bin", "python")
READ = """
import sys, sky
for path in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(path)
        print(task.name, len(task.resources), {one.use_spot for one in task.resources})
    except ValueError as error:
        print("refused:", *str(error).split())
"""


@pytest.mark.deploy
def test_skypilot_takes_the_task_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    assert PYTHON.exists(), "make deploy-check installs SkyPilot"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(TASKS[0].read_text().replace("use_spot:", "use_spots:"))
    # It keeps notes in the home folder, and reports its use to its makers unless it is told not to.
    settings = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [PYTHON, "-c", READ, *TASKS, wrong],
        env=settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    *taken, refused = done.stdout.splitlines()
    assert taken == ["blocktrain-worker 4 {True}"]
    assert refused.startswith("refused: ")
    assert "use_spots" in refused
