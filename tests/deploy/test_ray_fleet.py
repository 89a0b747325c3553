"""Workers as actors of a real local Ray: they train, and a killed one is started again as the same worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe
from tests.waiting import until

MARK = "TEST_RAY_FLEET"


def actors(mark: str) -> set[int]:
    """The processes of busy actors, which Ray names after what they do."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended
        if command.startswith(b"ray::RayWorker.work") and f"{MARK}={mark}".encode() in environment:
            found.add(int(folder.name))
    return found


@pytest.mark.deploy
def test_a_killed_actor_is_started_again_and_the_run_finishes(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(text, swarm={"rounds": 10_000, "replicas": 2, "lease_seconds": 3.0})
    coordinator = Coordinator(kit, recipe).start()
    fleet = ["fleet", "ray", "--coordinator", coordinator.url, "--workers", "2", "--cpus", "0.5"]
    fleet += ["--data-dir", str(kit.folder / "fleet"), "--corpus", kit.corpus]
    program = kit.start("fleet", fleet, {MARK: str(kit.folder)})

    def both_work() -> set[int]:
        assert program.running, program.text()
        return found if len(found := actors(str(kit.folder))) == 2 else set()

    before = until("two actors work", both_work)
    until("both have joined", lambda: len(coordinator.status().workers) == 2)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    until("the victim is replaced", lambda: victim not in both_work() and both_work())
    counts = {one.worker_id: one.accepted for one in coordinator.status().workers}
    until(
        "both deliver again",
        lambda: all(one.accepted > counts[one.worker_id] for one in coordinator.status().workers),
    )
    assert len(coordinator.status().workers) == 2
    assert program.stop() == 0, program.text()
    assert "contributed" in program.text()
