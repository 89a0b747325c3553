"""The compiled step of drafts for many: its products, what it keeps, and that it is compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blocktrain.model import quick_kernel
from blocktrain.model.quick import QuickBlocks
from blocktrain.model.tails import packed
from tests.tiny import adaptive, shaken, tiny_codebook, tiny_objective

SHAPES = [(1, 32, 32), (3, 33, 6), (8, 96, 128), (9, 40, 30), (17, 5, 3)]


def drawn(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_a_product_is_that_of_the_rounded_matrix(rows: int, outputs: int, inputs: int) -> None:
    random = np.random.default_rng(rows)
    matrix, x = (
        random.standard_normal(shape).astype(np.float32) for shape in ((outputs, inputs), (rows, inputs))
    )
    tiles, scale = packed(matrix)
    rounded = np.round(matrix / scale[:outputs, None]) * scale[:outputs, None]
    assert np.abs(rounded - matrix).max() <= np.abs(matrix).max() / 250
    exact, found = x @ rounded.T, np.full((rows, outputs), np.nan, np.float32)
    quick_kernel._product_fp32(x, tiles, scale, found)
    assert np.allclose(found, exact, atol=1e-4)


@pytest.mark.skipif(not quick_kernel.HAS_VNNI, reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_rows_in_8_bits_give_nearly_the_same(rows: int, outputs: int, inputs: int) -> None:
    random = np.random.default_rng(rows)
    matrix, x = (
        random.standard_normal(shape).astype(np.float32) for shape in ((outputs, inputs), (rows, inputs))
    )
    # A row of nothing has no largest number to divide by; one of many times the others keeps its own scale.
    x[0], x[-1] = (0, 1000 * x[-1]) if rows > 1 else (x[0], x[-1])
    tiles, scale = packed(matrix)
    exact, found = np.empty((rows, outputs), np.float32), np.full((rows, outputs), np.nan, np.float32)
    quick_kernel._product_fp32(x, tiles, scale, exact)
    quick_kernel._product_8_bits(x, tiles, scale, found)
    # What rounding to 127 steps may do to each number of a row, all in one direction.
    off = np.abs(x).max(axis=1, keepdims=True) / 254 * np.abs(matrix).sum(axis=1)
    assert (np.abs(found - exact) <= 1.1 * off + 1e-6).all()
    # As large as can be, and every number of it: sums of 32 bits hold that.
    ones = np.ones((rows, inputs), np.float32)
    quick_kernel._product_8_bits(ones, *packed(np.ones((outputs, inputs), np.float32)), found)
    assert np.allclose(found, inputs, rtol=1e-3)


@pytest.mark.parametrize("convolution", [0, 4])
def test_blocks_are_stepped_by_what_was_compiled_for_none_in_particular(convolution: int) -> None:
    quick_kernel.compile_now()
    before = len(quick_kernel.step.signatures)
    objective = tiny_objective(f"model.convolution={convolution}")
    blocks = [adaptive(shaken(objective.build(i, seed=i))) for i in range(3)]
    both = QuickBlocks(blocks, tiny_codebook(objective))
    for quick in (both, both.first(1)):
        tails = [quick.tail_of(quick.new_cache()) for _ in range(2)]
        quick.step([1, 2], tails)
    assert len(quick_kernel.step.signatures) == before, "a request would have waited for a compiler"


def test_a_processor_without_the_instruction_drafts_all_the_same(tmp_path: Path) -> None:
    script = """
import llvmlite.binding as llvm
found = llvm.get_host_cpu_features()
found["avx512vnni"] = False
llvm.get_host_cpu_features = lambda: found
from blocktrain.model import quick_kernel
from blocktrain.model.quick import QuickBlocks
from tests.tiny import adaptive, shaken, tiny_codebook, tiny_objective
assert quick_kernel._product is quick_kernel._product_fp32
objective = tiny_objective()
blocks = [adaptive(shaken(objective.build(i, seed=i))) for i in range(2)]
quick = QuickBlocks(blocks, tiny_codebook(objective))
cache = quick.new_cache()
quick.extend([1, 2, 3], cache)
tail = quick.tail_of(cache)
rows = quick.step([4], [tail]), quick.step([4], [cache])
assert (rows[0] - rows[1]).abs().mean() < 0.05 * rows[1].std(), rows
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
