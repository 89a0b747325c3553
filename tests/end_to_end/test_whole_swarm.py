"""`blocktrain swarm`: the same programs as processes of one machine, to a checkpoint and a report."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_kit import Kit, Program, tiny_recipe, until, write_recipe

from blocktrain.config import Recipe
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.local import LocalRun, Silent

LEARNING: dict[str, Any] = {"batch": 8, "warmup_steps": 5, "matrix_lr": 0.01, "other_lr": 0.01}


def run_swarm(kit: Kit, recipe: Recipe, workers: int) -> dict[str, Any]:
    out = kit.folder / "out"
    path = write_recipe(recipe, kit.folder / "recipe.toml")
    arguments = ["swarm", str(path), "--workers", str(workers), "--out", str(out), "--device", "cpu"]
    program = kit.start("swarm", arguments)
    assert program.wait(200) == 0, program.text()
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert "final CE" in program.text()
    return report


def one_process_ce(recipe: Recipe, out: Path) -> float:
    """Held-out CE of the same blocks trained for the same steps by the local run."""
    torch.set_num_threads(1)
    training = dataclasses.replace(recipe.training, steps=recipe.swarm.total_steps)
    run = LocalRun(dataclasses.replace(recipe, training=training), out, torch.device("cpu"), Silent())
    run.train(resume=False)
    return float(run.evaluate()["composed"]["consensus"]["ce"])


def test_a_swarm_ends_with_a_checkpoint_and_a_report(kit: Kit, text: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        text,
        training=LEARNING,
        swarm={"codec": "dense", "steps_per_round": 10, "rounds": 6, "replicas": 2},
    )
    report = run_swarm(kit, recipe, workers=2)
    checkpoint = load_checkpoint(kit.folder / "out" / "checkpoint", torch.device("cpu"))
    assert checkpoint.recipe.training.steps == 60
    assert report["final"]["consensus_ce"] < one_process_ce(recipe, tmp_path / "local") + 0.5
    assert report["participation"] > 0.8
    assert sum(report["ages"].values()) >= 6
    assert 0 < report["bytes_up"]["payload"] < report["bytes_total"]
    assert set(report["seconds"]) == {"computing", "transferring", "waiting"}
    assert len(report["workers"]) == 2
    assert {one["version"] for one in report["rounds"]} == set(range(1, 7))


def test_ctrl_c_ends_every_process_of_a_swarm(kit: Kit, text: Path) -> None:
    path = write_recipe(tiny_recipe(text, swarm={"rounds": 100_000}), kit.folder / "recipe.toml")
    out = kit.folder / "out"
    swarm = kit.start("swarm", ["swarm", str(path), "--workers", "1", "--out", str(out), "--device", "cpu"])
    log = out / "logs" / "worker-0.log"
    until("the worker trains", lambda: log.exists() and "train block=0" in log.read_text())
    children = _children(swarm)
    assert len(children) == 2
    swarm.send(signal.SIGINT)
    assert swarm.wait(60) == 1, swarm.text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(program: Program) -> list[int]:
    pid = program.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_per_block_reach_the_loss_of_one_process(kit: Kit, text: Path, tmp_path: Path) -> None:
    """T6 in small: four workers, two replicas of each of two blocks."""
    recipe = tiny_recipe(
        text,
        model={"blocks": 2},
        training=LEARNING,
        swarm={"codec": "sign", "steps_per_round": 10, "rounds": 24, "replicas": 2},
    )
    report = run_swarm(kit, recipe, workers=4)
    assert report["final"]["consensus_ce"] < one_process_ce(recipe, tmp_path / "local") + 0.03
