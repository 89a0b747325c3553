"""No function in src/ is longer than a screen, unless it is named here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "blocktrain"
SCREEN_LINES = 60
LONGER = {
    "coordinator/migrations/versions/0001_the_coordinator_s_first_tables.py:upgrade": (
        "one statement per table, in the order they must be made"
    ),
}


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Every function, methods and nested ones too, with its lines from `def` to its end."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def too_long() -> dict[str, int]:
    return {
        f"{path.relative_to(SOURCE)}:{name}": lines
        for path in sorted(SOURCE.rglob("*.py"))
        for name, lines in functions(path.read_text(encoding="utf-8"))
        if lines > SCREEN_LINES
    }


def test_every_function_is_seen_whole_on_a_screen() -> None:
    found = too_long()
    assert not {name: lines for name, lines in found.items() if name not in LONGER}


def test_exceptions_are_still_needed_and_have_a_reason() -> None:
    assert LONGER.keys() <= too_long().keys()
    assert all(LONGER.values())


def test_a_long_method_would_be_noticed() -> None:
    body = "\n".join(f"        x = {n}" for n in range(SCREEN_LINES))
    found = dict(functions(f"class A:\n    async def run(self):\n{body}\n"))
    assert found == {"run": SCREEN_LINES + 1}
