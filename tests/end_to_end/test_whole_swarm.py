"""`blocktrain swarm`: the same programs as processes of one machine, to a checkpoint and a report."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import Recipe
from blocktrain.files import locked_file
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.local import LocalRun, Silent
from tests.end_to_end.swarm_kit import Kit, Program, tiny_recipe, write_recipe
from tests.waiting import until

LEARNING: dict[str, Any] = {"batch": 8, "warmup_steps": 5, "matrix_lr": 0.01, "other_lr": 0.01}


def start_swarm(kit: Kit, recipe: Recipe, workers: int, name: str, *more: str) -> Program:
    path = write_recipe(recipe, kit.folder / "recipe.toml")
    out = str(kit.folder / "out")
    arguments = ["swarm", str(path), "--workers", str(workers), "--out", out, "--device", "cpu", *more]
    return kit.start(name, arguments)


def run_swarm(kit: Kit, recipe: Recipe, workers: int) -> dict[str, Any]:
    out = kit.folder / "out"
    program = start_swarm(kit, recipe, workers, "swarm")
    assert program.wait(200) == 0, program.text()
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert "final CE" in program.text()
    assert str(out / "report.json") in program.text()
    return report


def one_process_ce(recipe: Recipe, out: Path) -> float:
    """Held-out CE of the same blocks trained for the same steps by the local run."""
    torch.set_num_threads(1)
    training = dataclasses.replace(recipe.training, steps=recipe.swarm.total_steps)
    run = LocalRun(dataclasses.replace(recipe, training=training), out, torch.device("cpu"), Silent())
    run.train(resume=False)
    return run.evaluate().consensus.ce


def test_a_swarm_ends_with_a_checkpoint_and_a_report(kit: Kit, text: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        text,
        training=LEARNING,
        swarm={"codec": "dense", "steps_per_round": 10, "rounds": 4, "replicas": 2},
    )
    report = run_swarm(kit, recipe, workers=2)
    checkpoint = load_checkpoint(kit.folder / "out" / "checkpoint", torch.device("cpu"))
    assert checkpoint.recipe.training.steps == 40
    assert report["final"]["consensus_ce"] < one_process_ce(recipe, tmp_path / "local") + 0.5
    assert report["participation"] > 0.8
    assert sum(report["ages"].values()) >= 4
    assert 0 < report["bytes_up"]["payload"] < report["bytes_total"]
    assert set(report["seconds"]) == {"computing", "transferring", "waiting"}
    assert len(report["workers"]) == 2
    assert {one["version"] for one in report["rounds"]} == set(range(1, 5))
    metrics = [json.loads(line) for line in (kit.folder / "out" / "metrics.jsonl").read_text().splitlines()]
    written = sorted(one["version"] for one in metrics if one["event"] == "round")
    assert written == sorted(one["version"] for one in report["rounds"])
    check_that_a_finished_swarm_is_left_alone(kit, recipe)


def check_that_a_finished_swarm_is_left_alone(kit: Kit, recipe: Recipe) -> None:
    out = kit.folder / "out"
    before = {file: file.read_bytes() for file in out.rglob("*.json*")}
    again = start_swarm(kit, recipe, 2, "again")
    assert again.wait() == 0, again.text()
    assert "is finished; choose another --out" in again.text()
    other = start_swarm(kit, recipe, 2, "other", "--set", "swarm.rounds=7")
    assert other.wait() == 2
    assert "holds a run with other settings (swarm.rounds)" in other.text()
    assert {file: file.read_bytes() for file in out.rglob("*.json*")} == before


def test_what_a_child_calls_misuse_is_misuse_of_the_swarm(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(text)
    program = start_swarm(kit, recipe, 1, "bad", "--set", "data.corpus=/no/such/text")
    assert program.wait() == 2
    assert "blocktrain: coordinator: no text at /no/such/text" in program.text()
    assert "Traceback" not in program.text()
    program = start_swarm(kit, recipe, 1, "from nothing", "--from", "no/such/model")
    assert program.wait() == 2
    assert "blocktrain: coordinator: no checkpoint folder at no/such/model" in program.text()
    folder = kit.folder / "out"
    with locked_file(folder / "swarm.lock", "taken"):
        second = start_swarm(kit, recipe, 1, "second")
        assert second.wait() == 2
    assert f"another swarm is using {folder}" in second.text()


def test_ctrl_c_ends_every_process_of_a_swarm(kit: Kit, text: Path) -> None:
    path = write_recipe(tiny_recipe(text, swarm={"rounds": 100_000}), kit.folder / "recipe.toml")
    out = kit.folder / "out"
    swarm = kit.start("swarm", ["swarm", str(path), "--workers", "1", "--out", str(out), "--device", "cpu"])
    log = out / "logs" / "worker-0.log"
    until("the worker trains", lambda: log.exists() and "train block=0" in log.read_text())
    children = _children(swarm)
    assert len(children) == 2
    swarm.send(signal.SIGINT)
    assert swarm.wait() == 130, swarm.text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(program: Program) -> list[int]:
    pid = program.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_interrupted_swarm_goes_on_where_it_stopped(kit: Kit, text: Path) -> None:
    recipe = tiny_recipe(text, swarm={"rounds": 12, "steps_per_round": 20, "codec": "sparse:64"})
    path = write_recipe(recipe, kit.folder / "recipe.toml")
    out = kit.folder / "out"
    swarm = kit.start("first", ["swarm", str(path), "--workers", "1", "--out", str(out), "--device", "cpu"])
    log = out / "logs" / "worker-0.log"
    until("a round is merged", lambda: log.exists() and "rebase block=0 version=2" in log.read_text())
    swarm.send(signal.SIGTERM)
    assert swarm.wait() == 130, swarm.text()
    report = run_swarm(kit, recipe, workers=1)
    assert report["finished"]
    assert len(report["workers"]) == 1
    assert sorted(one["version"] for one in report["rounds"]) == list(range(1, 13))
