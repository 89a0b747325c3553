"""`blocktrain recipe ls|show|copy`, and what they and docs/recipe.md know of every key.

The meaning of a key is the string under its field in config.py. Python forgets such strings, so the source is
parsed for them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import types
import typing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blocktrain.cli.options import RecipeArgument, SetOption
from blocktrain.config import Recipe, find_recipe, load_recipe, shipped_recipes
from blocktrain.errors import StorageError, UserError
from blocktrain.files import write_whole

TYPE_WORDS = {int: "integer", float: "number", str: "text", bool: "true, false"}
WIDTH = 100

AllOption = Annotated[
    bool, typer.Option("--all", help="Every key with its value here and its meaning, also what is default.")
]

recipe_verbs = typer.Typer(help="List, show and copy recipes.", no_args_is_help=True)


@recipe_verbs.command("ls")
def list_recipes() -> None:
    """The recipes that come with the program, with the first sentence of each."""
    found = shipped_recipes()
    width = max(map(len, found))
    for name, path in found.items():
        comments = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        opening = " ".join(line.removeprefix("# ") for line in comments)
        typer.echo(f"{name:<{width}}  {opening.partition('. ')[0].rstrip('.')}")


@recipe_verbs.command("show")
def show_recipe(recipe: RecipeArgument, all_: AllOption = False, set_: SetOption = []) -> None:  # noqa: B006
    """Print a recipe; with `--all` or `--set`, as a run would take it, BLOCKTRAIN_* variables included."""
    typer.echo(_text(recipe, all_, set_), nl=False)


@recipe_verbs.command("copy")
def copy_recipe(
    recipe: RecipeArgument,
    to: Annotated[Path, typer.Option("--to", help="File to write; must be new.")],
    all_: AllOption = False,
    set_: SetOption = [],  # noqa: B006
) -> None:
    """Write a recipe to a file of yours, under the file's name, to be changed and used like a shipped one."""
    if to.exists():
        raise UserError(f"{to} already exists; choose another name, or remove it")
    try:
        # Under its own name: a page that calls a changed run "demo" would say something else than it is.
        name = f"name = {as_toml(to.stem)}"
        write_whole(
            to, re.sub(r"(?m)^name = .*$", lambda _: name, _text(recipe, all_, set_), count=1).encode()
        )
    except OSError as error:
        raise StorageError(f"cannot write {to}: {error.strerror}; choose another place") from None
    typer.echo(f"wrote {to}; docs/recipe.md has every key\nblocktrain train {to} --out runs/{to.stem}")


def _text(recipe: str, whole: bool, overrides: list[str]) -> str:
    path = find_recipe(recipe)
    resolved = load_recipe(path, overrides)  # a broken file is told here, and not by the next verb
    return written_out(resolved) if whole or overrides else path.read_text(encoding="utf-8")


# --- every key


@dataclass(frozen=True)
class Key:
    section: str
    """Empty for keys of the whole recipe."""
    name: str
    takes: str
    default: Any
    meaning: str

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


def all_keys() -> list[Key]:
    """Those of the whole recipe first, then section by section."""
    hints = typing.get_type_hints(Recipe)
    sections = {name: hint for name, hint in hints.items() if name not in ("name", "seed")}
    keys = [key for key in _keys("", Recipe) if key.name not in sections]
    return keys + [key for name, kind in sections.items() for key in _keys(name, kind)]


def _keys(section: str, kind: type[Any]) -> list[Key]:
    hints, meanings = typing.get_type_hints(kind), _meanings(kind)
    return [
        Key(section, field.name, _takes(hints[field.name]), field.default, meanings.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]


def _meanings(kind: type[Any]) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _takes(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "a section"
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return ", ".join("none" if arm is type(None) else _takes(arm) for arm in typing.get_args(hint))
    return "list of integers" if typing.get_origin(hint) is tuple else TYPE_WORDS[hint]


def as_toml(value: Any) -> str:
    """One value: JSON's numbers, booleans and strings are TOML's, which has no null."""
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def written_out(recipe: Recipe) -> str:
    """A recipe as TOML with every key, the meaning above it."""
    values, lines, section = recipe.to_dict(), list[str](), ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            lines.append(f"\n[{section}]")
        value = values[section][key.name] if section else values[key.name]
        lines += textwrap.wrap(key.meaning, WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"{key.name} = {as_toml(value)}")
    return "\n".join(lines) + "\n"
