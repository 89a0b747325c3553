"""Real programs with everything on: stamps, the judge, receipts; the run ends and its ledger holds."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from blocktrain.cli.main import app
from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe


def test_strangers_train_a_judged_run_to_its_end(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(
        text,
        training={"batch": 8, "warmup_steps": 2},
        swarm={"codec": "sparse:64", "steps_per_round": 10, "rounds": 4, "replicas": 2,
               "max_deadline_seconds": 10.0},
        trust={"judge": "coordinator", "stamp_bits": 10},
    )  # fmt: skip
    coordinator = Coordinator(kit, recipe).start()
    workers = [kit.worker(coordinator.url, f"worker-{number}") for number in range(2)]
    coordinator.finished()
    for worker in workers:
        assert worker.wait() is not None, "the worker does not end"
        assert "stamping bits=10" in worker.text()
    standing = coordinator.client().workers().workers
    assert sum(one.merged for one in standing) >= 4
    # Not the reputation: rounds this short show little of their text, so its second factor is a coin's.
    assert [(one.ban, one.rating >= 0.5) for one in standing] == [(None, True)] * 2
    receipts = str(kit.folder / "worker-0")
    result = CliRunner().invoke(app, ["ledger", "verify", coordinator.url, "--receipts", receipts])
    assert result.exit_code == 0, result.stdout
    assert "receipts agree" in result.stdout
