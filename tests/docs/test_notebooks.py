"""The notebooks run from top to bottom, and are kept as a reader gets them: whole and without outputs.

Their code cells run in order as one script, and not in a Jupyter kernel: they are plain Python, and a kernel
would add fifteen packages to every developer's machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Fence, Runner

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells_of(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    found: list[dict[str, Any]] = notebook["cells"]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(path: Path, runner: Runner) -> None:
    code = ["".join(cell["source"]) for cell in cells_of(path) if cell["cell_type"] == "code"]
    said = runner.run(Fence(path.name, 0, ("python",), "\n\n".join(code)))
    assert "all blocks together" in said
    assert (runner.folder / "runs" / "notebook" / "report.json").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_plain_python_without_outputs(path: Path) -> None:
    cells = cells_of(path)
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert not any(line.startswith(("%", "!")) for line in cell["source"])
