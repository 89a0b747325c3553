"""Passes of fixed shapes: on a processor those that a GPU captures, and on a GPU their captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blocktrain.config import resolve_recipe
from blocktrain.ids import CorpusHash
from blocktrain.model import caches
from blocktrain.model.pooling import Pooling
from blocktrain.serving.blocks import HeldBlocks, RowWork
from blocktrain.training.checkpoint import load_checkpoint, write_checkpoint
from blocktrain.training.setup import Setup

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
SHAPES: dict[str, dict[str, Any]] = {
    "independent": {"blocks": 3, "layers_per_block": 2},
    "llama": {"family": "llama", "kv_heads": 1, "blocks": 1, "layers_per_block": 2},
    "serial": {"family": "llama", "kv_heads": 1, "blocks": 3, "layers_per_block": 1},
}
CONTEXT = 160


def random_checkpoint(folder: Path, name: str) -> None:
    serial = name == "serial"
    model = {"width": 64, "heads": 2, "context": CONTEXT, **SHAPES[name]}
    objective = {"objective": {"kind": "serial"}} if serial else {}
    recipe = resolve_recipe({"name": name, "model": model, **objective})
    setup, blocks = Setup.of(recipe), []
    torch.manual_seed(1)
    for index in range(recipe.model.blocks):
        block = setup.initial(index)
        for parameter in block.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        blocks.append({key: tensor.detach() for key, tensor in block.state_dict().items()})
    count = recipe.model.blocks
    weights = (0.0,) * (count - 1) + (1.0,) if serial else (1 / count,) * count
    write_checkpoint(folder, recipe, CorpusHash("0" * 64), blocks, setup.codebook().table, Pooling(weights))


class Writer:
    """Texts that go on together through one holder of all blocks, or one for each part of a serial model."""

    def __init__(self, folder: Path, device: str, *, fixed: bool) -> None:
        loaded = load_checkpoint(folder, torch.device(device))
        held = tuple(range(len(loaded.blocks)))
        serial = loaded.objective.is_serial
        groups = [(index,) for index in held] if serial else [held]
        self.holders = []
        for group in groups:
            some = load_checkpoint(folder, torch.device(device), only=group)
            self.holders.append((group, HeldBlocks(some, group, fixed_shapes=fixed)))
        self.serial = serial
        self.caches: dict[tuple[int, int], Any] = {}
        self.lengths: dict[int, int] = {}

    def rows(self, new: dict[int, list[int]]) -> dict[int, NDArray[Any]]:
        """Log-probs behind every new id of these texts."""
        features: dict[int, NDArray[Any] | None] = dict.fromkeys(new)
        rows: dict[int, NDArray[Any]] = {}
        for number, (group, held) in enumerate(self.holders):
            last = number == len(self.holders) - 1
            works = []
            for text, ids in new.items():
                if (text, number) not in self.caches:
                    self.caches[text, number] = held.new_caches(group, alone=self.serial)
                asked = (group[-1:] if self.serial else group) if last else ()
                base = self.lengths.get(text, 0)
                work = RowWork(ids, len(ids), asked, self.caches[text, number], base)
                work.upstream_TD = features[text]
                works.append(work)
            for text, found in zip(new, held.rows(works), strict=True):
                features[text] = found.features_TD
                rows[text] = found.rows
        for text, ids in new.items():
            self.lengths[text] = self.lengths.get(text, 0) + len(ids)
        return rows


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", list(SHAPES))
def test_fixed_passes_give_the_rows_of_any_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    # Few slots, so that the memory moves under passes that were captured before.
    monkeypatch.setattr(caches, "FIRST_SLOTS", 4)
    random_checkpoint(tmp_path / "model", name)
    free, fixed = (Writer(tmp_path / "model", device, fixed=one) for one in (False, True))
    random = np.random.default_rng(1)
    lengths = [1, 9, 30, 50, 2, 63]
    prompts = {text: random.integers(0, 256, length).tolist() for text, length in enumerate(lengths)}
    passes: list[dict[int, list[int]]] = [prompts]
    # Each number of texts and of new ids twice: captured, and replayed; past the room of a slot too.
    for texts in ([0], [0, 1], list(prompts), list(prompts), [5, 2]):
        for count in (1, 1, 5, 5):
            passes.append({text: random.integers(0, 256, count).tolist() for text in texts})
    passes.append({3: random.integers(0, 256, 70).tolist(), 1: [7]})
    for new in passes:
        expected, found = free.rows(new), fixed.rows(new)
        for text in new:
            assert np.isfinite(found[text]).all()
            np.testing.assert_allclose(found[text], expected[text], atol=2e-3)
            assert (found[text].argmax(-1) == expected[text].argmax(-1)).mean() > 0.9


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_holder_of_all_parts_goes_on_from_the_features_of_another(tmp_path: Path, device: str) -> None:
    random_checkpoint(tmp_path / "model", "serial")
    loaded = load_checkpoint(tmp_path / "model", torch.device(device))
    features = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    rows = []
    for fixed in (False, True):
        held = HeldBlocks(loaded, (0, 1, 2), fixed_shapes=fixed)
        own = held.new_caches((2,), alone=True)
        for base, end in ((0, 5), (5, 6)):
            work = RowWork(list(range(base, end)), 1, (2,), own, base, upstream_TD=features[base:end])
            (found,) = held.rows([work])
        rows.append(found.rows)
    np.testing.assert_allclose(rows[1], rows[0], atol=2e-3)


@pytest.mark.gpu
def test_a_captured_pass_is_replayed(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model", "independent")
    writer = Writer(tmp_path / "model", "cuda", fixed=True)
    (_, held), *_ = writer.holders
    writer.rows({0: [1, 2, 3]})
    writer.rows({0: [4]})
    assert held._fixed is not None
    before = list(held._fixed._captured.items())
    assert len(before) == 1
    first = writer.rows({0: [5]})[0]
    # The same memory, and other rows in it.
    assert list(held._fixed._captured.items()) == before
    assert not np.array_equal(first, writer.rows({0: [6]})[0])
