"""Batches: the same everywhere, inside the text they are drawn from, every held-out token scored once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.shards import Shards, scoring_windows, window_offsets
from blocktrain.data.tokenizer import Tokens
from blocktrain.errors import DataError
from blocktrain.ids import CorpusHash
from tests.tiny import prose

CPU = torch.device("cpu")
CORPUS = CorpusHash("0123abcd")


def shards(tokens: Tokens, *, batch: int = 4, context: int = 8) -> Shards:
    return Shards(tokens, CORPUS, seed=0, batch=batch, context=context, device=CPU)


def test_window_offsets_are_the_same_on_every_machine() -> None:
    """Written down on the day the format was fixed; a change here changes every run."""
    found = window_offsets(CORPUS, 0, 0, 0, count=4, choices=1000)
    assert found.tolist() == [946, 290, 390, 99]
    found = window_offsets(CORPUS, 7, 3, 123_456, count=4, choices=10_000_000_000)
    assert found.tolist() == [8772195510, 2260621739, 2549207039, 3334965185]


@pytest.mark.parametrize(
    "other", [("ffff", 0, 0, 0), (CORPUS, 1, 0, 0), (CORPUS, 0, 1, 0), (CORPUS, 0, 0, 1)]
)
def test_corpus_seed_shard_and_step_each_give_other_windows(other: tuple[CorpusHash, int, int, int]) -> None:
    first = window_offsets(CORPUS, 0, 0, 0, count=8, choices=10**9)
    assert first.tolist() != window_offsets(*other, count=8, choices=10**9).tolist()


@given(st.integers(0, 2**62), st.integers(0, 10**6), st.integers(0, 10**9), st.integers(1, 10**12))
def test_offsets_lie_inside_the_choices(seed: int, shard: int, step: int, choices: int) -> None:
    found = window_offsets(CORPUS, seed, shard, step, count=16, choices=choices)
    assert found.min() >= 0
    assert found.max() < choices


def test_offsets_cover_the_choices_evenly() -> None:
    drawn = np.concatenate([window_offsets(CORPUS, 0, 0, s, count=100, choices=10) for s in range(100)])
    assert np.bincount(drawn, minlength=10) == pytest.approx(np.full(10, 1000), abs=120)


def test_a_batch_is_windows_of_the_text_and_what_follows_them() -> None:
    tokens = np.arange(100, dtype=np.int64)
    x, y = shards(tokens).batch(shard=2, step=5)
    starts = window_offsets(CORPUS, 0, 2, 5, count=4, choices=92)
    assert x.shape == y.shape == (4, 8)
    assert torch.equal(y, x + 1)
    assert x[:, 0].tolist() == starts.tolist()


def test_a_batch_does_not_depend_on_the_batches_before_it() -> None:
    tokens = np.frombuffer(prose(500), dtype=np.uint8).astype(np.int64)
    walked = shards(tokens)
    for step in range(5):
        walked.batch(0, step)
    for walked_part, direct_part in zip(walked.batch(0, 5), shards(tokens).batch(0, 5), strict=True):
        assert torch.equal(walked_part, direct_part)


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 50), st.integers(0, 1000))
def test_every_window_lies_inside_the_text_it_is_drawn_from(
    context: int, batch: int, extra: int, step: int
) -> None:
    """Marked tokens on both sides of the training part are never seen."""
    length = context + batch + extra
    x, y = shards(np.arange(length, dtype=np.int64), batch=batch, context=context).batch(0, step)
    assert int(x.min()) >= 0
    assert int(y.max()) < length
    assert torch.equal(y, x + 1)


def test_the_last_token_of_the_text_can_be_a_target() -> None:
    drawn = shards(np.arange(12, dtype=np.int64))
    assert max(int(drawn.batch(0, step)[1].max()) for step in range(50)) == 11


@pytest.mark.parametrize("length", [0, 1, 8, 11])
def test_text_shorter_than_a_batch_is_refused_with_the_numbers(length: int) -> None:
    with pytest.raises(DataError, match=rf"{length} tokens.*4 windows of 9"):
        shards(np.arange(length, dtype=np.int64))


lengths = st.integers(2, 200)


@given(lengths, st.integers(1, 40), st.integers(1, 9))
def test_every_token_but_the_first_is_scored_exactly_once(length: int, context: int, batch: int) -> None:
    tokens = np.arange(1000, 1000 + length, dtype=np.int64)
    scored: list[int] = []
    for x, y, mask in scoring_windows(tokens, context=context, batch=batch):
        assert x.shape == y.shape == mask.shape
        assert x.shape[0] <= batch
        assert x.shape[1] == context
        assert torch.equal(y[mask], x[mask] + 1)
        scored += y[mask].tolist()
    assert scored == tokens[1:].tolist()


@given(lengths, st.integers(1, 40))
def test_a_scored_token_sees_only_its_own_window(length: int, context: int) -> None:
    tokens = np.arange(length, dtype=np.int64)
    for x, _, mask in scoring_windows(tokens, context=context, batch=4):
        for row, seen in zip(x, mask, strict=True):
            assert int(row[0]) % context == 0
            assert row[seen].tolist() == list(range(int(row[0]), int(row[0]) + int(seen.sum())))


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_without_a_second_token_cannot_be_scored(length: int) -> None:
    with pytest.raises(DataError, match="at least two"):
        list(scoring_windows(np.zeros(length, dtype=np.int64), context=4, batch=1))
