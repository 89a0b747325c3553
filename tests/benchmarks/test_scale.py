"""The pages on plans repeat what the program says today; those of scale.md in every column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scale

from blocktrain.planning.cut import plan_run, recipe_of_size
from tests.cli.program import run_main

DOCS = Path(__file__).parents[2] / "docs"
NAMED = {
    "memory of a worker": "memory_gb",
    "round (`sparse:64`)": "round_seconds",
    "steps of a round": "steps_per_round",
    "batch of a machine, sequences of 2,048": "batch",
    "tokens that each block reads a day": "block_tokens_per_day_billions",
    "tokens a day, all blocks": "tokens_per_day_billions",
    "days until each block has read 20 tokens per parameter of the model": "days",
    "days until each block has read 20 tokens per parameter of the block": "days_per_block_parameter",
    "egress of the object store in all": "egress_tb",
    "coordinator: cores for merging": "merge_cores",
    "merge, on two cores": "merge_seconds",
    "machines, dollars": "machine_dollars",
    "judges, dollars": "judge_dollars",
    "egress, dollars at 0.09 a GB": "egress_dollars",
}


@pytest.mark.parametrize("column", range(len(scale.CASES)))
def test_the_table_of_scale_is_what_its_program_prints(column: int) -> None:
    case = scale.CASES[column]
    recipe = recipe_of_size(case.billions * 1e9, scale.VOCABULARY)
    found = scale.row(case, plan_run(recipe, [case.group], scale.VOCABULARY))
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells[2:7] for line in page.splitlines() if len(cells := line.split("|")) > 6}
    for name, key in NAMED.items():
        written = float(re.findall(r"[\d.,]+", rows[name][column])[0].replace(",", ""))
        assert written == pytest.approx(found[key], rel=0.03), name


def test_the_plan_of_the_page_is_what_the_verb_prints() -> None:
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    command = re.search(r"^blocktrain plan (one-billion) --machine '(.*)'$", page, re.MULTILINE)
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert shown is not None
    printed = run_main("plan", command[1], "--machine", command[2])
    assert shown[1].split() == printed.out.split()
