"""What a newcomer mistypes gets a sentence that says what was meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blocktrain.training.device import best_device
from tests.cli.program import Outcome, run_main, run_program


def plain(outcome: Outcome) -> str:
    """Without the box that Typer draws."""
    return re.sub(r"[│╭╮╰╯─\s]+", " ", outcome.err)


@pytest.mark.parametrize("device", ["gpu", "GPU", "cuda0", "nvidia"])
def test_a_device_of_another_name_gets_the_names_that_work(tmp_path: Path, device: str) -> None:
    outcome = run_main("train", "demo", "--out", tmp_path / "run", "--device", device)
    assert outcome.code == 2
    expected = "expected cpu, cuda, cuda:1, mps or auto; try --device cpu"
    assert outcome.complaint == f"blocktrain: device {device!r} does not exist here: {expected}"


def test_auto_takes_the_best_device_there_is() -> None:
    assert best_device(cuda=True, mps=False) == "cuda"
    assert best_device(cuda=False, mps=True) == "mps"
    assert best_device(cuda=False, mps=False) == "cpu"


@pytest.mark.parametrize("arguments", [(), ("--prompt", "x"), ("somewhere", "--url", "http://127.0.0.1:1")])
def test_generate_without_one_source_says_where_text_comes_from(arguments: tuple[str, ...]) -> None:
    outcome = run_main("generate", *arguments)
    assert outcome.code == 2
    assert "give either a checkpoint folder or --url" in outcome.complaint
    assert "blocktrain train demo" in outcome.complaint
    assert "blocktrain serve" in outcome.complaint


def test_a_mistyped_recipe_a_key_a_verb_and_an_option_are_guessed(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    assert "did you mean demo?" in run_main("train", "deom", *out).complaint
    key = run_main("train", "demo", *out, "--set", "model.widht=3").complaint
    assert key.endswith("did you mean width?")
    section = run_main("train", "demo", *out, "--set", "modle.width=3").complaint
    assert "did you mean model?" in section
    assert "'train'" in plain(run_main("trian", "demo", *out))
    assert "--out" in plain(run_main("train", "demo", "--ouy", tmp_path / "run"))


def test_the_list_of_verbs_has_whole_sentences() -> None:
    listed = run_main("--help").out.partition("Commands:")[2]
    assert "..." not in listed
    assert "Score a text: cross entropy of each block and of both compositions." in " ".join(listed.split())


def test_scores_are_in_nats_per_byte_everywhere(checkpoint: Path, text_folder: Path) -> None:
    told = run_main("evaluate", checkpoint, "--text", text_folder / "valid.txt").out
    assert "nats/byte" in told
    assert "nats/token" not in told


def test_certificates_that_cannot_be_used_are_told_before_a_run_is_opened(tmp_path: Path) -> None:
    start = ("coordinator", "demo", "--data-dir", tmp_path / "run", "--port", "0")
    alone = run_main(*start, "--tls-cert", tmp_path / "cert.pem")
    assert (alone.code, "--tls-cert and --tls-key go together" in alone.complaint) == (2, True)
    both = ("--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    missing = run_main(*start, *both)
    assert (missing.code, "No such file" in missing.complaint) == (2, True)
    for file in both[1::2]:
        Path(file).write_text("not PEM")
    wrong = run_main(*start, *both)
    assert (wrong.code, "expected PEM files that belong together" in wrong.complaint) == (2, True)
    assert not (tmp_path / "run").exists()


def test_serve_passes_misuse_of_a_stage_on(checkpoint: Path, tmp_path: Path) -> None:
    """A damaged checkpoint is noticed by the stage; its sentence and its code come through."""
    import shutil

    copy = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    (copy / "block-00.safetensors").write_bytes(b"damaged")
    outcome = run_program("serve", copy, "--stages", "1", "--port", "0", TMPDIR=str(tmp_path))
    assert outcome.code == 2
    assert outcome.complaint.startswith("blocktrain: stage 0 (blocks 0,1): ")
    assert "block-00.safetensors is truncated" in outcome.complaint
    assert list(tmp_path.iterdir()) == [copy], "no log that nobody is pointed to"
