"""A recipe becomes parts in one place, and the same parts for everybody."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blocktrain
from blocktrain.errors import RecipeError
from blocktrain.training.setup import Setup, with_swarm_schedule
from tests.coordinator.conftest import tiny_recipe

SOURCE = Path(blocktrain.__file__).parent
PARTS = {"Objective", "build_codebook"}
"""What a recipe is turned into; calling one of these elsewhere is a second opinion of what a recipe means."""
MAKERS = {"training/setup.py", "training/inner.py", "training/memory.py"}
"""The last builds blocks without values, to count them."""


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
            if node.func.id == "derive_seed" and ast.unparse(node.args[0]) == "'init'":
                yield "derive_seed('init')"


def test_no_module_but_the_setup_turns_a_recipe_into_parts() -> None:
    found = {
        f"{path.relative_to(SOURCE).as_posix()}: {name}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).as_posix() not in MAKERS
        for name in calls(path)
        if name in PARTS | {"derive_seed('init')"}
    }
    assert not found


def test_the_same_recipe_gives_the_same_first_weights_and_codebook() -> None:
    one, other = Setup.of(tiny_recipe()), Setup.of(tiny_recipe())
    assert torch.equal(one.codebook()(), other.codebook()())
    for name, tensor in one.initial(1).state_dict().items():
        assert torch.equal(tensor, other.initial(1).state_dict()[name])


def test_a_swarm_refuses_a_codebook_that_blocks_would_share() -> None:
    recipe = tiny_recipe()
    learned = replace(
        recipe,
        objective=replace(recipe.objective, codebook="learned"),
        training=replace(recipe.training, order="turns"),
    )
    Setup.of(learned)
    with pytest.raises(RecipeError, match='codebook = "fixed" or "own", found \'learned\''):
        Setup.of_swarm(learned)
    own = replace(recipe.objective, codebook="own", hint_probability=0.0)
    assert "output_VD" in Setup.of_swarm(replace(recipe, objective=own)).initial(0).state_dict()
    with pytest.raises(RecipeError, match="hint_probability = 0"):
        replace(recipe.objective, codebook="own", hint_probability=0.5)


def test_a_swarm_s_schedule_is_as_long_as_its_rounds() -> None:
    recipe = tiny_recipe(steps_per_round=3, rounds=7)
    assert with_swarm_schedule(recipe).training.steps == 21
    assert with_swarm_schedule(recipe).swarm == recipe.swarm
