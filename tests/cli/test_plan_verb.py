"""`blocktrain plan` prints a plan for options, files and runs, and refuses what it cannot plan for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import run_main
from tests.cli.servers import coordinator_at
from tests.tiny import tiny_recipe

SMALL = ("demo", "--machine", "4x device=cpu memory_gb=8 tflops=0.1 up_mbit=30")


def test_a_plan_is_printed_with_its_reasons_and_as_json() -> None:
    shown = run_main("plan", *SMALL)
    assert shown.code == 0, shown.err
    assert "tokens a day" in shown.out
    assert "the fewest for 80% of all speed" in shown.out
    written = json.loads(run_main("plan", *SMALL, "--json").out)
    assert written["workers"] == 4
    settings = [f"--set {key}={str(value).lower()}" for key, value in written["settings"].items()]
    assert " ".join(settings) in shown.out
    assert written["tokens_per_day"] > 0


def test_what_is_set_stays() -> None:
    flags = ("--set", "model.blocks=2", "--set", "swarm.codec=dense")
    written = json.loads(run_main("plan", *SMALL, *flags, "--json").out)
    assert written["settings"]["model.blocks"] == 2
    # The same layers in another cut, and not another model.
    assert written["settings"]["model.layers_per_block"] == LAYERS // 2
    assert written["settings"]["swarm.codec"] == "dense"
    assert len(written["cuts"]) == 1


def test_a_run_without_workers_that_have_delivered_needs_other_machines(tmp_path: Path) -> None:
    with coordinator_at(tmp_path, tiny_recipe()) as url:
        refused = run_main("plan", "--coordinator", url)
        planned = run_main("plan", "--coordinator", url, "--machine", "t4", "--json")
    assert refused.code == 2
    assert "nobody whose speed is known is at work at" in refused.complaint
    assert json.loads(planned.out)["workers"] == 1


LAYERS = 6
"""Of the demo."""

BAD_COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (("--machine", "t4"), "give a recipe, --parameters such as 7B, or --coordinator"),
    "two models": (("demo", "--parameters", "7B"), "give a recipe or --parameters, not both"),
    "no machines": (("demo",), "no machines to plan for"),
    "a size in words": (("--parameters", "big", "--machine", "t4"), "expected a number with M, B or T"),
    "a size too small": (("--parameters", "1M", "--machine", "t4"), "between 10M and 10T"),
    "an unknown device": (("demo", "--machine", "8x abacus"), "memory_gb is missing"),
    "no such file": (("demo", "--machines", "none.toml"), "cannot read machines"),
    "no such recipe": (("dmeo", "--machine", "t4"), "did you mean demo?"),
    "a cut that leaves layers over": ((*SMALL, "--set", "model.blocks=5"), "does not divide the"),
    "too small a device": (("one-billion", "--machine", "t4 memory_gb=0.5"), "use larger devices"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_a_bad_command_is_refused(case: str) -> None:
    arguments, complaint = BAD_COMMANDS[case]
    outcome = run_main("plan", *arguments)
    assert outcome.code == 2
    assert complaint in outcome.complaint
