"""`blocktrain train`: what it writes, what it says, and what survives a kill."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from blocktrain.config import resolve_recipe
from blocktrain.training.checkpoint import load_checkpoint
from tests.cli.program import Outcome, run_main
from tests.forked import start_blocktrain
from tests.waiting import until

REPORT_KEYS = {
    "reference.ce",
    "blocks.0.ce",
    "blocks.1.ce",
    "composed.euler.ce",
    "composed.euler.se",
    "composed.consensus.ce",
    "gap",
    "bigram.ce",
    "tokens.per_block",
    "tokens.reference",
    "parameters.blocks",
    "parameters.reference",
    "flops.blocks",
    "flops.reference",
    "peak_memory_bytes.block",
    "peak_memory_bytes.reference",
    "seed",
}


def at(value: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def weights_of(out: Path) -> dict[str, str]:
    return {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted((out / "checkpoint").iterdir())
    }


@pytest.mark.parametrize("key", sorted(REPORT_KEYS))
def test_the_report_has_every_promised_number(trained: tuple[Path, Outcome], key: str) -> None:
    assert isinstance(at(report_of(trained[0]), key), int | float)


def test_the_report_says_what_was_run(trained: tuple[Path, Outcome], recipe_file: Path) -> None:
    report = report_of(trained[0])
    recipe = resolve_recipe(report["recipe"])
    assert (report["seed"], recipe.seed, recipe.name) == (3, 3, "tiny")
    assert recipe.model.width == 32
    assert len(report["corpus_sha256"]) == 64
    assert report["versions"]["torch"] == torch.__version__
    assert {"blocktrain", "python", "numpy", "device"} <= report["versions"].keys()
    assert report["name"] == "tiny"


def test_the_picture_is_a_picture(trained: tuple[Path, Outcome]) -> None:
    picture = (trained[0] / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")
    width, height = (int.from_bytes(picture[start : start + 4]) for start in (16, 20))
    assert width > 600
    assert height > 400


def test_the_sample_opens_with_held_out_text_and_goes_on(
    trained: tuple[Path, Outcome], text_folder: Path
) -> None:
    sample = (trained[0] / "sample.txt").read_bytes()
    assert sample.startswith((text_folder / "valid.txt").read_bytes()[:64])
    assert len(sample) == 64 + 20


def test_the_table_names_every_model_and_is_all_that_stdout_holds(trained: tuple[Path, Outcome]) -> None:
    out = trained[1].out
    for name in (
        "bigram",
        "block 0 alone",
        "block 1 alone",
        "euler",
        "consensus",
        "end-to-end reference",
        "gap",
    ):
        assert name in out
    assert "training block 0" not in out


def test_progress_and_the_places_of_results_go_to_stderr(trained: tuple[Path, Outcome]) -> None:
    folder, outcome = trained
    assert "training block 0: 6 steps" in outcome.err
    assert "step=6/6 loss=" in outcome.err
    assert "evaluating on held-out text" in outcome.err
    for name in ("report.json", "curves.png", "checkpoint", "sample.txt"):
        assert name in outcome.err
        assert (folder / name).exists()


def test_two_runs_of_one_recipe_are_the_same(
    trained: tuple[Path, Outcome], recipe_file: Path, tmp_path: Path
) -> None:
    assert run_main("train", recipe_file, "--out", tmp_path / "again", "--set", "seed=3").code == 0
    assert weights_of(tmp_path / "again") == weights_of(trained[0])


def test_a_variable_and_a_flag_reach_the_run(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKTRAIN_TRAINING_STEPS", "1")
    monkeypatch.setenv("BLOCKTRAIN_TRAINING_REFERENCE", "true")
    flag = ("--set", "training.reference=false")
    assert run_main("train", recipe_file, "--out", tmp_path / "run", *flag).code == 0
    report = report_of(tmp_path / "run")
    assert report["recipe"]["training"]["steps"] == 1
    assert report["reference"] is None


STRANGE = {
    "one block, no sample": ("model.blocks=1", "evaluation.sample_bytes=0"),
    "tiny width, no convolution": ("model.width=2", "model.heads=1", "model.convolution=0"),
    "context of one": ("model.context=1",),
    "all hints": ("objective.hint_probability=1",),
    "no reference": ("training.reference=false",),
    "batch of one, no hints": ("training.batch=1", "objective.hint_probability=0"),
    "sample longer than the context": ("evaluation.sample_bytes=40",),
    "mlp blocks, one noise draw": ("model.mixer=none", "evaluation.noise_draws=1"),
    "embedding regression": ("objective.loss=mse",),
    "chained blocks": ("objective.kind=chain",),
    "learned codebook": ("objective.codebook=learned", "training.order=turns"),
    "more blocks than anyone needs": ("model.blocks=7", "training.reference=false"),
    "a narrow band of noise": ("objective.sigma_min=9.99",),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_but_lawful_recipes_train_evaluate_and_speak(
    recipe_file: Path, text_folder: Path, tmp_path: Path, case: str
) -> None:
    sets = [part for value in ("training.steps=1", *STRANGE[case]) for part in ("--set", value)]
    sets += ["--set", "evaluation.max_bytes=200", "--set", "evaluation.pooling_bytes=200"]
    trained = run_main("train", recipe_file, "--out", tmp_path / "run", *sets)
    assert trained.code == 0, trained.err
    report = report_of(tmp_path / "run")
    assert all(score["ce"] > 0 for score in report["blocks"])
    spoken = run_main("generate", tmp_path / "run" / "checkpoint", "--prompt", "the ", "--max-bytes", 30)
    assert spoken.code == 0
    assert len(spoken.stdout) == 4 + 30 + 1  # the context is 32


@pytest.fixture(scope="session")
def long_run(recipe_file: Path) -> tuple[Any, ...]:
    """Long enough to be killed in; state is saved as often as it can be."""
    sets = ("training.steps=25", "training.checkpoint_seconds=1e-9", "training.reference=false")
    return ("train", recipe_file, *(part for value in sets for part in ("--set", value)))


@pytest.fixture(scope="session")
def whole_run(long_run: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run_main(*long_run, "--out", out).code == 0
    return out


@pytest.mark.parametrize("group", [0, 1])
def test_a_run_killed_with_signal_9_resumes_to_the_same_bits(
    long_run: tuple[Any, ...], whole_run: Path, tmp_path: Path, group: int
) -> None:
    out = tmp_path / "run"
    state = out / "state" / f"group-{group}.safetensors"
    arguments = [str(word) for word in (*long_run, "--out", out)]
    process = start_blocktrain(arguments, tmp_path / "out.log", tmp_path / "err.log")

    def begun() -> bool:
        assert process.is_alive(), "the run ended before it could be killed"
        return state.exists()

    try:
        until("the group's state is saved", begun)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    with safetensors.safe_open(str(state), framework="pt") as file:
        assert 0 < json.loads(file.metadata()["progress"])["step"] < 25
    assert not (out / "report.json").exists()
    resumed = run_main(*long_run, "--out", out, "--resume")
    assert resumed.code == 0, resumed.err
    assert f"training block {group}: 25 steps from step" in resumed.err
    assert weights_of(out) == weights_of(whole_run)
    expected, found = report_of(whole_run), report_of(out)
    assert found["composed"] == expected["composed"]
    assert found["curves"] == expected["curves"]


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file that this process writes may grow beyond this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_while_state_is_saved_is_explained(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with full_disk(100_000):
        outcome = run_main("train", recipe_file, "--out", out)
    assert outcome.code == 1
    assert "cannot write" in outcome.complaint
    assert "group-0.safetensors: File too large; free some space" in outcome.complaint
    assert sorted(f.name for f in out.rglob("*") if f.is_file()) == ["metrics.jsonl", "run.json"]


def test_a_finished_run_is_told_and_not_scored_again(
    trained: tuple[Path, Outcome], recipe_file: Path
) -> None:
    out, first = trained
    before = {f: f.stat().st_mtime_ns for f in (out / "report.json", out / "checkpoint" / "config.json")}
    again = run_main("train", recipe_file, "--out", out, "--resume", "--set", "seed=3")
    assert again.code == 0, again.err
    assert "is finished: these are its scores" in " ".join(again.err.split())  # a long path breaks the line
    assert "evaluating" not in again.err
    assert again.out == first.out  # the same table
    assert {f: f.stat().st_mtime_ns for f in before} == before


def test_a_disk_that_is_full_while_the_checkpoint_is_saved_keeps_the_old_one(
    trained: tuple[Path, Outcome], recipe_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    (out / "report.json").unlink()  # as if it had been stopped before it was scored
    before = {f: f.read_bytes() for f in out.rglob("*") if f.is_file()}
    with full_disk(50_000):
        outcome = run_main("train", recipe_file, "--out", out, "--resume", "--set", "seed=3")
    assert outcome.code == 1
    assert "cannot write" in outcome.complaint
    assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == before


def test_a_run_is_extended_by_more_steps_and_not_by_fewer(recipe_file: Path, tmp_path: Path) -> None:
    start = ("train", recipe_file, "--out", tmp_path / "run", "--device", "cpu")
    assert run_main(*start, "--set", "training.steps=3").code == 0
    fewer = run_main(*start, "--resume", "--set", "training.steps=2")
    assert (fewer.code, "training.steps may grow" in fewer.complaint) == (2, True)
    longer = run_main(*start, "--resume", "--set", "training.steps=5")
    assert longer.code == 0, longer.err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["recipe"]["training"]["steps"] == 5
    assert [step for step, _ in report["curves"]["block 0"]] == [1, 2, 3, 4, 5]


def test_a_run_begins_from_a_checkpoint_also_when_it_is_resumed(
    recipe_file: Path, checkpoint: Path, tmp_path: Path
) -> None:
    start = ("train", recipe_file, "--out", tmp_path / "run", "--device", "cpu", "--set", "training.steps=1")
    wrong = run_main(*start, "--from", checkpoint)
    assert (wrong.code, "set seed = 3" in wrong.complaint) == (2, True)
    assert not (tmp_path / "run" / "run.json").exists()
    tune: tuple[Any, ...] = (
        "train",
        recipe_file,
        "--out",
        tmp_path / "tuned",
        "--device",
        "cpu",
        "--set",
        "training.steps=1",
    )
    tune += ("--set", "seed=3", "--set", "training.matrix_lr=1e-9", "--set", "training.other_lr=1e-9")
    done = run_main(*tune, "--from", checkpoint)
    assert done.code == 0, done.err
    before, after = (
        load_checkpoint(folder, torch.device("cpu")).blocks
        for folder in (checkpoint, tmp_path / "tuned/checkpoint")
    )
    for one, other in zip(before, after, strict=True):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], tensor, atol=1e-5, rtol=1e-5)
    # A block that had not begun when the run was stopped begins from the copy, without --from.
    (tmp_path / "tuned" / "state" / "group-1.safetensors").unlink()
    weights = (tmp_path / "tuned/checkpoint/block-01.safetensors").read_bytes()
    assert run_main(*tune, "--resume").code == 0
    assert (tmp_path / "tuned/checkpoint/block-01.safetensors").read_bytes() == weights
    again = run_main(*tune, "--resume", "--from", checkpoint)
    assert (again.code, "leave out --from" in again.complaint) == (2, True)


@pytest.mark.parametrize(("damage", "told"), [("flip", "is not what was written"), ("cut", "is truncated")])
def test_damaged_training_state_is_refused_with_what_to_do(
    trained: tuple[Path, Outcome], recipe_file: Path, tmp_path: Path, damage: str, told: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    state = out / "state" / "group-0.safetensors"
    content = bytearray(state.read_bytes())
    content[-3] ^= 1
    state.write_bytes(content if damage == "flip" else content[:-100])
    (out / "report.json").unlink()
    outcome = run_main("train", recipe_file, "--out", out, "--resume", "--set", "seed=3")
    assert outcome.code == 2
    assert told in outcome.complaint
    assert "remove the file to train block 0 again from the start" in outcome.complaint
