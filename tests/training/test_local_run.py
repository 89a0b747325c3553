"""A whole run: what it reports, and that stopping it anywhere changes nothing."""

from __future__ import annotations

import copy
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from blocktrain.config import Recipe
from blocktrain.errors import DivergedError, StoppedError, UserError
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.local import Group, LocalRun, Silent
from tests.tiny import adaptive, prose, tiny_recipe

CPU = torch.device("cpu")
SHORT = ("training.steps=1", "training.reference=false")
SEQUENTIAL = ("training.checkpoint_seconds=1e-9",)
TURNS = (*SEQUENTIAL, "training.order=turns", "objective.codebook=learned")
# The reference trains alone, after and beside nothing: the two above resume it.
CHAIN = (*SEQUENTIAL, "objective.kind=chain", "objective.hint_probability=0", "training.reference=false")

ROUNDS = (*SEQUENTIAL, "training.order=turns", "swarm.steps_per_round=2", "training.reference=false")
CHAIN_TURNS = (*ROUNDS, "objective.kind=chain", "objective.hint_probability=0")
CHAIN_LEARNED = (*ROUNDS, "objective.kind=chain", "model.blocks=3", "objective.codebook=learned")


class Stopped(Exception):
    """Stands for the end of the process: nothing after it runs."""


class StopAt(Silent):
    """Notes what was trained, and stops the run at one step of one unit."""

    def __init__(self, unit: str | None = None, step: int | None = None) -> None:
        self.place = (unit, step)
        self.begun: list[tuple[str, int]] = []
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)

    def started(self, unit: str, step: int, total: int) -> None:
        self.begun.append((unit, step))

    def stepped(self, unit: str, step: int, total: int, ce: float, tokens: int) -> None:
        if (unit, step) == self.place:
            raise Stopped


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(prose(12_000))
    return path


def recipe_of(text: Path, *overrides: str) -> Recipe:
    return tiny_recipe(
        f"data.corpus={text}", "evaluation.max_bytes=200", "evaluation.sample_bytes=5", *overrides
    )


def local_run(text: Path, out: Path, *overrides: str, observer: StopAt | None = None) -> LocalRun:
    return LocalRun(recipe_of(text, *overrides), out, CPU, observer or StopAt())


def finished(run: LocalRun, *, resume: bool = False) -> dict[str, Any]:
    run.train(resume=resume)
    return run.finish().to_json()


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """The report as written, without the clock."""
    told: dict[str, Any] = json.loads(json.dumps(report))
    assert all(seconds > 0 for seconds in told.pop("seconds").values())
    return told


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Any]:
    results: dict[tuple[str, ...], Any] = {}
    for overrides in (SEQUENTIAL, TURNS, CHAIN, CHAIN_TURNS, CHAIN_LEARNED):
        out = tmp_path_factory.mktemp("whole")
        report = finished(local_run(text, out, *overrides))
        results[overrides] = (comparable(report), files_of(out / "checkpoint"), out)
    return results


@pytest.mark.parametrize(
    ("overrides", "unit", "step"),
    [
        (SEQUENTIAL, "block 0", 1),
        (SEQUENTIAL, "block 0", 4),
        (SEQUENTIAL, "block 1", 6),
        (SEQUENTIAL, "reference", 3),
        (TURNS, "block 0", 3),
        (TURNS, "block 1", 5),
        (TURNS, "reference", 2),
        (CHAIN, "block 1", 2),
        (CHAIN_TURNS, "block 0", 3),
        (CHAIN_TURNS, "block 1", 4),
        (CHAIN_LEARNED, "block 1", 2),
        (CHAIN_LEARNED, "block 0", 6),
        (CHAIN_LEARNED, "block 2", 6),
    ],
)
def test_a_run_stopped_anywhere_ends_as_if_it_had_not_been(
    text: Path, tmp_path: Path, uninterrupted: Any, overrides: tuple[str, ...], unit: str, step: int
) -> None:
    with pytest.raises(Stopped):
        finished(local_run(text, tmp_path, *overrides, observer=StopAt(unit, step)))
    assert not (tmp_path / "report.json").exists()
    report = finished(local_run(text, tmp_path, *overrides), resume=True)
    expected_report, expected_files, _ = uninterrupted[overrides]
    assert files_of(tmp_path / "checkpoint") == expected_files
    assert comparable(report) == expected_report


def test_a_resumed_run_repeats_at_most_the_step_it_was_stopped_in(text: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        finished(local_run(text, tmp_path, *SEQUENTIAL, observer=StopAt("block 1", 4)))
    watcher = StopAt()
    finished(local_run(text, tmp_path, *SEQUENTIAL, observer=watcher), resume=True)
    assert watcher.begun == [("block 0", 6), ("block 1", 3), ("reference", 0)]


def test_a_finished_run_can_be_finished_again(text: Path, uninterrupted: Any) -> None:
    report, files, out = uninterrupted[SEQUENTIAL]
    assert comparable(finished(local_run(text, out, *SEQUENTIAL), resume=True)) == report
    assert files_of(out / "checkpoint") == files


def test_training_state_is_plain_safetensors(uninterrupted: Any) -> None:
    _, _, out = uninterrupted[TURNS]
    state = safetensors.torch.load_file(out / "state" / "group-0.safetensors")
    assert {"block 0/weights/embedding.weight", "block 1/weights/out.weight"} <= state.keys()
    assert {"codebook/weights/table"} <= state.keys()
    assert any(name.startswith("block 0/optimizer/") for name in state)


def test_nothing_temporary_is_left_behind(uninterrupted: Any) -> None:
    for _, _, out in uninterrupted.values():
        assert not [name for name in files_of(out) if ".tmp" in name or Path(name).name.startswith(".")]


def test_blocks_of_a_fixed_codebook_train_the_same_in_any_order(text: Path, tmp_path: Path) -> None:
    """Updates commute: nothing trainable is shared, so turns and one after another end alike."""
    one, other = local_run(text, tmp_path / "a"), local_run(text, tmp_path / "b", "training.order=turns")
    for run in (one, other):
        run.train(resume=False)
    for first, second in zip(one.blocks, other.blocks, strict=True):
        weights, others = first.state_dict(), second.state_dict()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_blocks_that_take_turns_have_neighbours_as_old_as_the_round(text: Path, tmp_path: Path) -> None:
    """The same weights as by hand: copies frozen at steps 0, 2 and 4, each round alone on its copies."""
    kinds = (*ROUNDS, "objective.kind=chain", "model.blocks=3")
    run, other = local_run(text, tmp_path / "a", *kinds), local_run(text, tmp_path / "b", *kinds)
    run.train(resume=False)
    trainers = [
        BlockTrainer(other.recipe, other.objective, block, b, other.shards, other.codebook)
        for b, block in enumerate(other.blocks)
    ]
    for first in (0, 2, 4):
        copies = copy.deepcopy(other.blocks)
        for index, trainer in enumerate(trainers):
            trainer.freeze([copies[i] for i in other.objective.upstream(index)])
            for step in (first, first + 1):
                trainer.step(step, index)
    for one, by_hand in zip(run.blocks, other.blocks, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one.parameters(), by_hand.parameters(), strict=True))


def test_staleness_reaches_the_result(text: Path, tmp_path: Path) -> None:
    fresh = local_run(text, tmp_path / "a", *CHAIN_TURNS, "swarm.steps_per_round=1")
    stale = local_run(text, tmp_path / "b", *CHAIN_TURNS, "swarm.steps_per_round=3")
    for run in (fresh, stale):
        run.train(resume=False)
    same = [
        torch.equal(adaptive(one).out.weight, adaptive(other).out.weight)
        for one, other in zip(fresh.blocks, stale.blocks, strict=True)
    ]
    assert same[:2] == [True, False]


def test_frozen_blocks_wait_in_host_memory_within_the_setting(text: Path, tmp_path: Path) -> None:
    """A group shares what the setting allows among its members."""
    step_bytes = 4 * 32 * 32 * 4
    run = local_run(text, tmp_path, *CHAIN_LEARNED, f"training.frozen_host_bytes={3 * step_bytes}")
    group = Group(run, run.groups()[0], tmp_path / "state.safetensors")
    group.train(0, 6)
    held = [trainer.frozen.host_bytes for trainer in group.trainers]
    assert held == [0, step_bytes, step_bytes]


def test_a_learned_codebook_is_trained_by_every_block_in_turn(text: Path, tmp_path: Path) -> None:
    run = local_run(text, tmp_path, *TURNS)
    start = run.codebook.table.detach().clone()
    run.train(resume=False)
    assert not torch.allclose(start, run.codebook.table.detach(), atol=1e-3)
    names = [unit.name for group in run.groups() for unit in group]
    assert names == ["block 0", "block 1", "reference"]
    assert [len(group) for group in run.groups()] == [2, 1]


def test_the_reference_does_not_move_a_learned_codebook(text: Path, tmp_path: Path) -> None:
    tables = []
    for name, reference in (("with", "true"), ("without", "false")):
        run = local_run(text, tmp_path / name, *TURNS, f"training.reference={reference}")
        run.train(resume=False)
        tables.append(run.codebook.table.detach())
    assert torch.equal(*tables)


def test_the_report_adds_up(text: Path, tmp_path: Path) -> None:
    run = local_run(text, tmp_path)
    report = finished(run)
    composed = min(score["ce"] for score in report["composed"].values())
    assert report["gap"] == pytest.approx(composed - report["reference"]["ce"])
    assert report["tokens"] == {"per_block": 6 * 4 * 32, "reference": 6 * 4 * 32}
    assert report["parameters"]["blocks"] == sum(p.numel() for b in run.blocks for p in b.parameters())
    assert report["parameters"]["block"] * 2 == report["parameters"]["blocks"]
    assert report["peak_memory_bytes"]["block"] < report["peak_memory_bytes"]["reference"]
    assert report["corpus_sha256"] == run.text.sha256
    assert report["recipe"] == run.recipe.to_dict()
    assert report["scored_tokens"] == 199
    for curve in report["curves"].values():
        assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]
    for score in [*report["blocks"], *report["composed"].values(), report["reference"]]:
        assert score["ppl"] == pytest.approx(math.exp(score["ce"]))
        assert score["bits_per_byte"] == pytest.approx(score["ce"] / math.log(2))


def test_floating_point_operations_are_the_formula_by_hand(text: Path, tmp_path: Path) -> None:
    """Per token forward: twice the matrix parameters (12 d^2 a layer, the hint and the output map),
    the codebook product, and 2 T d for attention; three times that with the backward pass."""
    report = finished(local_run(text, tmp_path, "training.steps=1"))
    d, context, layer = 32, 32, 12 * 32 * 32 * 2 + 2 * 32 * 32
    codebook = 2 * 256 * d
    block = 3 * (layer + 2 * (2 * d * d) + codebook)
    reference = 3 * (2 * layer + 2 * d * d + codebook)
    tokens = 4 * context
    assert report["flops"] == {"blocks": 2 * block * tokens, "reference": reference * tokens}


def test_the_passes_of_frozen_blocks_are_counted_where_they_are_made(text: Path, tmp_path: Path) -> None:
    """Block 1 takes the features of block 0 in all 6 steps."""
    d, tokens = 32, 4 * 32
    plain = 12 * d * d * 2 + 2 * d * 32 + 2 * d * d + 2 * 256 * d
    chain = finished(local_run(text, tmp_path / "chain", *CHAIN))
    upstream = 2 * d * d
    assert chain["flops"]["blocks"] == 6 * tokens * (3 * plain + plain + 3 * (plain + upstream))


def test_a_run_without_a_reference_reports_none(text: Path, tmp_path: Path) -> None:
    report = finished(local_run(text, tmp_path, *SHORT))
    assert report["reference"] is None
    assert report["gap"] is None
    assert report["tokens"]["reference"] == 0


def test_a_run_without_hints_reports_no_euler(text: Path, tmp_path: Path) -> None:
    observer = StopAt()
    report = finished(local_run(text, tmp_path, "objective.hint_probability=0", *SHORT, observer=observer))
    assert list(report["composed"]) == ["consensus"]
    # Scored on 200 bytes, and told that this is little.
    assert any(line.startswith("only 200 tokens of held-out text") for line in observer.said)


def test_the_loss_curve_has_some_two_hundred_points_stopped_or_not(text: Path, tmp_path: Path) -> None:
    """Points are means over the steps since the last one, so state is saved at points only."""
    small = ("model.blocks=1", "model.mixer=none", "model.width=2", "model.heads=1", "model.context=1")
    plain = ("objective.hint_probability=0", "training.optimizer=adamw", "training.reference=false")
    overrides = (*small, *plain, "training.steps=403")
    whole = local_run(text, tmp_path / "whole", *overrides)
    whole.train(resume=False)
    curve = whole.units[0].curve
    assert [step for step, _ in curve] == [*range(2, 403, 2), 403]
    with pytest.raises(Stopped):
        local_run(text, tmp_path / "run", *overrides, *SEQUENTIAL, observer=StopAt("block 0", 20)).train(
            resume=False
        )
    resumed = local_run(text, tmp_path / "run", *overrides, *SEQUENTIAL, observer=StopAt("block 0", 60))
    with pytest.raises(Stopped):
        resumed.train(resume=True)
    points = resumed.units[0].curve
    assert len(points) >= 29
    assert points == curve[: len(points)]


def test_resuming_on_changed_text_is_refused(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(prose(12_000, seed=1))
    local_run(text, out, *SHORT).train(resume=False)
    text.write_bytes(prose(12_000, seed=2))
    with pytest.raises(UserError, match="corpus_sha256"):
        local_run(text, out, *SHORT).train(resume=True)


def test_a_damaged_run_file_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{ not json")
    with pytest.raises(UserError, match=r"run\.json"):
        local_run(text, tmp_path).train(resume=True)


@pytest.mark.parametrize(
    "damage", [lambda f: f.write_bytes(f.read_bytes()[:-100]), lambda f: f.write_bytes(b"")]
)
def test_damaged_training_state_is_refused(text: Path, tmp_path: Path, damage: Any) -> None:
    with pytest.raises(Stopped):
        finished(local_run(text, tmp_path, *SEQUENTIAL, observer=StopAt("block 0", 4)))
    damage(tmp_path / "state" / "group-0.safetensors")
    with pytest.raises(UserError, match=r"group-0\.safetensors"):
        local_run(text, tmp_path, *SEQUENTIAL).train(resume=True)


@pytest.mark.parametrize("rate", ["training.matrix_lr=1e20", "training.other_lr=1e20"])
def test_a_loss_that_is_no_longer_finite_stops_the_run_with_a_reason(
    text: Path, tmp_path: Path, rate: str
) -> None:
    with pytest.raises(DivergedError, match="not finite .*learning rate"):
        finished(local_run(text, tmp_path, rate))
    assert not (tmp_path / "report.json").exists()
    assert not (tmp_path / "checkpoint").exists()


def test_a_run_asked_to_stop_saves_its_state_and_resumes_to_the_same_weights(
    text: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(text)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = LocalRun(recipe, whole, CPU, Silent())
    uninterrupted.train(resume=False)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError, match="--resume"):
        LocalRun(recipe, parts, CPU, Silent(), stop).train(resume=False)
    resumed = LocalRun(recipe, parts, CPU, Silent())
    resumed.train(resume=True)
    for one, other in zip(uninterrupted.blocks, resumed.blocks, strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
