"""docs/cli.md is what the program says of itself, and `--help` of every verb agrees with it."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.cli.reference import Verb, all_verbs, reference
from tests.docs.pages import ROOT

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def test_the_reference_is_up_to_date() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == reference(), "run: python -m blocktrain.cli.reference > docs/cli.md"


def test_every_verb_and_option_says_what_it_is_for() -> None:
    silent = [
        f"{verb.name} {parameter.name}"
        for verb in all_verbs()
        for parameter in verb.parameters
        if not parameter.help
    ]
    assert not silent
    assert all(verb.help for verb in all_verbs())


@pytest.mark.parametrize("verb", all_verbs(), ids=lambda verb: verb.name)
def test_help_and_reference_name_the_same_options(verb: Verb) -> None:
    shown = CliRunner().invoke(app, [*verb.name.split(), "--help"], env=WIDE, terminal_width=200)
    assert shown.exit_code == 0, shown.output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.output)
    # Options stand at the start of their line, behind the box and perhaps a star for required ones.
    listed = set(re.findall(r"^\W*?\*?\s*(--[a-z][a-z-]*)", plain, re.MULTILINE))
    assert listed - {"--help"} == {one.name for one in verb.parameters if one.is_option}


def test_the_program_s_help_lists_every_verb() -> None:
    shown = CliRunner().invoke(app, ["--help"], env=WIDE, terminal_width=200)
    for verb in all_verbs():
        assert re.search(rf"\b{verb.name.split()[0]}\b", shown.output)
