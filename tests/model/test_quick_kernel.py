"""The compiled step of drafts for many: its products, what it keeps, and that it is compiled once."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blocktrain.model import quick_kernel
from blocktrain.model import tails as tails_module
from blocktrain.model.quick import QuickBlocks
from blocktrain.model.tails import packed
from tests.tiny import adaptive, shaken, tiny_codebook, tiny_objective

needs_vnni = pytest.mark.skipif(not quick_kernel.HAS_VNNI, reason="this processor has no AVX-512 VNNI")

SHAPES = [(1, 32, 32), (3, 33, 6), (8, 96, 128), (9, 40, 30), (17, 5, 3)]


def drawn(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)


@needs_vnni
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_a_product_is_nearly_that_of_the_matrix(rows: int, outputs: int, inputs: int) -> None:
    matrix, x = drawn(outputs, inputs), drawn(rows, inputs)
    # A row of nothing has no largest number to divide by; one of many times the others keeps its own scale.
    x[0], x[-1] = (0, 1000 * x[-1]) if rows > 1 else (x[0], x[-1])
    found = np.full((rows, outputs), np.nan, np.float32)
    quick_kernel._product(x, *packed(matrix), found)
    # What rounding to 127 steps may do to each number of a row, all in one direction.
    largest = np.abs(x).max(axis=1, keepdims=True)
    off = largest / 254 * np.abs(matrix).sum(axis=1)
    off = off + np.abs(matrix).max(axis=1) / 254 * np.abs(x).sum(axis=1, keepdims=True)
    assert (np.abs(found - x @ matrix.T) <= 1.1 * off + 1e-6).all()
    # As large as can be, and every number of it: sums of 32 bits hold that.
    ones = np.ones((rows, inputs), np.float32)
    quick_kernel._product(ones, *packed(np.ones((outputs, inputs), np.float32)), found)
    assert np.allclose(found, inputs, rtol=1e-3)


@needs_vnni
@pytest.mark.parametrize("convolution", [0, 4])
def test_blocks_are_stepped_by_what_was_compiled_for_none_in_particular(convolution: int) -> None:
    quick_kernel.compile_now()
    before = len(quick_kernel.step.signatures)
    objective = tiny_objective(f"model.convolution={convolution}")
    blocks = [adaptive(shaken(objective.build(i, seed=i))) for i in range(3)]
    for quick in (QuickBlocks(blocks[:count], tiny_codebook(objective)) for count in (1, 2, 3)):
        tails = [quick.tail_of(quick.new_cache()) for _ in range(2)]
        quick.step([1, 2], tails)
    assert len(quick_kernel.step.signatures) == before, "a request would have waited for a compiler"


@needs_vnni
@settings(deadline=None, max_examples=25)
@given(
    heads=st.integers(1, 4),
    head_width=st.sampled_from([2, 6, 16, 20]),
    convolution=st.integers(0, 4),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_ends_say_what_caches_do_whatever_the_shape(
    heads: int, head_width: int, convolution: int, lengths: list[int], seed: int
) -> None:
    shape = (f"model.width={heads * head_width}", f"model.heads={heads}", f"model.convolution={convolution}")
    objective = tiny_objective(
        *shape, "model.context=64", "objective.hint_probability=0", "objective.codebook=own"
    )
    blocks = [adaptive(shaken(objective.build(i, seed=seed + i))) for i in range(2)]
    quick = QuickBlocks(blocks, tiny_codebook(objective))
    random = np.random.default_rng(seed)
    caches = [quick.new_cache() for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        if length:
            quick.extend(random.integers(0, 16, length).tolist(), cache)
    tails = [quick.tail_of(cache) for cache in caches]
    # A wrong draft, forgotten again, is no part of any text.
    quick.step([3] * len(tails), tails)
    for tail, length in zip(tails, lengths, strict=True):
        tail.truncate(length)
    for _ in range(3):
        tokens = random.integers(0, 16, len(tails)).tolist()
        found, expected = quick.step(tokens, tails), quick.step(tokens, caches)
        assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_the_compiled_file_changes_with_the_arrays_that_it_was_compiled_for() -> None:
    now = hashlib.sha256(Path(tails_module.__file__).read_bytes()).hexdigest()[:16]
    assert now == quick_kernel.MADE_FOR, f"write {now!r} there: numba would load what fits the old arrays"


def test_an_exception_in_one_of_two_threads_leaves_the_other_nothing_to_write_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objective = tiny_objective()
    blocks = [adaptive(shaken(objective.build(i, seed=i))) for i in range(2)]
    quick, ran = QuickBlocks(blocks, tiny_codebook(objective)), []

    def fail(x: NDArray[np.float32], *arrays: object) -> None:
        ran.append(threading.current_thread().name)
        raise MemoryError

    monkeypatch.setattr(quick_kernel, "step", fail)
    with pytest.raises(MemoryError):
        quick.step([1], [quick.tail_of(quick.new_cache())])
    assert len(ran) == 2, "both halves are over"
