"""Bad input gets one clear sentence and exit code 2, with nothing half-written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.program import Outcome, run_main, run_program
from tests.tiny import prose

NOT_ON_THIS_MACHINE = [] if torch.cuda.is_available() else ["cuda", "cuda:0"]

BAD_FLAGS = {
    "an unknown key": ("model.widht=64", "unknown recipe key model.widht"),
    "a width the heads do not divide": ("model.width=33", "must be a multiple of twice model.heads"),
    "a noise range upside down": ("objective.sigma_min=10", "objective.sigma_min (10.0)"),
    "no equals sign": ("model.width", "expected section.key=value"),
    "no key": ("=3", "expected section.key=value"),
    "a word for a number": ("model.width=wide", "model.width must be int, found 'wide'"),
    "a number for a truth": ("training.reference=1", "training.reference must be bool"),
    "a learned codebook one block at a time": ("objective.codebook=learned", "training.order"),
    "a missing file": ("data.corpus=/no/such/file.txt", "no text at /no/such/file.txt"),
    "a dataset without the extra": ("data.corpus=hf:wikitext", ".[datasets]"),
    "a batch longer than the text": ("training.batch=21000", "fewer than one batch needs"),
    "a context longer than the text": ("model.context=21000", "fewer than one batch needs"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_a_bad_setting_is_refused(recipe_file: Path, tmp_path: Path, case: str) -> None:
    flag, complaint = BAD_FLAGS[case]
    outcome = run_main("train", recipe_file, "--out", tmp_path / "run", "--set", flag)
    assert outcome.code == 2
    assert complaint in outcome.complaint
    assert not (tmp_path / "run").exists()


BAD_TEXTS: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "is empty"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0", "is not UTF-8 text"),
    "text with a NUL": (b"abc\0def" * 100, "NUL"),
    "one byte": (b"x", "too short"),
    "less than a batch": (prose(40), "fewer than one batch needs"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_bad_text_is_refused(recipe_file: Path, tmp_path: Path, case: str) -> None:
    content, complaint = BAD_TEXTS[case]
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    flag = f"data.corpus={text}"
    outcome = run_main("train", recipe_file, "--out", tmp_path / "run", "--set", flag)
    assert outcome.code == 2
    assert complaint in outcome.complaint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", [*NOT_ON_THIS_MACHINE, "cuda:99", "toaster", "", "meta", "cpu:x", "mps:7"])
def test_a_device_that_does_not_exist_is_refused(
    recipe_file: Path, checkpoint: Path, text_folder: Path, tmp_path: Path, device: str
) -> None:
    for arguments in (
        ("train", recipe_file, "--out", tmp_path / "run"),
        ("evaluate", checkpoint, "--text", text_folder / "valid.txt"),
        ("generate", checkpoint, "--prompt", "a"),
    ):
        outcome = run_main(*arguments, "--device", device)
        assert outcome.code == 2
        assert f"device {device!r} does not exist here" in outcome.complaint
        assert "--device cpu" in outcome.complaint
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_does_not_exist_is_refused_with_the_shipped_names(tmp_path: Path) -> None:
    outcome = run_main("train", "no-such-recipe", "--out", tmp_path / "run")
    assert outcome.code == 2
    for name in ("demo", "litepaper", "wikitext-2"):
        assert name in outcome.complaint


def test_a_folder_named_like_a_recipe_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train demo --out demo` makes one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    outcome = run_main("train", "demo", "--out", "run", "--set", "model.width=33")
    assert "must be a multiple of twice" in outcome.complaint


def test_a_recipe_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[model\nwidth = 3")
    outcome = run_main("train", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "is not valid TOML" in outcome.complaint


def test_an_out_folder_already_used_is_left_alone(trained: tuple[Path, Outcome], recipe_file: Path) -> None:
    out = trained[0]
    before = {f: f.read_bytes() for f in out.rglob("*") if f.is_file()}
    outcome = run_main("train", recipe_file, "--out", out, "--set", "seed=3")
    assert outcome.code == 2
    assert "already holds a run; add --resume" in outcome.complaint
    assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before


def test_an_out_that_is_a_file_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("my thesis")
    outcome = run_main("train", recipe_file, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "is a file; choose a folder" in outcome.complaint
    assert (tmp_path / "run").read_text() == "my thesis"


def test_resuming_with_another_recipe_is_refused(trained: tuple[Path, Outcome], recipe_file: Path) -> None:
    outcome = run_main("train", recipe_file, "--out", trained[0], "--resume", "--set", "seed=4")
    assert outcome.code == 2
    assert "was started with other settings (seed)" in outcome.complaint


def test_resuming_what_is_not_there_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    outcome = run_main("train", recipe_file, "--out", tmp_path / "run", "--resume")
    assert outcome.code == 2
    assert "nothing to resume" in outcome.complaint
    assert not (tmp_path / "run").exists()


def damaged(checkpoint: Path, tmp_path: Path, how: str) -> Path:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    block = copy / "block-01.safetensors"
    if how == "missing":
        block.unlink()
    else:
        block.write_bytes(block.read_bytes()[:-1000])
    return copy


@pytest.mark.parametrize("how", ["missing", "truncated"])
@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_damaged_checkpoint_is_refused(
    checkpoint: Path, text_folder: Path, tmp_path: Path, verb: str, how: str
) -> None:
    arguments: tuple[Any, ...] = ("--prompt", "a")
    if verb == "evaluate":
        arguments = ("--text", text_folder / "valid.txt", "--json")
    outcome = run_main(verb, damaged(checkpoint, tmp_path, how), *arguments)
    assert outcome.code == 2
    assert f"block-01.safetensors is {how}" in outcome.complaint
    assert outcome.stdout == b""


def test_the_run_folder_in_place_of_its_checkpoint_gets_a_hint(trained: tuple[Path, Outcome]) -> None:
    outcome = run_main("generate", trained[0], "--prompt", "a")
    assert outcome.code == 2
    assert "did you mean its folder checkpoint/" in outcome.complaint


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "no text at"), (b"", "is empty"), (b"x", "at least 2"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_text_that_cannot_be_scored_is_refused(
    checkpoint: Path, tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    outcome = run_main("evaluate", checkpoint, "--text", text, "--json")
    assert outcome.code == 2
    assert complaint in outcome.complaint
    assert outcome.stdout == b""


def test_a_folder_in_place_of_a_text_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    outcome = run_main("evaluate", checkpoint, "--text", tmp_path)
    assert outcome.code == 2
    assert "is not a file" in outcome.complaint


def test_an_empty_prompt_is_refused(checkpoint: Path) -> None:
    outcome = run_main("generate", checkpoint, "--prompt", "")
    assert outcome.code == 2
    assert "--prompt is empty" in outcome.complaint


@pytest.mark.parametrize(
    "arguments",
    [
        ("fly",),
        ("train",),
        ("train", "demo"),
        ("train", "demo", "--out", "run", "--wings"),
        ("generate", "x", "--prompt", "a", "--max-bytes", "0"),
        ("generate", "x", "--prompt", "a", "--seed", "-1"),
        ("generate", "x", "--prompt", "a", "--top-p", "2"),
        ("evaluate", "x", "--text", "y", "--draws", "0"),
    ],
    ids=" ".join,
)
def test_a_bad_command_line_exits_with_two(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(*arguments).code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    settings = ("--set", "model.width=1048576", "--set", "model.heads=1024")
    outcome = run_main("train", "demo", "--out", tmp_path / "run", "--device", "cpu", *settings)
    assert outcome.code == 2
    assert "training one block of demo needs about" in outcome.complaint
    assert (
        "GB (a process takes at least 1.5 times what is estimated); close other programs" in outcome.complaint
    )
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_loss_that_is_not_finite_is_a_failure_and_says_so(recipe_file: Path, tmp_path: Path) -> None:
    outcome = run_main("train", recipe_file, "--out", tmp_path / "run", "--set", "training.matrix_lr=1e20")
    assert outcome.code == 1
    assert "the loss is not finite" in outcome.complaint
    assert not (tmp_path / "run" / "report.json").exists()


def test_the_demo_never_deletes_what_is_not_a_demo(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for out in (tmp_path, trained[0]):
        before = {f: f.read_bytes() for f in out.rglob("*") if f.is_file()}
        outcome = run_main("demo", "--out", out)
        assert outcome.code == 2
        assert "holds no demo" in outcome.complaint
        assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before


def test_the_real_program_exits_with_two_and_one_sentence(recipe_file: Path, tmp_path: Path) -> None:
    outcome = run_program("train", recipe_file, "--out", tmp_path / "run", "--set", "model.wings=2")
    assert outcome.code == 2
    assert outcome.stdout == b""
    assert outcome.err == outcome.complaint + "\n"
    assert "unknown recipe key model.wings" in outcome.complaint
