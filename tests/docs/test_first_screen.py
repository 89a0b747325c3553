"""README's first screen stays readable: caveats belong to its Results and to docs/experiments.md."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

MOST_WORDS, MOST_NUMBERS = 240, 4

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_stands_before_the_first_command_is_short_and_has_few_numbers() -> None:
    prose = re.sub(r"\]\([^)]*\)", "]", README[: README.index("```")])
    assert len(prose.split()) <= MOST_WORDS
    assert len(re.findall(r"\d+\.\d+", prose)) <= MOST_NUMBERS


def test_every_section_comes_in_the_order_of_a_reader_s_questions() -> None:
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert headings == [
        "How it works", "One machine", "Many machines", "Serve it", "Results", "Limits", "What is where",
    ]  # fmt: skip
