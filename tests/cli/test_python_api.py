"""`import blocktrain` for a Python program: light, typed, and the same results as the verbs (A3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import blocktrain
from blocktrain.serving.engine.local import LocalEngine
from blocktrain.serving.gateway.main import background_gateway
from tests.cli.program import Outcome, run_main
from tests.cli.servers import coordinator_at
from tests.cli.test_starting import run_python
from tests.tiny import prose, tiny_recipe

LATE = ("torch", "numpy", "httpx2", "pydantic")


def test_the_import_loads_nothing_and_the_clients_no_torch() -> None:
    script = (
        "import sys, blocktrain\n"
        f"print([name for name in {LATE!r} if name in sys.modules])\n"
        "blocktrain.GatewayClient, blocktrain.coordinator_client\nprint('torch' in sys.modules)\n"
        "from blocktrain import *\nprint(train.__module__, 'torch' in sys.modules)\n"
        "import os\nprint(os.environ['OMP_WAIT_POLICY'])"
    )
    assert run_python(script).stdout.splitlines() == ["[]", "False", "blocktrain.api True", "PASSIVE"]


def test_every_name_is_there_and_a_misspelt_one_is_not() -> None:
    assert set(blocktrain.__all__) <= set(dir(blocktrain))
    assert all(getattr(blocktrain, name) is not None for name in blocktrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        getattr(blocktrain, "tarin")  # noqa: B009


def test_a_recipe_takes_python_values_as_its_settings(tmp_path: Path) -> None:
    settings = {
        "training.steps": 7,
        "training.reference": False,
        "training.compile": None,
        "objective.overlap": 0.25,
        "data.corpus": tmp_path / "über uns.txt",
    }
    recipe = blocktrain.recipe("demo", settings)
    assert (recipe.training.steps, recipe.training.reference, recipe.training.compile) == (7, False, None)
    assert (recipe.objective.overlap, recipe.data.corpus) == (0.25, str(tmp_path / "über uns.txt"))
    with pytest.raises(blocktrain.BlocktrainError, match="did you mean steps"):
        blocktrain.recipe("demo", {"training.stepz": 7})


def test_training_from_python_gives_the_verb_s_checkpoint(
    trained: tuple[Path, Outcome],
    recipe_file: Path,
    tmp_path: Path,
) -> None:
    recipe = blocktrain.recipe(recipe_file, {"seed": 3})
    report = blocktrain.train(recipe, tmp_path / "run", device="cpu")
    by_verb = json.loads((trained[0] / "report.json").read_text())
    assert report.scores.consensus.ce == by_verb["composed"]["consensus"]["ce"]
    for path in sorted((trained[0] / "checkpoint").iterdir()):
        assert (tmp_path / "run" / "checkpoint" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(blocktrain.BlocktrainError, match="already holds a run"):
        blocktrain.train(recipe, tmp_path / "run")


def test_scores_and_text_are_those_of_the_verbs(checkpoint: Path, text_folder: Path) -> None:
    model = blocktrain.load(checkpoint, device="cpu")
    text = text_folder / "valid.txt"
    told = json.loads(run_main("evaluate", checkpoint, "--text", text, "--json", "--device", "cpu").out)
    assert blocktrain.evaluate(model, text.read_bytes()).to_dict() == told
    sampled = ("--prompt", "the ", "--max-bytes", "30", "--seed", "5", "--device", "cpu")
    written = run_main("generate", checkpoint, *sampled).stdout
    assert ("the " + blocktrain.generate(model, "the ", max_tokens=30, seed=5) + "\n").encode() == (
        written.decode(errors="replace").encode()
    )
    with pytest.raises(blocktrain.BlocktrainError, match="at least 2"):
        blocktrain.evaluate(model, "x")
    with pytest.raises(blocktrain.BlocktrainError, match="prompt is empty"):
        blocktrain.generate(model, "")


def test_text_from_a_gateway_is_the_text_from_here(checkpoint: Path) -> None:
    model = blocktrain.load(checkpoint, device="cpu")
    with (
        background_gateway(LocalEngine(checkpoint)) as url,
        blocktrain.GatewayClient(url) as gateway,
    ):
        for prompt in ("the ", "über "):
            here = blocktrain.generate(model, prompt, max_tokens=40, seed=7)
            assert blocktrain.generate(gateway, prompt, max_tokens=40, seed=7) == here
            assert "".join(blocktrain.stream(model, prompt, max_tokens=40, seed=7)) == here


def test_a_run_is_read_and_its_model_loaded_by_address(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(prose(4000))
    recipe = tiny_recipe(f"data.corpus={tmp_path / 'text.txt'}")
    said: list[str] = []
    with coordinator_at(tmp_path / "run", recipe) as url:
        with blocktrain.coordinator_client(url) as run:
            assert run.status().rounds == recipe.swarm.rounds
        model = blocktrain.load(url, device="cpu", tell=said.append)
    assert len(model.blocks) == recipe.model.blocks
    assert "rounds 0, 0 of" in said[0]
