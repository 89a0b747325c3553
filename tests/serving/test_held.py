"""Packing sessions into one forward pass changes nothing but speed."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.model.caches import FIRST_BYTES, FIRST_SLOTS, Cache, Shelf
from blocktrain.model.generation import LocalModel
from blocktrain.model.layers import LayerCache
from blocktrain.serving.batching import Batcher
from blocktrain.serving.blocks import HeldBlocks, RowWork, WeighedRows
from blocktrain.serving.engine.rows import LOG_WEIGHT_TOLERANCE, Part, Rows, pooled
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint

TEXTS = [b"The quick brown fox", b"a", b"def function(self):\n    return 1", b"Note that the class"]


@pytest.fixture(scope="module", params=["fixed weights", "weights by the text"])
def loaded(request: pytest.FixtureRequest, checkpoint: Path, following_checkpoint: Path) -> Checkpoint:
    chosen = checkpoint if request.param == "fixed weights" else following_checkpoint
    return load_checkpoint(chosen, torch.device("cpu"))


in_any_and_fixed_shapes = pytest.mark.parametrize("fixed", [False, True])


def consensus(loaded: Checkpoint, *said: tuple[tuple[int, ...], WeighedRows]) -> Rows:
    return pooled([Part(blocks, one, np.zeros(one.rows.shape)) for blocks, one in said], loaded.pooling)


def test_packed_sessions_equal_the_local_model(loaded: Checkpoint) -> None:
    held = HeldBlocks(loaded, range(3))
    works = [RowWork(list(text), 1, (0, 1, 2), held.new_caches([0, 1, 2])) for text in TEXTS]
    for text, said in zip(TEXTS, held.rows(works), strict=True):
        model = LocalModel(loaded.objective, loaded.blocks, loaded.codebook_VD, loaded.pooling)
        expected = model.next_log_probs(list(text)).double().numpy()
        rows = consensus(loaded, ((0, 1, 2), said))
        np.testing.assert_allclose(rows.log_probs[0], expected, atol=1e-5)
        assert rows.weights.sum() == pytest.approx(1)


def test_blocks_of_two_holders_add_up_to_the_whole(loaded: Checkpoint) -> None:
    whole = HeldBlocks(loaded, range(3))
    ids = list(TEXTS[0])
    one, two, all_three = (
        (blocks, whole.rows([RowWork(ids, 2, blocks, whole.new_caches(blocks))])[0])
        for blocks in ((0,), (1, 2), (0, 1, 2))
    )
    apart, together = consensus(loaded, one, two), consensus(loaded, all_three)
    np.testing.assert_allclose(apart.log_probs, together.log_probs, atol=1e-5)
    np.testing.assert_allclose(apart.weights, together.weights, atol=1e-5)
    some = consensus(loaded, two)
    assert some.weights[:, 0].tolist() == [0, 0]
    np.testing.assert_allclose(some.weights.sum(axis=1), 1)


@in_any_and_fixed_shapes
def test_continuing_and_cutting_back_equals_starting_over(loaded: Checkpoint, fixed: bool) -> None:
    held = HeldBlocks(loaded, range(3), fixed)
    text, wrong = list(TEXTS[2]), [1, 2, 3, 4]
    caches = held.new_caches([0, 1, 2])
    held.rows([RowWork(text[:10] + wrong, 5, (0, 1, 2), caches)])
    continued = held.rows([RowWork(text[10:], 3, (0, 1, 2), caches, base=10)])[0]
    fresh = held.rows([RowWork(text, 3, (0, 1, 2), held.new_caches([0, 1, 2]))])[0]
    np.testing.assert_allclose(continued.rows, fresh.rows, atol=1e-5)
    np.testing.assert_allclose(continued.log_weights, fresh.log_weights, atol=1e-5)


def test_exact_row_is_the_same_row_in_float64(loaded: Checkpoint) -> None:
    held = HeldBlocks(loaded, range(3))
    for text in TEXTS:
        caches = held.new_caches([0, 1, 2])
        said = held.rows([RowWork(list(text), 1, (0, 1, 2), caches)])[0]
        exact = held.rows([RowWork(list(text), 1, (0, 1, 2), caches, exact=True)])[0]
        assert exact.rows.dtype == np.float64
        np.testing.assert_allclose(said.rows, exact.rows, atol=2e-5)
        np.testing.assert_allclose(said.log_weights, exact.log_weights, atol=LOG_WEIGHT_TOLERANCE / 100)


@in_any_and_fixed_shapes
def test_texts_that_go_on_together_get_the_rows_they_get_alone(loaded: Checkpoint, fixed: bool) -> None:
    held = HeldBlocks(loaded, range(3), fixed)
    blocks = (0, 1, 2)
    # Drafts of 1 to 5 tokens, behind texts of which one outgrows its shelf, and one is too short for a
    # convolution.
    texts = [list(range(60)), [7, 8], list(TEXTS[0]), list(TEXTS[2])]
    caches = [held.new_caches(blocks) for _ in texts]
    held.rows([RowWork(text, 1, blocks, cache) for text, cache in zip(texts, caches, strict=True)])
    for step in range(4):
        drafts = [[(31 * m + step + i) % 256 for i in range(1 + (m + step) % 5)] for m in range(len(texts))]
        works = [
            RowWork(draft, len(draft), blocks, cache, len(text))
            for text, draft, cache in zip(texts, drafts, caches, strict=True)
        ]
        # In another order each time, and one text waits: its slot lies between those of the others.
        turn = [m for m in sorted(range(len(texts)), key=lambda m: (m * 3 + step) % 4) if m != step]
        for m, found in zip(turn, held.rows([works[m] for m in turn]), strict=True):
            text = texts[m] + drafts[m]
            alone = held.rows([RowWork(text, len(drafts[m]), blocks, held.new_caches(blocks))])[0]
            np.testing.assert_allclose(found.rows, alone.rows, atol=1e-5)
            np.testing.assert_allclose(found.log_weights, alone.log_weights, atol=1e-5)
            # Of each draft one token more is kept.
            texts[m] = text[: len(texts[m]) + 1]
    assert [len(text) for text in texts] == [63, 5, 22, 35]


@in_any_and_fixed_shapes
def test_a_slot_is_free_again_without_what_was_in_it(loaded: Checkpoint, fixed: bool) -> None:
    held, blocks = HeldBlocks(loaded, range(3), fixed), (0, 1, 2)

    def go_on(texts: list[bytes]) -> tuple[list[WeighedRows], list[Cache]]:
        caches = [held.new_caches(blocks) for _ in texts]
        for text, cache in zip(texts, caches, strict=True):
            held.rows([RowWork(list(text), 1, blocks, cache)])
        works = [RowWork([65], 1, blocks, c, len(t)) for t, c in zip(texts, caches, strict=True)]
        return held.rows(works), [cache[0].layers for cache in caches]

    _, before = go_on(TEXTS[2:])
    shelf, slot = before[0].shelf, before[0].slot
    assert shelf is not None
    with torch.inference_mode():
        for room in (room for rooms in shelf.rooms for room in rooms if room is not None):
            room[slot].fill_(torch.inf)
    del before[0]
    found, now = go_on([TEXTS[0], TEXTS[3]])
    assert now[0].shelf is shelf
    assert now[0].slot == slot
    for text, rows in zip((TEXTS[0], TEXTS[3]), found, strict=True):
        alone = held.rows([RowWork([*text, 65], 1, blocks, held.new_caches(blocks))])[0]
        np.testing.assert_allclose(rows.rows, alone.rows, atol=1e-5)


@in_any_and_fixed_shapes
@pytest.mark.parametrize("begins_first", [False, True])
def test_a_text_begins_with_another_that_goes_on_in_the_same_pass(
    loaded: Checkpoint, fixed: bool, begins_first: bool
) -> None:
    held, blocks = HeldBlocks(loaded, range(3), fixed), (0, 1, 2)
    # One needs a larger shelf for what follows, and its old slot is free from then on.
    known, other = list(range(60)), list(range(9, 40))
    caches = [held.new_caches(blocks) for _ in range(3)]
    for text, cache in zip((known, other), caches, strict=False):
        held.rows([RowWork(text, 1, blocks, cache)])
    held.rows([RowWork([7], 1, blocks, caches[0], 60), RowWork([7], 1, blocks, caches[1], 31)])
    goes_on = RowWork([1, 2, 3, 4, 5], 5, blocks, caches[0], 60)
    begins = RowWork([8, 9], 2, blocks, caches[2], 50, like=caches[0], known=known[:50])
    works = [goes_on, begins] if not begins_first else [begins, goes_on]
    works.append(RowWork([6], 1, blocks, caches[1], 32))
    found = dict(zip(map(id, works), held.rows(works), strict=True))
    for work, text in ((goes_on, known), (begins, known[:50])):
        alone = held.rows([RowWork([*text, *work.ids], work.num_rows, blocks, held.new_caches(blocks))])[0]
        np.testing.assert_allclose(found[id(work)].rows, alone.rows, atol=1e-5)
        np.testing.assert_allclose(found[id(work)].log_weights, alone.log_weights, atol=1e-5)
    assert caches[2][0].layers.length == 52


def test_a_text_that_begins_with_another_waits_only_for_what_is_not_cached_yet(loaded: Checkpoint) -> None:
    blocks, known = (0, 1, 2), list(range(40))

    async def passes(shared: list[int]) -> list[int]:
        """How many works each pass had, of a text that goes on and one that begins with it."""
        held, sizes = HeldBlocks(loaded, range(3)), list[int]()
        batcher = Batcher(held, observe=lambda works, tokens, seconds: sizes.append(works))
        first, second = held.new_caches(blocks), held.new_caches(blocks)
        await batcher.submit(RowWork(known, 1, blocks, first))
        goes_on = batcher.submit(RowWork([1, 2, 3], 1, blocks, first, 40))
        begins = RowWork([8, 9], 1, blocks, second, len(shared), like=first, known=shared)
        found = await batcher.submit(begins)
        await goes_on
        alone = held.rows([RowWork([*shared, 8, 9], 1, blocks, held.new_caches(blocks))])[0]
        np.testing.assert_allclose(found.rows, alone.rows, atol=1e-5)
        await batcher.close()
        return sizes

    assert asyncio.run(passes(known)) == [1, 2]
    assert asyncio.run(passes([*known, 1, 2])) == [1, 1, 1]


@in_any_and_fixed_shapes
def test_a_shelf_that_gets_more_slots_keeps_what_its_texts_hold(loaded: Checkpoint, fixed: bool) -> None:
    blocks = (0, 1, 2)
    held = HeldBlocks(loaded, range(3), fixed, first_bytes=1)
    caches = [held.new_caches(blocks) for _ in range(9)]
    texts = [[*b"Of text ", 65 + m] for m in range(len(caches))]
    # Three at a time, so that the shelf of those before grows while they wait.
    for some in (slice(0, 3), slice(3, 9), slice(0, 9)):
        for text, cache in zip(texts[some], caches[some], strict=True):
            if not cache[0].layers.length:
                held.rows([RowWork(text, 1, blocks, cache)])
        works = [
            RowWork([66], 1, blocks, cache, len(text))
            for text, cache in zip(texts[some], caches[some], strict=True)
        ]
        found = held.rows(works)
    shelf = caches[0][0].layers.shelf
    assert shelf is not None
    assert shelf.num_moves > 1
    for text, rows in zip(texts, found, strict=True):
        alone = held.rows([RowWork([*text, 66], 1, blocks, held.new_caches(blocks))])[0]
        np.testing.assert_allclose(rows.rows, alone.rows, atol=1e-5)


def test_a_shelf_takes_memory_when_a_text_gets_a_slot() -> None:
    shelf, texts = Shelf(capacity=4096, first_bytes=FIRST_BYTES), [Cache([LayerCache()]) for _ in range(2)]
    before = resident_bytes()
    for text in texts:
        keys = torch.ones(1, 8, 100, 64)
        text.layers[0].attend(keys, keys, keys)
        text.advance(100)
        shelf.put(text)
    whole = sum(room.nbytes for rooms in shelf.rooms for room in rooms if room is not None)
    assert shelf.num_slots == FIRST_SLOTS
    assert resident_bytes() - before < whole / 8


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.gpu
def test_a_captured_pass_gives_the_rows_of_passes_in_any_shape(checkpoint: Path) -> None:
    loaded, blocks = load_checkpoint(checkpoint, torch.device("cuda")), (0, 1, 2)
    rows: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for fixed, found in rows.items():
        held = HeldBlocks(loaded, range(3), fixed)
        caches = [held.new_caches(blocks) for _ in TEXTS]
        held.rows([RowWork(list(text), 1, blocks, cache) for text, cache in zip(TEXTS, caches, strict=True)])
        # Past a shelf of 64 positions, so that texts move; the shapes of even and odd steps come again.
        for step in range(40):
            ids = [65 + step] if step % 2 else [65, 66, 67]
            works = [
                RowWork(ids, len(ids), blocks, cache, cache[0].layers.length) for cache in caches[step % 3 :]
            ]
            found += [one.rows for one in held.rows(works)]
    for free, captured in zip(rows[False], rows[True], strict=True):
        np.testing.assert_allclose(captured, free, atol=1e-4)
