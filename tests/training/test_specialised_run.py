"""Specialised blocks through a whole local run and a whole simulated swarm, on text of two kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.dataset import Dataset
from blocktrain.model.generation import LocalModel
from blocktrain.model.pooling import DECAYS, Pooling
from blocktrain.simulation.networks import NETWORKS
from blocktrain.simulation.run import Scenario, Simulation
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.report import TrainingReport
from tests.kinds import held_out_text, two_kinds

CPU = torch.device("cpu")


def recipe_of(dataset: Dataset) -> Recipe:
    return resolve_recipe(
        {
            "model": {
                "width": 32, "heads": 2, "blocks": 2, "layers_per_block": 1, "context": 64,
            },
            "objective": {"hint_probability": 0.0},
            "data": {"dataset": str(dataset.folder), "own_share": 0.75},
            "training": {"steps": 40, "batch": 8, "warmup_steps": 5, "reference": False},
            "evaluation": {"noise_draws": 1, "batch": 32, "sample_bytes": 20},
            "swarm": {"steps_per_round": 10, "rounds": 2, "replicas": 1},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return two_kinds(tmp_path_factory.mktemp("kinds"))


def test_a_local_run_makes_specialists_that_the_text_chooses_among(dataset: Dataset, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = LocalRun(recipe_of(dataset), tmp_path / "run", CPU, Silent())
    run.train(resume=False)
    report = run.finish()
    written = json.loads((tmp_path / "run" / "report.json").read_text())
    assert TrainingReport.of_json(written).scores == report.scores
    assert written["composed"]["consensus"]["follows_text"]["decays"] == list(DECAYS)

    loaded = load_checkpoint(tmp_path / "run" / "checkpoint", CPU)
    assert loaded.pooling == report.scores.pooling
    assert loaded.pooling.follows_text
    evaluator = Evaluator(loaded.objective, loaded.codebook_VD, loaded.recipe.evaluation, seed=0)
    pooling_text = dataset.first_tokens("pooling")
    fixed = evaluator.fit_pooling(loaded.blocks, pooling_text)
    held_out = dataset.first_tokens("held_out")
    by_text, alike = (
        evaluator.score(loaded.blocks, one, held_out, euler=False).consensus.ce
        for one in (loaded.pooling, fixed)
    )
    assert by_text == pytest.approx(report.scores.consensus.ce, abs=1e-5)
    assert by_text < alike - 0.1
    # Each block knows its own kind best, and has the say where that kind is written.
    for kind in (0, 1):
        tokens = loaded.tokenizer.encode(held_out_text(kind)[:2000])
        scores = evaluator.score(loaded.blocks, loaded.pooling, tokens, euler=False)
        own, other = scores.blocks[kind].ce, scores.blocks[1 - kind].ce
        assert own < other
        assert scores.consensus.ce < own + 0.1
    model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, Pooling((0.0, 1.0)))
    assert torch.isfinite(model.next_log_probs(list(b"the block "))).all()


def test_a_simulated_swarm_trains_and_judges_specialists(dataset: Dataset) -> None:
    """The real services lend, judge and merge: no honest specialist is called harmful."""
    torch.set_num_threads(1)
    network = NETWORKS["lockstep"]
    simulation = Simulation(Scenario(recipe=recipe_of(dataset), network=network, policy="carry", judged=True))
    report = simulation.run()
    assert set(report["refused_for"]) <= {"no_gain"}, "weak evidence of few windows is no crime"
    assert report["ce"][-1]["ce"] < report["ce"][0]["ce"]
    blocks = report["ce"][-1]["block_ce"]
    assert report["final_ce"] < min(blocks)
