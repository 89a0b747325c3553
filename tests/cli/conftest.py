from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import Outcome, run_main
from tests.tiny import RECIPE


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    """The tiny recipe as a TOML file, on the folder of text."""
    lines = ['name = "tiny"']
    sections = {**RECIPE, "data": {"corpus": str(text_folder)}}
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text("\n".join(line for line in lines if "max_bytes" not in line))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, recipe_file: Path) -> tuple[Path, Outcome]:
    """The folder of a finished run, and what the program said."""
    out = tmp_path_factory.mktemp("trained") / "run"
    outcome = run_main("train", recipe_file, "--out", out, "--device", "cpu", "--set", "seed=3")
    assert outcome.code == 0, outcome.err
    return out, outcome


@pytest.fixture(scope="session")
def checkpoint(trained: tuple[Path, Outcome]) -> Path:
    return trained[0] / "checkpoint"
