"""The model of a hosted run comes out: in the middle and at the end, by address and by folder (A1.1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.snapshot import tensors_of
from blocktrain.wire.hashing import snapshot_hash
from tests.cli.program import run_main
from tests.coordinator.conftest import Running, served, tiny_recipe

HOST = torch.device("cpu")


def train_round(running: Running, block: int, version: int) -> None:
    """By a worker of its own: the first that asks gets block 0, the second block 1."""
    while len(running.peers) <= block:
        running.peer()
    while running.coordinator.reports.block(block).head_version < version:
        assignment = running.peers[block].lend()
        assert assignment.block == block
        running.peers[block].deliver(assignment, seed=assignment.round)
        running.wait_for_version(block, assignment.round + 1)


@pytest.fixture
def half_trained(tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """A run whose blocks have each had one of four rounds."""
    folder = tmp_path / "data"
    with served(folder, tiny_recipe()) as running:
        for block in (0, 1):
            train_round(running, block, 1)
        yield running, folder


def heads(running: Running) -> list[str]:
    return [running.coordinator.reports.block(block).head_hash for block in (0, 1)]


def test_a_running_run_gives_its_newest_heads_by_address_and_by_folder(
    half_trained: tuple[Running, Path], tmp_path: Path
) -> None:
    running, folder = half_trained
    for number, place in enumerate((running.url, str(folder))):
        out = tmp_path / f"model-{number}"
        outcome = run_main("checkpoint", place, "--to", out)
        assert outcome.code == 0, outcome.err
        assert "rounds 1, 1 of 4, as its ledger says" in outcome.out
        loaded = load_checkpoint(out, HOST)
        assert [snapshot_hash(tensors_of(block)) for block in loaded.blocks] == heads(running)
        assert loaded.pooling.weights == (0.5, 0.5)
        assert loaded.recipe.training.steps == loaded.recipe.swarm.total_steps
    files = sorted(path.name for path in (tmp_path / "model-0").iterdir())
    for name in files:
        assert (tmp_path / "model-0" / name).read_bytes() == (tmp_path / "model-1" / name).read_bytes()
    train_round(running, 0, 2)
    assert "rounds 2, 1 of 4" in run_main("checkpoint", running.url, "--to", tmp_path / "later").out


def test_a_stopped_run_gives_its_model_with_the_votes_that_were_scored(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with served(folder, tiny_recipe(rounds=1), scoring=True) as running:
        for block in (0, 1):
            train_round(running, block, 1)
        found = running.coordinator.status
        running.wait_for(lambda: any(min(one.versions) == 1 for one in found().evaluations), seconds=60)
        votes, last = found().evaluations[-1].weights, heads(running)
    outcome = run_main("checkpoint", folder, "--to", tmp_path / "model")
    assert outcome.code == 0, outcome.err
    assert "not scored" not in outcome.out
    loaded = load_checkpoint(tmp_path / "model", HOST)
    assert loaded.pooling.weights == pytest.approx(votes)
    assert [snapshot_hash(tensors_of(block)) for block in loaded.blocks] == last


def test_verbs_that_take_a_checkpoint_take_a_run(half_trained: tuple[Running, Path], tmp_path: Path) -> None:
    running, folder = half_trained
    text = tmp_path / "text.txt"
    text.write_bytes(b"held out text " * 4)
    run_main("checkpoint", running.url, "--to", tmp_path / "model")
    scores = [
        json.loads(run_main("evaluate", place, "--text", text, "--json", "--draws", "1").out)
        for place in (tmp_path / "model", running.url, folder)
    ]
    assert scores[0] == scores[1] == scores[2]
    said = [
        run_main("generate", place, "--prompt", "a ", "--max-bytes", "8").out
        for place in (tmp_path / "model", running.url, folder)
    ]
    assert said[0] == said[1] == said[2]
    exported = run_main("export", running.url, "--to", tmp_path / "exported")
    assert exported.code == 0, exported.err
    assert f"exported {running.url} to" in exported.out


@pytest.mark.parametrize("verb", ["evaluate", "generate", "export", "serve", "checkpoint"])
def test_a_place_that_holds_neither_a_model_nor_a_run_is_misuse(verb: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    more = {
        "evaluate": ("--text", tmp_path / "text.txt"),
        "generate": ("--prompt", "x"),
        "export": ("--to", tmp_path / "out"),
        "serve": (),
        "checkpoint": ("--to", tmp_path / "out"),
    }[verb]
    outcome = run_main(verb, tmp_path / "nothing", *more)
    assert outcome.code == 2
    assert "expected a" in outcome.complaint
    wrong = run_main(verb, "ftp://run.example:8420", *more)
    assert wrong.code == 2
    assert "'ftp://run.example:8420' is not the address of a coordinator" in wrong.complaint


def test_weights_that_are_not_those_of_the_ledger_do_not_become_a_model(
    half_trained: tuple[Running, Path], tmp_path: Path
) -> None:
    running, folder = half_trained
    for file in (folder / "blobs" / "snapshots").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    outcome = run_main("checkpoint", running.url, "--to", tmp_path / "model")
    assert outcome.code == 1
    assert "gave other weights of block 0 than its ledger names" in outcome.complaint
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_in_use_is_not_overwritten(
    half_trained: tuple[Running, Path], tmp_path: Path
) -> None:
    outcome = run_main("checkpoint", half_trained[0].url, "--to", half_trained[1])
    assert outcome.code == 2
    assert "already exists; choose a new folder" in outcome.complaint
