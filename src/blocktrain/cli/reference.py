"""docs/cli.md from the verbs' own signatures, docs/recipe.md from the recipe's keys; `make docs` writes both.

Verbs are read from signatures and not from `--help`, whose layout depends on the terminal and on Typer's
version; a test holds both against each other.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from blocktrain.cli.main import app
from blocktrain.cli.recipe import all_keys, as_toml
from blocktrain.config import CHANGEABLE

OPENING = """# Command line

Every verb with its arguments and options, made by `make docs`; a test holds it against the
program. Results go to stdout, progress and errors to stderr. Exit code 0: done;
1: failure; 2: misuse (a bad recipe, path, flag or input); 130: stopped by Ctrl-C.
"""
RECIPE_OPENING = """# Recipe keys

A recipe is one TOML file that describes a run. `blocktrain recipe ls` lists those that come with the program;
`blocktrain recipe copy demo --to mine.toml --all` writes one with every key, its value and its meaning, to be
changed. Unknown keys are errors. Precedence: file, then `BLOCKTRAIN_<SECTION>_<KEY>` (such as
`BLOCKTRAIN_TRAINING_STEPS`; also `BLOCKTRAIN_SEED`), then `--set section.key=value`. Where "none" is allowed,
a file says `"none"`, with quotes. Keys with a ● may change when a coordinator is started again on its run
([host.md](host.md#change-a-run)).

This page is made from `config.py` by `make docs`; a test holds it against the program.
"""
TYPE_WORDS = {int: "number", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True)
class Parameter:
    name: str
    """As it is typed: `--out`, or `RECIPE` for an argument."""
    value: str
    """What it takes; empty for a flag."""
    default: str
    help: str
    required: bool

    @property
    def is_option(self) -> bool:
        return self.name.startswith("--")


@dataclass(frozen=True)
class Verb:
    name: str
    help: str
    parameters: tuple[Parameter, ...]

    @property
    def usage(self) -> str:
        arguments = [one for one in self.parameters if not one.is_option]
        needed = [f"{one.name} {one.value}" for one in self.parameters if one.is_option and one.required]
        named = [one.name if one.required else f"[{one.name}]" for one in arguments]
        rest = [] if all(one.required for one in self.parameters) else ["[options]"]
        return " ".join(["blocktrain", self.name, *named, *needed, *rest])


def all_verbs() -> list[Verb]:
    return [verb_of(*named) for named in _commands(app, "")]


def _commands(typer_app: typer.Typer, prefix: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in typer_app.registered_commands:
        assert command.callback is not None
        yield prefix + (command.name or command.callback.__name__), command.callback
    for group in typer_app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, f"{prefix}{group.name} ")


def verb_of(name: str, callback: Callable[..., Any]) -> Verb:
    hints = typing.get_type_hints(callback, include_extras=True)
    signature = inspect.signature(callback).parameters
    parameters = (_parameter(key, hints[key], signature[key].default) for key in signature)
    return Verb(name, inspect.cleandoc(callback.__doc__ or ""), tuple(parameters))


def _parameter(key: str, hint: Any, default: Any) -> Parameter:
    kind, *notes = typing.get_args(hint)
    info = next(note for note in notes if isinstance(note, (OptionInfo, ArgumentInfo)))
    dashed = key.strip("_").replace("_", "-")
    if isinstance(info, ArgumentInfo):
        name = dashed.upper()
    else:
        # Inside Annotated, Typer keeps the first of the given names where a default would stand.
        given = (info.default, *(info.param_decls or ()))
        name = next((one for one in given if isinstance(one, str) and one.startswith("--")), f"--{dashed}")
    required = default is inspect.Parameter.empty
    told = (info.help or "") + (f" (or the variable {info.envvar})" if info.envvar else "")
    return Parameter(name, _value(kind, info), _default(default), told, required)


def _value(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    if kind is bool:
        return ""
    if info.metavar:
        return info.metavar
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return TYPE_WORDS[kind]


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is None or value is False or value in ([], ""):
        return ""
    return str(value.value if isinstance(value, enum.Enum) else value)


def reference() -> str:
    lines = [OPENING]
    for verb in all_verbs():
        lines += [f"## {verb.name}", "", "```text", verb.usage, "```", "", verb.help]
        if verb.parameters:
            lines += ["", "| | takes | default | |", "|---|---|---|---|"]
            lines += [_row(parameter) for parameter in verb.parameters]
        lines.append("")
    return "\n".join(lines)


def _row(parameter: Parameter) -> str:
    default = "required" if parameter.required else f"`{parameter.default}`" if parameter.default else ""
    value = f"`{parameter.value}`" if parameter.value else ""
    cells = (f"`{parameter.name}`", value, default, parameter.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def recipe_page() -> str:
    lines, section = [RECIPE_OPENING.rstrip("\n")], None
    for key in all_keys():
        if key.section != section:
            section = key.section
            title = f"`[{section}]`" if section else "The run"
            lines += ["", f"## {title}", "", "| key | takes | default | |", "|---|---|---|---|"]
        default = "none" if key.default is None else f"`{as_toml(key.default)}`"
        mark = " ●" if key.dotted in CHANGEABLE else ""
        cells = (f"`{key.name}`{mark}", key.takes, default, key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(recipe_page() if sys.argv[1:] == ["recipe"] else reference(), end="")
