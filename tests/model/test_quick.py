"""Rough rows for drafts: near the block's own, one token at a time, over the same cache."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktrain.model import quick as quick_module
from blocktrain.model.block import Block
from blocktrain.model.generation import window_start
from blocktrain.model.quick import PlainBlocks, QuickBlocks, is_quickenable
from blocktrain.model.tails import FIRST_SLOTS, TAIL
from tests.tiny import adaptive, shaken, some_tokens, tiny_codebook, tiny_objective

LENGTH = 24


@pytest.fixture(params=["small matrices", "8 bits"], autouse=True)
def _matrices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiny blocks are small; larger ones are rounded."""
    if request.param == "8 bits":
        monkeypatch.setattr(quick_module, "SMALL_MATRIX", 0)


def two_blocks(*overrides: str) -> tuple[list[Block], torch.Tensor]:
    objective = tiny_objective(*overrides)
    return [shaken(objective.build(i, seed=i)) for i in range(2)], tiny_codebook(objective)


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Weights of 8 bits move log-probs by a few hundredths of how much these blocks' vary."""
    return bool((found - expected).abs().mean() < 0.05 * expected.std())


def exact_rows(blocks: list[Block], tokens: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Log-probs [T, N, V]."""
    with torch.no_grad():
        return torch.stack([block(tokens, codebook).logits_BTV[0] for block in blocks], 1).log_softmax(-1)


@pytest.mark.parametrize("steps", [QuickBlocks, PlainBlocks])
@pytest.mark.parametrize(
    "shape",
    [
        "model.convolution=4",
        "model.convolution=0",
        "model.mixer=none",
        "model.layers_per_block=2",
        "objective.codebook=own objective.hint_probability=0",
    ],
)
def test_rows_token_by_token_are_near_those_of_the_whole_text(shape: str, steps: type[QuickBlocks]) -> None:
    blocks, codebook = two_blocks(*shape.split())
    if steps is QuickBlocks and not is_quickenable(blocks[0]):
        assert shape == "model.mixer=none"
        return
    tokens = some_tokens(1, LENGTH)
    expected = exact_rows(blocks, tokens, codebook)
    quick = steps([adaptive(block) for block in blocks], codebook)
    cache = quick.new_cache()
    for i, token in enumerate(tokens[0].tolist()):
        found = quick.step([token], [cache])[:, 0].log_softmax(dim=-1)
        assert is_near(found, expected[i])
    assert cache.length == LENGTH


@pytest.mark.parametrize("steps", [QuickBlocks, PlainBlocks])
def test_steps_and_whole_passes_share_one_cache(steps: type[QuickBlocks]) -> None:
    blocks, codebook = two_blocks()
    tokens = some_tokens(1, LENGTH)
    text = tokens[0].tolist()
    expected = exact_rows(blocks, tokens, codebook)
    quick = steps([adaptive(block) for block in blocks], codebook)
    cache = quick.new_cache()
    quick.extend(text[:10], cache)
    quick.step([text[10]], [cache])
    quick.step([3], [cache])
    cache.truncate(11)
    quick.extend(text[11:-1], cache)
    found = quick.step([text[-1]], [cache])[:, 0].log_softmax(dim=-1)
    assert is_near(found, expected[-1])


@pytest.mark.parametrize("steps", [QuickBlocks, PlainBlocks])
def test_several_texts_in_one_step_get_nearly_the_rows_they_get_alone(steps: type[QuickBlocks]) -> None:
    blocks, codebook = two_blocks()
    quick = steps([adaptive(block) for block in blocks], codebook)
    # Of different lengths, one shorter than the convolution's taps.
    texts = [some_tokens(1, length)[0].tolist() for length in (1, 9, 24)]
    alone, together = ([quick.new_cache() for _ in texts] for _ in range(2))
    for caches in (alone, together):
        for text, cache in zip(texts[1:], caches[1:], strict=True):
            quick.extend(text[:-1], cache)
    last = [text[-1] for text in texts]
    expected = torch.cat([quick.step([t], [cache]) for t, cache in zip(last, alone, strict=True)], dim=1)
    # Another kernel multiplies several rows.
    assert is_near(quick.step(last, together), expected)
    assert [cache.length for cache in together] == [1, 9, 24]


@pytest.mark.parametrize("convolution", [0, 4])
def test_the_first_block_and_the_others_read_a_text_apart_as_they_do_together(convolution: int) -> None:
    blocks, codebook = two_blocks(f"model.convolution={convolution}")
    quick = QuickBlocks([adaptive(block) for block in blocks], codebook)
    text = some_tokens(1, LENGTH)[0].tolist()
    one_by_one, apart = quick.new_cache(), quick.new_cache()
    expected = torch.cat([quick.step([token], [one_by_one]) for token in text], dim=1)
    # From an empty cache on, in stretches of other lengths, behind positions that are written twice.
    first, others = quick.leading
    apart.reserve(LENGTH)
    ahead = torch.cat([first.read(text[:1], apart, 0), first.read(text[1:], apart, 1)], dim=1)
    others.read([3, 3, 3, 3], apart, 2)
    behind = [others.read(text[at : at + 4], apart, at) for at in range(0, LENGTH, 4)]
    # Rows of 8 bits and bf16 differ by the kernel that a number of rows gets.
    assert is_near(torch.cat([ahead, torch.cat(behind, dim=1)]), expected)
    apart.length += LENGTH
    assert is_near(quick.step([5], [apart]), quick.step([5], [one_by_one]))
    assert apart.length == one_by_one.length == LENGTH + 1


def test_a_block_with_parts_unknown_to_the_quick_path_is_not_for_it() -> None:
    objective = tiny_objective()
    block = objective.build(0, seed=0)
    assert is_quickenable(block)
    block.add_module("something_new", nn.Linear(2, 2))
    assert not is_quickenable(block)


@pytest.mark.parametrize("convolution", [0, 4])
def test_the_ends_of_texts_say_what_the_whole_texts_do(convolution: int) -> None:
    blocks, codebook = two_blocks(f"model.convolution={convolution}")
    quick = QuickBlocks([adaptive(block) for block in blocks], codebook)
    # One shorter than the convolution's taps; more texts than there are slots to begin with.
    texts = [some_tokens(1, length)[0].tolist() for length in (1, 2, *range(3, 12), LENGTH)]
    caches = [quick.new_cache() for _ in texts]
    for text, cache in zip(texts, caches, strict=True):
        if len(text) > 1:
            quick.extend(text[:-1], cache)
    tails = [quick.tail_of(cache) for cache in caches]
    last = [text[-1] for text in texts]
    expected = quick.step(last, caches)
    assert is_near(quick.step(last, tails), expected)
    # A wrong draft is forgotten, some of the texts go on alone, and in another order.
    for _ in range(3):
        quick.step([7] * len(tails), tails)
    for tail, cache in zip(tails, caches, strict=True):
        tail.truncate(cache.length)
    chosen = [9, 2, 3, 11]
    expected = quick.step([5, 6, 7, 8], [caches[i] for i in chosen])
    found = quick.step([5, 6, 7, 8], [tails[i] for i in chosen])
    assert is_near(found, expected)
    assert [tails[i].length for i in chosen] == [caches[i].length for i in chosen]


@pytest.mark.parametrize("convolution", [0, 4])
def test_the_end_of_a_long_text_is_its_last_positions(convolution: int) -> None:
    blocks, codebook = two_blocks(f"model.context={4 * TAIL}", f"model.convolution={convolution}")
    quick = QuickBlocks([adaptive(block) for block in blocks], codebook)
    text = some_tokens(1, 3 * TAIL)[0].tolist()
    cache = quick.new_cache()
    quick.extend(text[: 2 * TAIL - 5], cache)
    early = quick.tail_of(cache)
    for at in range(2 * TAIL - 5, len(text) - 1):
        # Now and then a draft is wrong, also across the place where the places begin again.
        if at % 3 == 0:
            for wrong in (1, 2, 3, 4):
                quick.step([wrong], [early])
            early.truncate(at)
        quick.step([text[at]], [early])
    quick.extend(text[2 * TAIL - 5 : -1], cache)
    # Of keys that were read in one pass, and of those that were drafted over: both see as many.
    late = quick.tail_of(cache)
    assert early.length == late.length == len(text) - 1
    early_rows, late_rows = quick.step(text[-1:], [early]), quick.step(text[-1:], [late])
    assert is_near(early_rows, late_rows)
    assert not is_near(quick.step([3], [early]), late_rows), "rows differ by more than they are near"


def test_where_the_window_slides_steps_go_on_with_what_it_shows() -> None:
    context = 32
    overrides = ("model.layers_per_block=1", "model.convolution=0", f"model.context={context}")
    blocks, codebook = two_blocks(*overrides)
    quick = QuickBlocks([adaptive(block) for block in blocks], codebook)
    tokens = some_tokens(1, 3 * context)
    text = tokens[0].tolist()
    cache = quick.new_cache()
    quick.extend(text[: context // 2], cache)
    tail = quick.tail_of(cache)
    for at in range(context // 2, len(text)):
        rows = quick.step(text[at : at + 1], [cache]), quick.step(text[at : at + 1], [tail])
        # In one layer a key depends on its token alone, so that nothing is left of what came before.
        window = tokens[:, window_start(at + 1, context) : at + 1]
        expected = exact_rows(blocks, window, codebook)[-1]
        assert all(is_near(found[:, 0].log_softmax(dim=-1), expected) for found in rows), at
    # Some positions at once, as a draft that is alone has them read.
    several = quick.read(text[-4:], cache, len(text) - 4)[:, -1].log_softmax(dim=-1)
    assert is_near(several, expected)


def test_one_row_of_a_width_that_is_no_multiple_of_16_is_multiplied_in_fp32() -> None:
    # The kernel of 8 bits for one row ended the process: it read beyond the row.
    linear, x = nn.Linear(136, 600, bias=False).requires_grad_(False), torch.randn(1, 1, 136)
    found = quick_module._Product([linear])(x.numpy())
    assert torch.allclose(torch.from_numpy(found), linear(x), atol=1e-4)


def test_a_slot_is_free_when_nobody_holds_its_text_any_more() -> None:
    blocks, codebook = two_blocks()
    quick = QuickBlocks([adaptive(block) for block in blocks], codebook)
    tails = [quick.tail_of(quick.new_cache()) for _ in range(3)]
    assert [tail.slot for tail in tails] == [0, 1, 2]
    del tails[1]
    assert quick.tail_of(quick.new_cache()).slot == 1
    # After a busy moment its memory goes.
    tails = [quick.tail_of(quick.new_cache()) for _ in range(FIRST_SLOTS + 1)]
    assert len(quick.tails.arrays.positions) > FIRST_SLOTS
    tails.clear()
    assert quick.tail_of(quick.new_cache()).slot == 0
    assert len(quick.tails.arrays.positions) == FIRST_SLOTS
    assert quick.tails.num_used == 1
