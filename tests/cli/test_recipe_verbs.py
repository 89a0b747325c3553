"""Recipes can be listed, shown and copied without the repository, and every key says what it means (A3)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from blocktrain.cli.recipe import all_keys
from blocktrain.cli.reference import recipe_page
from blocktrain.config import find_recipe, load_recipe, resolve_recipe, shipped_recipes
from tests.cli.program import run_main
from tests.docs.pages import ROOT


def test_the_page_of_keys_is_up_to_date() -> None:
    written = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert written == recipe_page(), "run: make docs"


def test_every_key_has_a_meaning() -> None:
    keys = all_keys()
    assert [key.dotted for key in keys[:2]] == ["name", "seed"]
    assert {"model.width", "swarm.rounds"} < {key.dotted for key in keys}
    assert [key.dotted for key in keys if not key.meaning] == []


def test_the_list_names_every_shipped_recipe_with_its_first_line() -> None:
    lines = run_main("recipe", "ls").out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    assert "A small model for two CPU cores" in next(line for line in lines if line.startswith("demo "))


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_copy_with_every_key_is_the_same_recipe_of_another_name(name: str, tmp_path: Path) -> None:
    run_main("recipe", "copy", name, "--to", tmp_path / "mine.toml", "--all")
    copied = load_recipe(tmp_path / "mine.toml", environment={})
    assert copied == load_recipe(find_recipe(name), ["name=mine"], environment={})


def test_a_plain_copy_is_the_file_with_its_comments_and_overwrites_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    told = run_main("recipe", "copy", "demo", "--to", mine)
    assert f"blocktrain train {mine} --out runs/mine" in told.out
    original = find_recipe("demo").read_text(encoding="utf-8")
    assert mine.read_text(encoding="utf-8") == original.replace('name = "demo"', 'name = "mine"')
    again = run_main("recipe", "copy", "demo", "--to", mine)
    assert (again.code, "already exists" in again.complaint) == (2, True)


def test_show_prints_what_a_run_would_take(tmp_path: Path) -> None:
    assert run_main("recipe", "show", "demo").out == find_recipe("demo").read_text(encoding="utf-8")
    changed = run_main("recipe", "show", "demo", "--set", "training.reference_other_lr=none").out
    assert "# Optimizer steps for each block, and for the reference.\nsteps = 150\n" in changed
    assert resolve_recipe(tomllib.loads(changed)).training.reference_other_lr is None
    assert "did you mean steps?" in run_main("recipe", "show", "demo", "--set", "training.step=1").complaint
