"""Packing sessions into one forward pass changes nothing but speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.model.generation import LocalModel
from blocktrain.model.sampling import normalised
from blocktrain.serving.blocks import HeldBlocks, RowWork
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint

TEXTS = [b"The quick brown fox", b"a", b"def function(self):\n    return 1", b"Note that the class"]


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Checkpoint:
    return load_checkpoint(checkpoint, torch.device("cpu"))


def test_packed_sessions_equal_the_local_model(loaded: Checkpoint) -> None:
    held = HeldBlocks(loaded, range(3))
    works = [RowWork(list(text), 1, (0, 1, 2), held.new_caches([0, 1, 2])) for text in TEXTS]
    for text, rows in zip(TEXTS, held.rows(works), strict=True):
        model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
        expected = model.next_log_probs(list(text)).double().numpy()
        np.testing.assert_allclose(normalised(rows[0].astype(np.float64)), expected, atol=1e-5)


def test_blocks_of_two_holders_add_up_to_the_whole(loaded: Checkpoint) -> None:
    whole = HeldBlocks(loaded, range(3))
    ids = list(TEXTS[0])
    parts = [
        whole.rows([RowWork(ids, 2, blocks, whole.new_caches(blocks))])[0]
        for blocks in ((0,), (1, 2), (0, 1, 2))
    ]
    np.testing.assert_allclose(parts[0] + parts[1], parts[2], atol=1e-5)


def test_continuing_and_cutting_back_equals_starting_over(loaded: Checkpoint) -> None:
    held = HeldBlocks(loaded, range(3))
    text, wrong = list(TEXTS[2]), [1, 2, 3, 4]
    caches = held.new_caches([0, 1, 2])
    held.rows([RowWork(text[:10] + wrong, 1, (0, 1, 2), caches)])
    continued = held.rows([RowWork(text[10:], 3, (0, 1, 2), caches, base=10)])[0]
    fresh = held.rows([RowWork(text, 3, (0, 1, 2), held.new_caches([0, 1, 2]))])[0]
    np.testing.assert_allclose(continued, fresh, atol=1e-5)


def test_exact_row_is_the_same_row_in_float64(loaded: Checkpoint) -> None:
    held = HeldBlocks(loaded, range(3))
    for text in TEXTS:
        row = held.rows([RowWork(list(text), 1, (0, 1, 2), held.new_caches([0, 1, 2]))])[0][0]
        exact = held.exact_row(list(text), (0, 1, 2))
        assert exact.dtype == np.float64
        np.testing.assert_allclose(row, exact, atol=2e-5)
