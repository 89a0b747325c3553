"""Nothing in the package runs what it reads: no pickle, no eval, no shell. The linter says so too."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "code",
    "codeop",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "np.load",
    "numpy.load", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
TEXT = (ast.JoinedStr, ast.BinOp)


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def is_text(node: ast.expr) -> bool:
    return isinstance(node, TEXT) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for name in imported(node):
            if name.split(".")[0] in MODULES or name in CALLS:
                yield f"imports {name}"
        if isinstance(node, ast.Call):
            yield from dangers_of_call(node, dotted(node.func))


def dangers_of_call(node: ast.Call, name: str) -> Iterator[str]:
    if name in BUILTINS or name in CALLS:
        yield f"calls {name}"
    if any(one.arg == "shell" for one in node.keywords):
        yield f"passes shell= to {name}"
    if any(one.arg == "allow_pickle" for one in node.keywords):
        yield f"passes allow_pickle= to {name}"
    if name.startswith("subprocess.") and node.args and is_text(node.args[0]):
        yield f"gives {name} a string instead of a list"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path)",
        "eval(text)",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(words, shell=True)",
        "subprocess.run('ls ' + path)",
        "subprocess.Popen(f'ls {path}')",
        "os.system(text)",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(dangers(source))


def test_a_method_called_eval_and_a_list_for_subprocess_are_no_danger() -> None:
    assert not list(dangers("block.eval(); subprocess.run([program, argument])"))


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert len(files) > 100
    found = [f"{path.relative_to(ROOT)} {danger}" for path in files for danger in dangers(path.read_text())]
    assert found == []


def test_the_linter_forbids_it_too() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert {"S102", "S301", "S302", "S307", "S602", "S604", "S605", "TID251"} <= set(lint["select"])
    banned = lint["flake8-tidy-imports"]["banned-api"]
    assert {"torch.load", "numpy.load", "pickle", "os.system"} <= set(banned)
    assert all(pattern.startswith("tests/") for pattern in lint["per-file-ignores"])
