"""What a program can come to run is found by names, and what it really runs is among it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import reach
import reports
import torch
import tune

ROOT = Path(__file__).parents[2]
TINY = (
    *("model.width=32", "model.heads=2", "model.layers_per_block=1", "model.context=16"),
    *("training.steps=2", "training.batch=2", "training.compile=false"),
    *("evaluation.max_bytes=512", "evaluation.pooling_bytes=512"),
)


def committed(root: Path, files: dict[str, str]) -> str:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.check_output(["git", "-C", str(root), *identity, *words], text=True).strip()

    if not (root / ".git").exists():
        git("init", "-q")
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git("add", "."), git("commit", "-qm", "x", "--allow-empty")
    return git("rev-parse", "HEAD")


MAIN = """
import torch
from blocktrain.shapes import Square
def main():
    return measure(Square(2), {})
def measure(shape, options: "Unused"):
    return shape.area()
def nobody():
    return Unused()
"""
SHAPES = """
from torch import nn
SCALE = 1
OTHER = 2
class Shape:
    def area(self): return 0
class Square(Shape):
    def __init__(self, side): self.side = side
    def area(self): return SCALE * self.side ** 2
    def edge(self): return OTHER
class Unused:
    def area(self): return 7
class Net(nn.Module):
    def forward(self): return 1
"""


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("SCALE = 1", "SCALE = 3", ["SCALE"]),
        ("SCALE * self.side", "self.side", ["SCALE", "Square.area"]),
        ("return 0", "return 5", ["Shape.area"]),
        ("OTHER = 2", "OTHER = 3", []),
        ("return 7", "return 8", []),
        ("return OTHER", "return SCALE", []),
        ("def area(self): return SCALE", 'def area(self) -> int:\n        "Said."\n        return SCALE', []),
    ],
)
def test_only_a_change_of_what_is_reached_counts(
    tmp_path: Path, before: str, after: str, changed: list[str]
) -> None:
    files = {"benchmarks/main.py": MAIN, "src/blocktrain/shapes.py": SHAPES}
    trees = [reach.Tree(committed(tmp_path, files), tmp_path)]
    files["src/blocktrain/shapes.py"] = SHAPES.replace(before, after)
    trees.append(reach.Tree(committed(tmp_path, files), tmp_path))
    first, second = (tree.reached(["benchmarks/main.py"]) for tree in trees)
    assert reach.changed(first, second, ["src"]) == changed
    assert reach.changed(first, second, ["recipes"]) == []


def test_a_definition_that_moves_to_another_file_is_the_same(tmp_path: Path) -> None:
    files = {"benchmarks/main.py": MAIN, "src/blocktrain/shapes.py": SHAPES}
    first = reach.Tree(committed(tmp_path, files), tmp_path)
    files = {
        "src/blocktrain/squares.py": SHAPES,
        "src/blocktrain/shapes.py": "from blocktrain.squares import Square\n",
    }
    second = reach.Tree(committed(tmp_path, files), tmp_path)
    entries = ["benchmarks/main.py"]
    assert ("src/blocktrain/squares.py", "Square.area") in second.reached(entries)
    assert reach.changed(first.reached(entries), second.reached(entries), ["src"]) == []


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("area", "area", []),
        # What changes together with the name still shows.
        ("SCALE * self.side", "SCALE + self.side", ["Square.area"]),
        ("(Shape)", "", ["Shape", "Shape.area", "Square", "Square.__init__", "Square.area"]),
    ],
)
def test_a_class_of_another_name_is_the_same(
    tmp_path: Path, before: str, after: str, changed: list[str]
) -> None:
    files = {"benchmarks/main.py": MAIN, "src/blocktrain/shapes.py": SHAPES}
    first = reach.Tree(committed(tmp_path, files), tmp_path)
    files["benchmarks/main.py"] = MAIN.replace("Square", "Quad")
    files["src/blocktrain/shapes.py"] = SHAPES.replace(before, after).replace("Square", "Quad")
    second = reach.Tree(committed(tmp_path, files), tmp_path)
    old, new = (tree.reached(["benchmarks/main.py"]) for tree in (first, second))
    found = reach.changed(old, new, ["src", "benchmarks"])
    # Of other bases it is another class, and `main`, which makes one, is another too.
    assert {name.replace("Quad", "Square") for name in found} - {"main"} == set(changed)
    assert ("main" in found) == ("Square" in changed)


def test_what_a_training_calls_is_among_what_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(2000)))
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and "/src/blocktrain/" in code.co_filename:
            called.add((code.co_filename, code.co_qualname.partition(".<")[0]))

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    importlib.import_module(
        "torch._dynamo"
    )  # 800 modules, which would be slow to import while every call is noted
    sys.setprofile(note)
    try:
        tune.run_trial("demo", (*TINY, f"data.corpus={text}"), "cpu", tune.Trial("block", 1e-3, 1e-3))
    finally:
        sys.setprofile(None)
    found = reach.reached("HEAD", ("benchmarks/tune.py",))
    relevant = [(str(Path(file).resolve().relative_to(ROOT)), name) for file, name in called]
    # `TRAINING` leaves these out: no loss may come to run what writes text.
    writing = ("caches", "generation", "graphs", "packed", "quick", "sampling")
    of_text = {f"src/blocktrain/model/{name}.py" for name in writing}
    assert all((ROOT / file).exists() for file in of_text)
    assert [key for key in relevant if key[0] in of_text and not key[1].startswith("<")] == []
    relevant = [key for key in relevant if any(key[0].startswith(path) for path in reports.TRAINING)]
    assert len(relevant) > 60
    assert [key for key in relevant if key not in found and not key[1].startswith("<")] == []
