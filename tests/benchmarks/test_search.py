"""The search for lower losses of specialised blocks: equal operations, rates, and what its rows train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import search
import torch
from search import DEFAULT, END_TO_END, Learner, TableRow
from specialise import BLOCKS, DECAYS, Pool

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


def rows_of(better: float, seeds: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
    ends = {END_TO_END: 1.0, DEFAULT: 1.01, "another": 1.01 - better}
    found = {}
    for seed in seeds:
        for name, ce in ends.items():
            one = Learner(seed, 0, 10, 1e-3, 1e-3, 1, 64)
            learners = (one,) if name == END_TO_END else (one, Learner(seed, 1, 10, 1e-3, len(name), 1, 64))
            scored = {"fixed": {"valid": ce + seed}, "alone": [ce + seed] * len(learners)}
            found[TableRow(name, learners)] = scored | (
                {"by_text": scored["fixed"]} if len(learners) > 1 else {}
            )
    return search.table_of(found)


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
