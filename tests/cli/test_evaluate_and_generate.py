"""`blocktrain evaluate` and `generate` on a checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import blocktrain
from tests.cli.program import Outcome, run_main, run_program


def evaluated(checkpoint: Path, text: Path, *flags: Any) -> dict[str, Any]:
    outcome = run_main("evaluate", checkpoint, "--text", text, "--json", *flags)
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = json.loads(outcome.out)
    return result


def test_every_block_and_composition_is_scored_in_three_units(checkpoint: Path, text_folder: Path) -> None:
    result = evaluated(checkpoint, text_folder / "valid.txt")
    assert result["composed"].keys() == {"euler", "consensus"}
    assert len(result["blocks"]) == 2
    for score in [*result["blocks"], *result["composed"].values()]:
        assert score["ppl"] == pytest.approx(math.exp(score["ce"]))
        assert score["bits_per_byte"] == pytest.approx(score["ce"] / math.log(2))


def test_evaluation_of_the_held_out_text_is_the_reports(
    trained: tuple[Path, Outcome], checkpoint: Path, text_folder: Path
) -> None:
    report = json.loads((trained[0] / "report.json").read_text())
    result = evaluated(checkpoint, text_folder / "valid.txt")
    assert result["composed"]["consensus"]["ce"] == report["composed"]["consensus"]["ce"]
    assert result["composed"]["euler"] == report["composed"]["euler"]
    assert [s["ce"] for s in result["blocks"]] == [s["ce"] for s in report["blocks"]]
    assert result["scored_tokens"] == report["scored_tokens"] == 1499


def test_more_noise_draws_give_another_euler_and_the_same_consensus(
    checkpoint: Path, text_folder: Path
) -> None:
    few, many = (evaluated(checkpoint, text_folder / "valid.txt", "--draws", n)["composed"] for n in (1, 3))
    assert few["consensus"] == many["consensus"]
    assert few["euler"]["se"] is None
    assert few["euler"]["ce"] != many["euler"]["ce"]


def test_without_json_a_table_is_printed(checkpoint: Path, text_folder: Path) -> None:
    outcome = run_main("evaluate", checkpoint, "--text", text_folder / "valid.txt")
    assert outcome.code == 0
    for word in ("consensus", "euler", "block 0 alone", "perplexity"):
        assert word in outcome.out


def test_two_bytes_are_enough_to_score(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_bytes(b"ab")
    assert evaluated(checkpoint, tmp_path / "two.txt")["scored_tokens"] == 1


def spoken(checkpoint: Path, prompt: str, *flags: Any) -> bytes:
    outcome = run_main("generate", checkpoint, "--prompt", prompt, *flags)
    assert outcome.code == 0, outcome.err
    return outcome.stdout


def test_the_same_seed_speaks_the_same_text(checkpoint: Path) -> None:
    first, again, other = (spoken(checkpoint, "the ", "--max-bytes", 30, "--seed", s) for s in (1, 1, 2))
    assert first == again != other
    assert first.startswith(b"the ")
    assert len(first) == 4 + 30 + 1


def test_another_process_speaks_the_same_text(checkpoint: Path) -> None:
    arguments = ("generate", checkpoint, "--prompt", "the ", "--max-bytes", 20, "--seed", 5)
    outside = run_program(*arguments)
    assert outside.code == 0, outside.err
    assert outside.stdout == run_main(*arguments).stdout


def test_text_at_temperature_zero_depends_on_no_seed(checkpoint: Path) -> None:
    greedy = ("--max-bytes", 12, "--temperature", 0)
    first, other = (spoken(checkpoint, "a", *greedy, "--seed", seed) for seed in (1, 2))
    assert first == other


@pytest.mark.parametrize(
    "prompt", ["🦙", "e\u0301\u200b\u202e", "日本語", "\x01\t\n", "x" * 500, " "], ids=ascii
)
def test_any_prompt_is_continued(checkpoint: Path, prompt: str) -> None:
    found = spoken(checkpoint, prompt, "--max-bytes", 5)
    assert found.startswith(prompt.encode())
    assert len(found) == len(prompt.encode()) + 5 + 1


def test_a_prompt_of_stray_bytes_is_continued_in_any_locale(checkpoint: Path) -> None:
    """As a shell passes on a prompt in another encoding."""
    prompt = b"caf\xe9 ".decode(errors="surrogateescape")
    outcome = run_main("generate", checkpoint, "--prompt", prompt, "--max-bytes", 5)
    assert outcome.code == 0
    assert outcome.stdout.startswith(b"caf\xe9 ")


def test_text_longer_than_the_context_goes_on(checkpoint: Path) -> None:
    assert len(spoken(checkpoint, "the ", "--max-bytes", 100)) == 105


def test_the_version_is_printed() -> None:
    assert run_main("version").out.strip() == blocktrain.__version__


def test_without_arguments_the_verbs_are_shown() -> None:
    outcome = run_main()
    for verb in ("train", "evaluate", "generate", "demo"):
        assert verb in outcome.out + outcome.err
