"""Every file and function that the contributors' documents name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "src" / "blocktrain"
MOST_FILES = 4


def functions_of(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{member.name}" for member in members}
    return found


def test_every_function_that_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z0-9_/]+\.py):([A-Za-z0-9_.]+)`", text)
    assert len(named) > 50
    missing = [
        f"{path}:{name}"
        for path, name in named
        if not (PACKAGE / path).exists() or name not in functions_of(PACKAGE / path)
    ]
    assert not missing


def test_every_finding_of_the_field_names_a_test_that_exists() -> None:
    """Or says why there is none. A bare file name is in the folder of the one before it."""
    text = (ROOT / "docs" / "decisions" / "0015-field-findings.md").read_text(encoding="utf-8")
    findings = text[text.index("## Part 1") : text.index("## The whole way")]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in findings.splitlines() if line.startswith("| ")]
    assert len(rows) > 60
    missing, folder = [], ROOT
    for finding, now, tests in rows:
        named = re.findall(r"[\w/.]+", tests)
        if not named and not re.search("not done|README says", now):
            missing.append(f"{finding.strip()}: no test, and no reason")
        for name in named if tests.strip() != "test" else []:
            path = ROOT / name if "/" in name else folder / name
            folder = path.parent
            if not path.exists():
                missing.append(f"{finding.strip()}: {name}")
    assert missing == []


def test_every_path_that_contributing_names_exists_and_a_change_names_at_most_four() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|docs|tests|benchmarks)/[\w/.]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    rows = [line for line in text.splitlines() if line.startswith("|") and "`" in line]
    assert len(rows) == 12
    assert [row for row in rows if row.count("`src/") + row.count("`docs/") > MOST_FILES] == []
