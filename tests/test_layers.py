"""The import layers of architecture.md hold: nothing imports upward, nothing in a circle."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "blocktrain"

LAYERS = (
    ("errors", "ids", "codec_spec", "config", "connections")
    + ("files", "listening", "starting", "threads", "wording"),
    ("model",),
    ("data",),
    ("wire",),
    ("training",),
    ("validation",),
    ("client",),
    ("coordinator", "worker", "serving"),
    ("simulation",),
    ("judge", "tracking", "doctor", "planning"),
    ("local",),
    ("api",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. The modules of the first line may use one another; the services never do."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TENSORS_ONLY = {"torch", "numpy", "safetensors"}
OPTIONAL = {
    "data.corpora": {"datasets"},
    "data.bpe": {"tokenizers"},
    "data.sources": {"datasets", "pyarrow", "zstandard"},
    "data.prepare": {"huggingface_hub"},
    "model.quick_kernel": {"llvmlite", "numba"},
}
MAY_USE_WIRE = {"training.merge", "training.snapshot", "training.update"}
OUTSIDE_WORLD = {"socket", "ssl", "http", "urllib", "asyncio", "pathlib", "os", "io", "time", "datetime"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(source: str, name: str, *, is_package: bool) -> set[str]:
    """Absolute dotted names of everything a module imports, at its top or inside a function.

    Each `from x import y` gives x and x.y, since y may be a module.
    """
    package = ["blocktrain", *(name.split(".") if name else [])]
    if not is_package:
        package = package[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return found


@cache
def imports_of(name: str) -> set[str]:
    path = modules()[name]
    return imported_names(path.read_text(encoding="utf-8"), name, is_package=path.name == "__init__.py")


def own_imports(name: str) -> set[str]:
    """The modules of this project that a module imports, without the project's root."""
    known = modules()
    found = {i.removeprefix("blocktrain.") for i in imports_of(name) if i.startswith("blocktrain.")}
    return {i for i in found if i in known and i != name}


def foreign_imports(name: str) -> set[str]:
    return {i.split(".")[0] for i in imports_of(name)} - {"blocktrain"}


def may_import(importer: str, imported: str) -> bool:
    own, other = importer.split(".")[0], imported.split(".")[0]
    if own == other:
        return True
    if RANK[own] == RANK[other]:
        return RANK[own] == 0
    return RANK[other] < RANK[own]


def test_every_package_has_its_place_in_the_layers() -> None:
    assert {name.split(".")[0] for name in modules() if name} <= RANK.keys()


def test_nothing_imports_a_layer_above_its_own() -> None:
    upward = [
        f"{name} imports {target}"
        for name in modules()
        if name
        for target in sorted(own_imports(name))
        if not may_import(name, target)
    ]
    assert not upward


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter({name: own_imports(name) for name in modules()}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", ["model", "data", "training"])
def test_training_machines_need_torch_numpy_and_safetensors_alone(package: str) -> None:
    surplus = {
        name: sorted(extra)
        for name in modules()
        if name.split(".")[0] == package
        if (
            extra := foreign_imports(name)
            - TENSORS_ONLY
            - sys.stdlib_module_names
            - OPTIONAL.get(name, set())
        )
    }
    assert not surplus


def test_of_training_only_what_makes_and_merges_updates_uses_wire() -> None:
    using = {
        name
        for name in modules()
        if name.startswith("training") and any(i.split(".")[0] == "wire" for i in own_imports(name))
    }
    assert using <= MAY_USE_WIRE


def test_the_model_knows_no_files_sockets_or_clock() -> None:
    found = {name: foreign_imports(name) & OUTSIDE_WORLD for name in modules() if name.startswith("model")}
    assert not {name: names for name, names in found.items() if names}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("model.block", "training.inner"),
        ("data.shards", "wire.codec"),
        ("coordinator.http.app", "worker.loop"),
        ("serving.gateway.app", "coordinator.http.app"),
        ("training.local", "cli.train"),
        ("local.swarm", "cli.options"),
        ("tracking.trackers", "doctor.findings"),
        ("client.snapshots", "worker.program"),
    ],
)
def test_an_upward_or_sideways_import_would_be_noticed(importer: str, imported: str) -> None:
    assert not may_import(importer, imported)


def test_imports_are_seen_in_every_spelling() -> None:
    source = "import a.b\nfrom blocktrain import cli\nfrom . import inner\n"
    source += "def f():\n    from ..wire import codec\n"
    found = imported_names(source, "training.local", is_package=False)
    assert {
        "a.b",
        "blocktrain.cli",
        "blocktrain.training.inner",
        "blocktrain.wire.codec",
    } <= found
