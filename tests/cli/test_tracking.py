"""metrics.jsonl is written as docs/tracking.md says; other trackers get the same numbers."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from blocktrain.coordinator.main import watched
from blocktrain.tracking.trackers import (
    MetricsFile,
    Recorder,
    TrackerName,
    recording,
    scalars_of,
    status_records,
)
from blocktrain.wire.messages import EvaluationState, RoundReport
from tests.cli.program import Outcome, run_main
from tests.coordinator.conftest import served, tiny_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text(encoding="utf-8")
ROUND = {
    "event": "round", "time": 5.0, "block": 1, "version": 3, "seconds": 2.0, "on_time": 3, "late": 0,
    "refused": 0, "assigned": 4, "mean_loss": 2.5,
}  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def documented(event: str) -> set[str]:
    (row,) = re.findall(rf"^\| `{event}` \| (.*?) \|", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row)) | {"event", "time"}


def test_a_local_run_writes_what_is_documented(trained: tuple[Path, Outcome]) -> None:
    records = lines(trained[0] / "metrics.jsonl")
    report = json.loads((trained[0] / "report.json").read_text())
    for record in records:
        assert record.keys() == documented(record["event"])
    for unit, curve in report["curves"].items():
        steps = [[r["step"], r["ce"]] for r in records if r["event"] == "step" and r["unit"] == unit]
        assert steps == curve
    scores = {record["model"]: record["ce"] for record in records if record["event"] == "score"}
    assert scores["consensus"] == report["composed"]["consensus"]["ce"]
    assert scores["reference"] == report["reference"]["ce"]
    assert [record["time"] for record in records] == sorted(record["time"] for record in records)


def test_swarm_records_have_the_documented_fields() -> None:
    """The messages they are made of may grow; then the page must too."""
    assert documented("round") == RoundReport.model_fields.keys() | {"event", "time"}
    assert documented("evaluation") == EvaluationState.model_fields.keys() | {"event"}


def test_a_coordinator_writes_each_round_once_however_often_it_starts(tmp_path: Path) -> None:
    recipe = tiny_recipe(rounds=4)
    for version in (1, 2):
        with (
            recording(tmp_path / "run", [], recipe.name, {}) as recorder,
            served(tmp_path / "run", recipe) as running,
            watched(running.coordinator, recorder.status),
        ):
            peer = running.peer()
            peer.deliver(peer.lend(), seed=version)
            running.wait_for(lambda: len(running.coordinator.status().reports) == version)  # noqa: B023
            expected = list(status_records(running.coordinator.status()))
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2
    for record in expected:
        assert [record | {"time": 0}] == [
            one | {"time": 0} for one in records if one["block"] == record["block"]
        ]
    for record in records:
        assert record.keys() == documented("round")


def test_a_line_cut_by_a_kill_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(ROUND).encode() + b'\n{"event": "rou')
    file = MetricsFile(path)
    file.add(ROUND)
    file.add(ROUND | {"version": 4})
    file.close()
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first) == ROUND
    assert torn == '{"event": "rou'
    assert json.loads(last)["version"] == 4


def test_tensorboard_gets_the_same_numbers(recipe_file: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    out = tmp_path / "run"
    outcome = run_main("train", recipe_file, "--out", out, "--device", "cpu", "--track", "tensorboard")
    assert outcome.code == 0, outcome.err
    events = event_accumulator.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    written = [r for r in lines(out / "metrics.jsonl") if r["event"] == "step" and r["unit"] == "block 1"]
    shown = [(event.step, event.value) for event in events.Scalars("block_1/ce")]
    assert [step for step, _ in shown] == [record["step"] for record in written]
    assert [value for _, value in shown] == pytest.approx([record["ce"] for record in written])
    assert "held_out/consensus_ce" in events.Tags()["scalars"]


class Notebook(types.ModuleType):
    """Stands for wandb or trackio, which are large and want an account: writes down how it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def init(self, **options: Any) -> Notebook:
        self.calls.append(("init", options))
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define", {name: step_metric}))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish", {}))


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_board_gets_a_series_with_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    board = Notebook(package)
    monkeypatch.setitem(sys.modules, package, board)
    with recording(tmp_path, [TrackerName(package)], "tiny", {"seed": 3}) as recorder:
        assert board.calls == []
        recorder.write({"event": "step", "time": 1.0, "unit": "block 0", "step": 10, "ce": 2.0, "bytes": 9})
        recorder.write(ROUND)
    (begun, options), *others, ended = board.calls
    assert begun == "init"
    assert (options["project"], options["name"], options["config"]) == ("blocktrain", "tiny", {"seed": 3})
    assert ended[0] == "finish"
    assert ("log", {"block_0/step": 10, "block_0/ce": 2.0}) in others
    assert ("define", {"block_1/*": "block_1/step"}) in others
    assert dict(others[-1][1])["block_1/participation"] == 0.75


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_before_anything_begins(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    outcome = run_main("train", recipe_file, "--out", tmp_path / "run", "--track", package)
    assert outcome.code == 2
    assert f"pip install 'blocktrain[{package}]'" in outcome.complaint
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_misuse(recipe_file: Path, tmp_path: Path) -> None:
    assert run_main("train", recipe_file, "--out", tmp_path / "run", "--track", "paper").code == 2


def test_what_is_not_known_yet_is_left_out_of_curves() -> None:
    record = ROUND | {"mean_loss": None, "assigned": 0}
    assert scalars_of(record) == ("block_1", 3, {"seconds": 2.0})
    evaluation = {
        "event": "evaluation", "time": 1.0, "versions": [2, 3], "scored_bytes": 10, "consensus_ce": 2.0,
        "euler_ce": None, "block_ce": [2.5, 2.25], "weights": [0.5, 0.5],
    }  # fmt: skip
    found = ("held_out", 5, {"consensus_ce": 2.0, "block_0_ce": 2.5, "block_1_ce": 2.25})
    assert scalars_of(evaluation) == found


def test_a_recorder_writes_a_status_seen_twice_once(tmp_path: Path) -> None:
    with served(tmp_path / "data", tiny_recipe()) as running:
        peer = running.peer()
        peer.deliver(peer.lend())
        running.wait_for(lambda: len(running.coordinator.status().reports) == 1)
        status = running.coordinator.status()
    file = MetricsFile(tmp_path / "metrics.jsonl")
    recorder = Recorder([file])
    recorder.status(status)
    recorder.status(status.model_copy(update={"server_time": status.server_time + 9}))
    recorder.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
