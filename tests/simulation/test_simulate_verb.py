from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from blocktrain.cli.simulate import NetworkName, simulate
from blocktrain.simulation.networks import NETWORKS

app = typer.Typer()
app.command()(simulate)

TINY = (
    "model.width=16 model.heads=1 model.blocks=2 model.layers_per_block=1 model.context=16 training.batch=2 "
    "evaluation.max_bytes=256 evaluation.pooling_bytes=256 swarm.rounds=2 swarm.steps_per_round=1"
)


def settings(folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and the dog did not. " * 200)
    chosen = [*TINY.split(), f"data.corpus={text}"]
    return [part for one in chosen for part in ("--set", one)]


def test_simulate_prints_its_report_as_json(tmp_path: Path) -> None:
    command = ["asynchrony", "--network", "wan-tight", "--policy", "drop", "--json", *settings(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["network"], report["policy"]) == ("wan-tight", "drop")
    assert [one["round"] for one in report["ce"]] == [1, 2]


def test_simulate_prints_a_table(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["asynchrony", "--network", "mild", *settings(tmp_path)])
    assert result.exit_code == 0
    assert "final CE" in result.stdout
    assert "virtual wall time" in result.stdout


def test_an_unknown_network_is_misuse_and_the_known_ones_are_named() -> None:
    result = CliRunner().invoke(app, ["asynchrony", "--network", "moon"])
    assert result.exit_code == 2
    assert all(name in result.output for name in NETWORKS)


def test_the_command_line_knows_every_network() -> None:
    assert [name.value for name in NetworkName] == list(NETWORKS)
