"""The search for lower losses of specialised blocks: equal operations, rates, and what its rows train."""

from __future__ import annotations

import json
import lzma
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import search
import specialise
import torch
from safetensors.torch import load_file
from search import DEFAULT, END_TO_END, Learner, TableRow
from specialise import BLOCKS, DECAYS, Pool, Unit

ROOT = Path(__file__).parents[2]

RATES = {"end to end": (6e-3, 1e-3), "block": (6e-3, 4e-3)}


def row_named(name: str) -> TableRow:
    return next(one for one in search.entries(0, 500, RATES) if one.name == name)


def test_every_row_has_the_operations_of_the_default() -> None:
    entries = search.entries(0, 500, RATES)
    budget = next(one for one in entries if one.name == DEFAULT).operations()
    assert {one.name: one.operations() / budget for one in entries} == {
        one.name: pytest.approx(1, abs=0.003) for one in entries
    }
    assert len({one.name for one in entries}) == len(entries)


def test_end_to_end_has_one_output_map_and_so_more_steps() -> None:
    (whole,) = row_named(END_TO_END).learners
    assert whole.layers == BLOCKS
    assert 500 < whole.steps < 700


def test_a_trunk_is_trained_once_and_its_passes_count_for_each_block() -> None:
    row = row_named("a frozen trunk, as large as a block")
    trunk, *blocks = row.all_learners()
    assert [block.trunk for block in blocks] == [trunk] * BLOCKS
    # Three passes for what is trained, one for the frozen trunk: 5 x 3 + 4 where the default has 4 x 3.
    assert trunk.steps == pytest.approx(500 * 12 / 19, rel=0.04)
    assert trunk.share == 0
    assert {block.share for block in blocks} == {search.SHARE}


def test_branches_go_on_where_the_common_block_ends() -> None:
    common, *blocks = row_named("branches of one block, a quarter of all operations").all_learners()
    assert common.first == 0
    assert common.end == pytest.approx(500, abs=2)
    assert {(block.first, block.steps) for block in blocks} == {(common.end, common.steps)}
    assert blocks[0].end - blocks[0].first == pytest.approx(375, abs=2)


def test_a_block_that_is_taught_hears_all_four_as_they_were_after_three_quarters() -> None:
    row = row_named("last quarter taught by the pool")
    learners = row.all_learners()
    teachers, taught = learners[:4], learners[4:]
    assert taught == list(row.learners)
    assert [one.begins_from for one in taught] == teachers
    assert {one.taught_by for one in taught} == {tuple(teachers)}
    assert taught[0].end == taught[0].steps < 500


def test_all_text_first_or_last() -> None:
    first = Learner(0, 0, 100, 1e-3, 1e-3, 1, 64, share=1.0, all_first=0.25)
    last = Learner(0, 0, 100, 1e-3, 1e-3, 1, 64, share=1.0, all_last=0.1)
    assert [step for step in range(100) if first.takes_all_text(step)] == list(range(25))
    assert [step for step in range(100) if last.takes_all_text(step)] == list(range(90, 100))
    plain = Learner(0, 0, 100, 1e-3, 1e-3, 1, 64, share=1.0)
    assert not any(map(plain.takes_all_text, range(100)))


def full(steps: int = 4000, size: str = search.FULL) -> dict[str, TableRow]:
    rows = search.entries(0, steps, RATES, Unit.layers, Unit.width, size)
    return dict(zip(search.FULL_ROWS, rows, strict=True))


def test_at_full_size_every_row_has_the_operations_of_four_published_blocks() -> None:
    rows = full()
    published = json.loads((ROOT / "docs/results/specialise-4000.json").read_text(encoding="utf-8"))["units"]
    of_block = next(one["training_flops"] for one in published if one["index"] == 0)
    assert rows["default"].operations() == BLOCKS * of_block
    assert {name: row.name for name, row in rows.items()} == search.FULL_ROWS
    for row in rows.values():
        assert row.operations() == pytest.approx(BLOCKS * of_block, rel=1e-3)


def test_at_full_size_models_are_those_of_specialise() -> None:
    rows = full()
    (whole,), (alone,) = rows["end-to-end"].learners, rows["alone"].learners
    assert (whole.unit().index, whole.unit().layers) == (None, Unit.layers)
    assert (alone.unit().index, alone.unit().layers, alone.steps, alone.share) == (0, Unit.layers, 16000, 0)
    for number, learner in enumerate(rows["default"].learners):
        unit = Unit(0, 4000, number, *RATES["block"], share=search.SHARE)
        assert asdict(learner.unit()) == {**asdict(unit), "learner": str(learner)}
    assert search.recipe_of(alone) == specialise.recipe_of(Unit(0, 16000, 0, *RATES["block"]), quick=False)


def test_a_common_block_that_goes_on_is_a_fifth_and_its_beginning_counts_once() -> None:
    row = full()["goes-on"]
    common, *pooled = row.all_learners()
    assert {(one.first, one.end, one.begins_from) for one in pooled} == {(common.end, common.steps, common)}
    assert [one.share for one in pooled] == [search.SHARE] * BLOCKS + [0]
    assert common.end == pytest.approx(16000 / 2, abs=2)
    assert common.end + 5 * (common.steps - common.end) == pytest.approx(16000, abs=5)


def test_a_branch_that_is_stopped_half_way_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    words = ("layout", "memory"), ("planet", "orbit"), ("violin", "tempo"), ("harbour", "vessel")
    # As many kinds as clusters: with fewer, which cluster stays empty depends on the processor.
    documents = [f"---\ntitle: {i}\n---\n{' '.join(words[i % 4] * (20 + i % 7))}\n\n" for i in range(12_000)]
    for part, texts in (("train", documents), ("valid", documents[:100])):
        (tmp_path / f"{part}.txt.xz").write_bytes(lzma.compress("".join(texts).encode(), preset=0))
    common, branch, *_ = full(60, search.TINY)["quarter"].all_learners()
    branch = replace(branch, all_first=0.75)
    losses = []
    for work, stop_at in ((tmp_path / "straight", None), (tmp_path / "stopped", 0.0)):
        search.prepare(tmp_path, work, {}, (BLOCKS,))
        assert search.train(common, work)
        assert search.train(branch, work, stop_at) == (stop_at is None)
        if stop_at is not None:
            assert search.made_by(branch, work)["alone"] is None
            assert not search.weights_of(branch, work).exists()
            assert search.train(branch, work)
        losses.append(search.made_by(branch, work)["alone"])
    assert losses[0] == losses[1]
    assert losses[0]["valid"] < search.made_by(common, tmp_path / "straight")["alone"]["valid"]
    straight, stopped = (
        load_file(search.weights_of(branch, tmp_path / name)) for name in ("straight", "stopped")
    )
    assert all(torch.equal(tensor, stopped[name]) for name, tensor in straight.items())


def test_what_there_is_no_time_for_is_left_for_the_same_command(tmp_path: Path) -> None:
    progress = search.Progress()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        workers = search.Workers(processes, tmp_path, progress, stop_at=0.0)
        assert search.run([full()["default"]], workers) == {}
    assert (progress.done, progress.needed) == (0, full()["default"].operations())


def test_what_is_trained_is_kept_under_its_own_name() -> None:
    learners = {
        one for seed in (0, 1) for row in search.entries(seed, 500, RATES) for one in row.all_learners()
    }
    assert len({str(one) for one in learners}) == len(learners)


def test_rates_climb_until_all_neighbours_of_the_best_were_tried() -> None:
    best = {"block": (2, -1), "end to end": (0, -3)}
    known: dict[tuple[str, search.Pair], float] = {}
    asked: list[tuple[str, search.Pair]] = []
    for wanted, known in search.climb(list(best)):
        asked += wanted
        for side, pair in wanted:
            known[side, pair] = sum((a - b) ** 2 for a, b in zip(pair, best[side], strict=True))
    assert len(asked) == len(set(asked))
    for side, pair in best.items():
        assert min((one for one in known if one[0] == side), key=known.__getitem__) == (side, pair)
        assert {(side, one) for one in search.around(pair)} <= known.keys()


def test_weights_by_the_text_find_the_model_that_knows_the_text() -> None:
    """Two models, each right in half of the windows: fixed weights cannot know which, the text so far can."""
    y = torch.randint(0, 8, (16, 64), generator=torch.Generator().manual_seed(0))
    right, wrong = (3.0 * torch.nn.functional.one_hot(one, 8) for one in (y, (y + 1) % 8))
    half = torch.arange(16)[:, None, None] < 8
    rows = torch.log_softmax(
        torch.stack([torch.where(half, right, wrong), torch.where(half, wrong, right)]), -1
    )
    text = search.Text(rows, y)
    torch.manual_seed(0)
    fixed = search.score(search.fit(text, (), steps=100), text, ())
    by_text = search.score(search.fit(text, DECAYS, steps=100), text, DECAYS)
    assert by_text < fixed - 0.05
    # Nothing of what comes later may weigh: the first byte has no evidence.
    assert torch.equal(search.past_of(rows, y, DECAYS).view(3, 2, 16, 64)[..., 0], torch.zeros(3, 2, 16))


def test_the_teacher_is_the_pool_that_is_scored() -> None:
    rows = torch.log_softmax(torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)), -1)
    y = torch.zeros(3, 5, dtype=torch.int64)
    said = search.said_by(Pool(2, DECAYS), rows, y, DECAYS)
    assert said.shape == (15, 8)
    torch.testing.assert_close(said.exp().sum(-1), torch.ones(15))


def test_a_row_without_the_rows_it_is_compared_with_has_no_distance(tmp_path: Path) -> None:
    row = full()["alone"]
    scored = {"fixed": {"pool": 1.0, "valid": 1.0}, "alone": [1.0]}
    (line,) = search.table_of({row: scored}, tmp_path)
    assert (line["ce"], line["gap"], line["over_default"]) == (1.0, None, None)
    assert search.lines_of([line])[2].endswith("| 1.0000 | 1.0000 |  |  |  |")


def rows_of(better: float) -> list[dict[str, Any]]:
    ends = {END_TO_END: 1.0, DEFAULT: 1.01, "another": 1.01 - better}
    found = {}
    for seed in (0, 1):
        for name, ce in ends.items():
            one = Learner(seed, 0, 10, 1e-3, 1e-3, 1, 64)
            learners = (one,) if name == END_TO_END else (one, Learner(seed, 1, 10, 1e-3, len(name), 1, 64))
            scored = {"fixed": {"valid": ce + seed}, "alone": [ce + seed] * len(learners)}
            found[TableRow(name, learners)] = scored | (
                {"by_text": scored["fixed"]} if len(learners) > 1 else {}
            )
    return search.table_of(found, Path("nowhere"))


def test_a_row_that_is_better_by_more_than_the_limit_breaks_the_claim() -> None:
    assert all(search.claims_of(rows_of(0.004)).values())
    broken = search.claims_of(rows_of(0.006))
    assert [name for name, holds in broken.items() if not holds] == [
        "'another' is at most 0.005 below the default"
    ]


def test_the_table_has_gaps_of_each_seed_and_the_best_row_on_top() -> None:
    lines = search.lines_of(rows_of(0.006))
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {END_TO_END}", "| another", f"| {DEFAULT}"]
    assert "+0.0040, +0.0040 | -0.0060, -0.0060" in lines[3]


def test_a_text_that_is_not_prepared_needs_its_source(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--docs FOLDER is needed"):
        search.prepare(None, tmp_path, {})
