"""Blocks of one run that differ in layers, width and heads: trained, judged, simulated, stored and moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import open_text
from blocktrain.errors import RecipeError
from blocktrain.local.terminal import step_costs
from blocktrain.model.objective import Objective
from blocktrain.simulation.networks import NETWORKS
from blocktrain.simulation.run import Scenario, Simulation
from blocktrain.tracking.model_card import model_card
from blocktrain.training.checkpoint import Description, load_checkpoint
from blocktrain.training.exchange import export_checkpoint, import_checkpoint
from blocktrain.training.hugging_face import export_folder, import_folder
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.memory import block_needs
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import tensors_of
from blocktrain.validation.scorer import Scorer, Work
from tests.tiny import prose, shaken

CPU = torch.device("cpu")
LAYERS = {"block_layers": [1, 3], "block_heads": [2, 4]}
SHAPES: dict[str, dict[str, Any]] = {
    "layers and heads": {"model": LAYERS},
    "widths": {
        "model": {"block_widths": [32, 64]},
        "objective": {"codebook": "own", "hint_probability": 0.0},
    },
    "llama": {"model": {"family": "llama", "block_widths": [32, 64], **LAYERS}},
}


def recipe_of(corpus: Path, shape: str) -> Recipe:
    sections: dict[str, Any] = {
        "model": {"width": 32, "heads": 2, "blocks": 2, "layers_per_block": 1, "context": 32},
        "data": {"corpus": str(corpus)},
        "training": {"steps": 6, "batch": 4, "warmup_steps": 2},
        "evaluation": {"max_bytes": 700, "pooling_bytes": 500, "noise_draws": 1, "sample_bytes": 20},
        "swarm": {"steps_per_round": 3, "rounds": 2, "replicas": 1},
    }
    for section, values in SHAPES[shape].items():
        sections[section] = sections.get(section, {}) | values
    return resolve_recipe(sections)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_bytes(prose(6000))
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_a_local_run_trains_each_block_in_its_own_shape(shape: str, corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, shape)
    run = LocalRun(recipe, tmp_path / "run", CPU, Silent())
    assert run.reference is not None
    assert run.reference.num_layers == sum(block.num_layers for block in run.blocks)
    run.train(resume=False)
    report = run.finish()
    assert report.scores.consensus.ce < 5.4, "below ln 256"

    loaded = load_checkpoint(tmp_path / "run" / "checkpoint", CPU)
    assert loaded.recipe == recipe
    expected = [recipe.model.of_block(index) for index in range(2)]
    assert [block.num_layers for block in loaded.blocks] == [one.layers_per_block for one in expected]
    again = LocalRun(recipe, tmp_path / "run", CPU, Silent())
    assert not again.train(resume=True), "nothing is left to train, and the recipe is the same"

    described = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())
    card = model_card(Description.of(described, tmp_path), None)
    assert ", ".join(f"{one.layers_per_block} layers of width {one.width}" for one in expected) in card
    own = export_checkpoint, import_checkpoint
    export, import_ = (export_folder, import_folder) if shape == "llama" else own
    export(tmp_path / "run" / "checkpoint", tmp_path / "out", "card")
    import_(tmp_path / "out", tmp_path / "back")
    back = load_checkpoint(tmp_path / "back", CPU)
    assert back.recipe == recipe
    for block, other in zip(loaded.blocks, back.blocks, strict=True):
        torch.testing.assert_close(block.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_what_a_block_takes_follows_its_own_shape(corpus: Path) -> None:
    recipe = recipe_of(corpus, "layers and heads")
    small, large = block_needs(recipe, Setup.of(recipe).objective)
    assert small < large
    equal = resolve_recipe(
        {**recipe.to_dict(), "model": {"width": 32, "heads": 4, "blocks": 1, "context": 32}}
    )
    assert [large] == block_needs(equal, Setup.of(equal).objective)
    assert step_costs(recipe) == {"block 0": 1, "block 1": 3, "reference": 4}
    assert step_costs(recipe_of(corpus, "widths"))["block 1"] == 4


def test_a_simulated_swarm_takes_longer_for_a_larger_block(corpus: Path) -> None:
    recipe = recipe_of(corpus, "layers and heads")
    simulation = Simulation(Scenario(recipe=recipe, network=NETWORKS["lockstep"], policy="drop"))
    simulation.run()
    # Two rounds of a minute for a block of `layers_per_block`, here one layer.
    assert [site.seconds_computing for site in simulation.sites] == pytest.approx([120, 360])


def test_blocks_with_the_same_tensors_and_other_heads_are_judged_with_their_own(corpus: Path) -> None:
    values = recipe_of(corpus, "layers and heads").to_dict()
    values["model"] |= {"block_layers": None, "block_heads": [2, 4]}
    recipe = resolve_recipe(values)
    setup = Setup.of(recipe)
    weights = tensors_of(shaken(setup.initial(0), seed=1))
    scorer = Scorer(recipe, open_text(recipe))
    moved = {name: 0.9 * one for name, one in weights.items()}
    alone = Scorer(recipe, open_text(recipe)).evidence(1, weights, moved, Work(1, 0, 3), seed=5)
    scorer.evidence(0, weights, moved, Work(0, 0, 3), seed=5)
    assert scorer.evidence(1, weights, moved, Work(1, 0, 3), seed=5) == alone


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kind": "chain"}, "must then have one width"),
        ({"kind": "serial"}, "must then have one width"),
    ],
)
def test_blocks_that_hand_on_features_have_one_width(
    corpus: Path, settings: dict[str, Any], told: str
) -> None:
    values = recipe_of(corpus, "llama" if settings["kind"] == "serial" else "widths").to_dict()
    values["objective"] |= settings
    with pytest.raises(RecipeError, match=told):
        resolve_recipe(values)


def test_drafts_come_from_the_smallest_blocks() -> None:
    from blocktrain.serving.engine.drafting import blocks_for_drafts

    model = resolve_recipe({"model": {"blocks": 4, "block_layers": [12, 3, 6, 3]}}).model
    objective = Objective(model, resolve_recipe({}).objective, vocabulary=256)
    assert blocks_for_drafts(objective, 2) == [1, 3]
    assert blocks_for_drafts(objective, 1) == [1]
