"""What commit 59aa936 left on disk is opened, gone on with and finished, with the results it would have had.

The folders come from `make_fixtures.py`. Everything here goes through the command line, so that no move of
modules can make these tests easier.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from blocktrain.worker.shifts import CONTRIBUTION_FILE
from tests.compatibility.make_fixtures import machine
from tests.forked import ForkedProcess, start_blocktrain
from tests.waiting import until

ARCHIVE = Path(__file__).with_name("made-by-59aa936.tar.xz")
WAIT_SECONDS = 120.0


class Old:
    """The unpacked folders, and programs of today run in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.expected: dict[str, Any] = json.loads((folder / "expected.json").read_text())
        self.same_machine = self.expected["machine"] == machine()
        self.started: list[ForkedProcess] = []

    def start(self, *arguments: str) -> tuple[ForkedProcess, Path]:
        self.number += 1
        log = self.folder / f"log-{self.number}"
        process = start_blocktrain(list(arguments), Path(f"{log}.1"), Path(f"{log}.2"), self.folder)
        self.started.append(process)
        return process, log

    def run(self, *arguments: str) -> str:
        process, log = self.start(*arguments)
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0, Path(f"{log}.2").read_text()
        return Path(f"{log}.1").read_text(encoding="latin-1")

    def refused(self, *arguments: str) -> str:
        """What a run that must fail in words says."""
        process, log = self.start(*arguments)
        process.join(WAIT_SECONDS)
        assert process.exitcode in (1, 2)
        return " ".join(Path(f"{log}.2").read_text().split())

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.join()


@pytest.fixture
def old(tmp_path: Path) -> Any:
    # By tar: Python 3.11.2, which Debian 12 has, unpacks only without the filter that 3.14 asks for.
    subprocess.run(["tar", "-xf", ARCHIVE, "-C", tmp_path], check=True)
    unpacked = Old(tmp_path)
    yield unpacked
    unpacked.end()


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.glob("*.safetensors"))
    assert files
    return {
        f"{file.name}/{name}": tensor
        for file in files
        for name, tensor in safetensors.torch.load_file(file).items()
    }


def check_same_run(old: Old, found: Path, expected: Path) -> None:
    """The same losses and weights to rounding: Muon multiplies in fp32 on a CPU now (docs/decisions/0002)."""
    reports = [json.loads((folder / "report.json").read_text()) for folder in (found, expected)]
    for key in ("blocks", "composed", "reference", "bigram", "curves", "tokens", "parameters", "flops"):
        assert flat(reports[0][key]) == pytest.approx(flat(reports[1][key]), rel=1e-3), key
    mine, theirs = weights_of(found / "checkpoint"), weights_of(expected / "checkpoint")
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-3, rtol=1e-3)


def flat(value: Any, where: str = "") -> dict[str, float]:
    """Every number in a value by its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: number for key, one in items for path, number in flat(one, f"{where}/{key}").items()}
    return {} if value is None else {where: float(value)}


@pytest.mark.parametrize(
    ("recipe", "half", "whole"),
    [("recipe.toml", "half", "whole"), ("turns.toml", "half-turns", "whole-turns")],
)
def test_a_run_that_an_older_version_began_ends_as_there(
    old: Old, recipe: str, half: str, whole: str
) -> None:
    assert not (old.folder / half / "report.json").exists()
    old.run("train", recipe, "--out", half, "--device", "cpu", "--resume")
    check_same_run(old, old.folder / half, old.folder / whole)


def test_a_run_from_the_start_has_the_older_versions_losses(old: Old) -> None:
    old.run("train", "recipe.toml", "--out", "again", "--device", "cpu")
    check_same_run(old, old.folder / "again", old.folder / "whole")


def test_a_checkpoint_of_an_older_version_scores_and_writes_the_same(old: Old) -> None:
    flags = ["--text", "score.txt", "--json", "--device", "cpu"]
    scores = json.loads(old.run("evaluate", "whole/checkpoint", *flags))
    assert flat(scores) == pytest.approx(flat(old.expected["evaluate"]), rel=1e-4)
    flags = ["--prompt", "one block ", "--max-bytes", "24", "--seed", "5", "--device", "cpu"]
    written = old.run("generate", "whole/checkpoint", *flags)
    assert len(written) == len(old.expected["generate"])
    if old.same_machine:
        assert written == old.expected["generate"]


def test_what_an_older_version_trained_with_a_removed_objective_is_refused_in_words(old: Old) -> None:
    """`composed` had the same files, so the chain's folders with its name are what its owners have."""
    for name in ("turns.toml", "half-turns/run.json", "whole-turns/checkpoint/config.json"):
        path = old.folder / name
        text, count = re.subn(r'("?kind"?\s*[=:]\s*)"chain"', r'\1"composed"', path.read_text())
        assert count, f"{name} names no objective"
        path.write_text(text)
    score = ["evaluate", "whole-turns/checkpoint", "--text", "score.txt", "--device", "cpu"]
    write = ["generate", "whole-turns/checkpoint", "--prompt", "one", "--device", "cpu"]
    serve = ["coordinator", "turns.toml", "--data-dir", "composed", "--port", "0"]
    train = ["train", "turns.toml", "--out", "half-turns", "--device", "cpu", "--resume"]
    for verb in (train, score, write, serve):
        said = old.refused(*verb)
        assert "which was removed" in said, said
        assert "commit 59aa936" in said, said
        assert "Traceback" not in said


def test_a_swarm_that_an_older_version_began_is_finished_and_verified(old: Old) -> None:
    ledger = ["ledger", "verify", "swarm/coordinator", "--receipts", "swarm/worker", "--json"]
    assert json.loads(old.run(*ledger)) == old.expected["ledger"]
    coordinator, log = old.start(
        "coordinator", "swarm.toml", "--data-dir", "swarm/coordinator", "--port", "0"
    )
    url = ready_url(coordinator, Path(f"{log}.1"))
    left = {*(old.folder / "swarm" / "worker").iterdir()}
    old.run(
        "worker",
        "--coordinator",
        url,
        "--data-dir",
        "swarm/worker",
        "--corpus",
        "text.txt",
        "--device",
        "cpu",
    )
    added = {*(old.folder / "swarm" / "worker").iterdir()} - left
    assert {path.name for path in added} <= {CONTRIBUTION_FILE}, "the worker did not find its old folder"
    status = json.loads(old.run("status", url, "--json"))
    assert status["finished"]
    assert [block["head_version"] for block in status["blocks"]] == [status["rounds"]]
    assert len(status["workers"]) == 1, "the worker came back as another"
    coordinator.terminate()
    coordinator.join(WAIT_SECONDS)
    verified = json.loads(old.run(*ledger))
    assert verified["ok"]
    assert verified["merges"] == status["rounds"] > old.expected["ledger"]["merges"]
    assert verified["receipts"] > old.expected["ledger"]["receipts"]


def ready_url(process: ForkedProcess, log: Path) -> str:
    def said() -> str | None:
        assert process.is_alive(), f"the coordinator did not start: {log.with_suffix('.2').read_text()}"
        found = re.search(r"coordinator ready url=(\S+)", log.read_text() if log.exists() else "")
        return found.group(1) if found else None

    return until("the coordinator listens", said)
