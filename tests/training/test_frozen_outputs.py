"""Frozen blocks run first, one at a time, and their features wait in host memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from blocktrain.config import Recipe
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import CorpusHash, derive_seed
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.cost import PeakMemory
from blocktrain.training.device import DeviceRoom
from blocktrain.training.frozen import upstream_features
from blocktrain.training.inner import BlockTrainer, build_codebook
from blocktrain.training.optimizer import Optimizer
from tests.tiny import prose, shaken, tiny_recipe

CPU = torch.device("cpu")
CHAIN = ("objective.kind=chain", "model.blocks=3")
STEPS = 6
STEP_BYTES = 4 * 32 * 32 * 4
"""Batch, context, width, fp32."""


def parts(*CHAIN: str, device: torch.device = CPU) -> tuple[Recipe, Objective, Shards]:
    recipe = tiny_recipe(f"training.steps={STEPS}", *CHAIN)
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    tokens = ByteTokenizer().encode(prose(4000))
    return recipe, objective, Shards.of(recipe, tokens, CorpusHash("00"), device)


def frozen_blocks(objective: Objective, index: int, seed: int = 0) -> list[Block]:
    return [shaken(objective.build(b, seed=b), seed=seed + b) for b in objective.upstream(index)]


def trainer(*CHAIN: str, index: int = 2, device: torch.device = CPU) -> BlockTrainer:
    recipe, objective, shards = parts(*CHAIN, device=device)
    block = objective.build(index, derive_seed("init", recipe.seed, index)).to(device)
    codebook = build_codebook(recipe, 256).to(device)
    frozen = frozen_blocks(objective, index)
    return BlockTrainer(recipe, objective, block, index, shards, codebook, frozen=frozen)


def losses(trainer: BlockTrainer) -> list[float]:
    return [float(trainer.step(step, shard=0)) for step in range(STEPS)]


def same_weights(first: Block, second: Block) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@contextmanager
def watched_forwards(note: list[Block]) -> Iterator[None]:
    """Notes every block that runs, before it does."""

    def hook(module: nn.Module, _: object) -> None:
        if isinstance(module, Block):
            note.append(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_the_loss_is_that_of_running_the_frozen_blocks_in_every_step() -> None:
    """Bit for bit, against a loop that calls the frozen blocks in every step."""
    found = trainer(*CHAIN)
    recipe, objective, shards = parts(*CHAIN)
    block = objective.build(2, derive_seed("init", recipe.seed, 2))
    optimizer, table = Optimizer(block, recipe.training), build_codebook(recipe, 256)()
    frozen = frozen_blocks(objective, 2)
    for step in range(STEPS):
        tokens, targets = shards.batch(0, step)
        generator = torch.Generator().manual_seed(derive_seed("noise", recipe.seed, 2, 0, step))
        hint = objective.draw_hint(2, targets, table, generator)
        assert hint is not None
        features = upstream_features(frozen, tokens, table)
        loss = objective.loss(block, tokens, targets, table, hint, features)
        loss.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step(step)
        assert float(found.step(step, shard=0)) == float(loss.ce)
    assert same_weights(found.block, block)


def test_without_frozen_blocks_there_are_no_features() -> None:
    recipe, objective, shards = parts(*CHAIN)
    tokens, _ = shards.batch(0, 0)
    assert upstream_features([], tokens, build_codebook(recipe, 256)()) is None


def test_blocks_that_are_asked_for_features_stay_where_they_were() -> None:
    recipe, objective, shards = parts(*CHAIN)
    tokens, _ = shards.batch(0, 0)
    frozen = frozen_blocks(objective, 2)
    features = upstream_features(frozen, tokens, build_codebook(recipe, 256)())
    assert features is not None
    assert not features.requires_grad
    assert {p.device for block in frozen for p in block.parameters()} == {CPU}


def test_upstream_features_reach_the_weights() -> None:
    one, other = trainer(*CHAIN), trainer(*CHAIN)
    other.freeze(frozen_blocks(other.objective, 2, seed=9))
    losses(one)
    losses(other)
    assert not same_weights(one.block, other.block)


@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_the_window_changes_no_result_and_keeps_to_its_host_memory(window: int) -> None:
    whole = trainer(*CHAIN)
    limit = max(1, window * STEP_BYTES)
    bounded = trainer(*CHAIN, f"training.frozen_host_bytes={limit}")
    for step in range(STEPS):
        assert float(bounded.step(step, shard=0)) == float(whole.step(step, shard=0))
        assert 0 < bounded.frozen.host_bytes <= max(limit, STEP_BYTES)
        assert whole.frozen.host_bytes == STEPS * STEP_BYTES
    assert same_weights(whole.block, bounded.block)


def test_a_window_holds_as_many_steps_as_fit_and_runs_each_frozen_block_once_for_each() -> None:
    one = trainer(*CHAIN, f"training.frozen_host_bytes={2 * STEP_BYTES + 1}")
    ran: list[Any] = []
    with watched_forwards(ran):
        losses(one)
    first, second = one.frozen.blocks
    own = one.block
    assert ran == [first, first, second, second, own, own] * 3


def test_a_window_ends_where_the_caller_says() -> None:
    one = trainer(*CHAIN)
    one.window_end = 2
    one.step(0, shard=0)
    assert one.frozen.host_bytes == 2 * STEP_BYTES
    one.step(2, shard=0)
    assert one.frozen.host_bytes == STEP_BYTES


def test_another_shard_is_prepared_again() -> None:
    one, fresh = trainer(*CHAIN), trainer(*CHAIN)
    one.step(0, shard=0)
    fresh.step(0, shard=0)
    fresh.freeze(fresh.frozen.blocks)
    assert float(one.step(1, shard=5)) == float(fresh.step(1, shard=5))


def test_freezing_drops_the_features_of_earlier_blocks() -> None:
    one, other = trainer(*CHAIN), trainer(*CHAIN)
    later = frozen_blocks(one.objective, 2, seed=9)
    one.step(0, shard=0)
    assert one.frozen.host_bytes > 0
    one.freeze(later)
    assert one.frozen.host_bytes == 0
    other.window_end = 1
    other.step(0, shard=0)
    other.freeze(copy.deepcopy(later))
    assert float(one.step(1, shard=0)) == float(other.step(1, shard=0))
    assert same_weights(one.block, other.block)


def test_a_chained_block_without_its_frozen_blocks_does_not_train() -> None:
    one = trainer(*CHAIN)
    one.freeze([])
    with pytest.raises(AssertionError, match="block 2 trains beside blocks"):
        one.step(0, shard=0)


def test_frozen_blocks_and_their_number_must_agree() -> None:
    one = trainer(*CHAIN)
    with pytest.raises(AssertionError, match=r"trains beside blocks \(0, 1\)"):
        one.freeze(frozen_blocks(one.objective, 2)[:1])


def test_every_pass_is_by_the_block_that_has_the_device() -> None:
    """The room is how weights come to the device and leave it; on CUDA the test below counts them there."""
    one, seated = trainer(*CHAIN), []

    def hook(module: nn.Module, _: object) -> None:
        if isinstance(module, Block):
            seated.append(one.room.block is module)

    handle = register_module_forward_pre_hook(hook)
    losses(one)
    handle.remove()
    assert len(seated) == 3 * STEPS
    assert all(seated)
    assert one.room.block is one.block


def test_a_block_that_takes_the_device_sends_the_other_to_host_memory() -> None:
    """`meta` stands for a device: what was sent there cannot be on the host as well."""
    _, objective, _ = parts(*CHAIN)
    first, second = objective.build(0, seed=0), objective.build(1, seed=1)
    room = DeviceRoom(torch.device("meta"))
    room.take(first)
    assert {p.device.type for p in first.parameters()} == {"meta"}
    with pytest.raises(NotImplementedError, match="meta"):
        room.take(second)
    assert {p.device.type for p in second.parameters()} == {"cpu"}


def test_when_a_frozen_block_fails_the_device_is_given_back_and_nothing_half_done_is_kept() -> None:
    one = trainer(*CHAIN)
    broken = frozen_blocks(one.objective, 2)
    broken[1].out = nn.Linear(3, 3)
    one.freeze(broken)
    with pytest.raises(RuntimeError, match="shape"):
        one.step(0, shard=0)
    assert one.room.block is one.block
    assert one.frozen.host_bytes == 0


def test_a_chained_block_needs_little_more_memory_than_a_published_one() -> None:
    """Weights, gradients, optimizer state and saved activations, as reports count them; the upstream map and
    the features themselves are the difference."""
    peaks = []
    for overrides in (("model.blocks=3",), CHAIN):
        one, memory = trainer(*overrides, "model.layers_per_block=2"), PeakMemory(CPU)
        with memory.count_activations():
            one.step(0, shard=0)
        memory.count_state(one.block, one.optimizer)
        peaks.append(memory.peak_bytes)
    assert peaks[0] < peaks[1] < 1.2 * peaks[0]


@pytest.mark.gpu
def test_the_gpu_never_holds_two_blocks_weights() -> None:
    device = torch.device("cuda")
    one = trainer(*CHAIN, "training.compile=false", device=device)
    blocks = [one.block, *one.frozen.blocks]
    counts: list[int] = []

    def hook(module: nn.Module, _: object) -> None:
        if isinstance(module, Block):
            held = [b for b in blocks if any(p.is_cuda for p in b.parameters())]
            assert held == [module]
            counts.append(sum(p.numel() for b in blocks for p in b.parameters() if p.is_cuda))

    handle = register_module_forward_pre_hook(hook)
    losses(one)
    handle.remove()
    assert len(counts) == 3 * STEPS
    assert max(counts) == max(sum(p.numel() for p in block.parameters()) for block in blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_on_the_gpu_too_the_window_changes_no_result(compiled: str) -> None:
    device = torch.device("cuda")
    found = []
    for limit in (1, 1 << 30):
        one = trainer(
            *CHAIN,
            f"training.frozen_host_bytes={limit}",
            f"training.compile={compiled}",
            device=device,
        )
        found.append(losses(one))
        assert {part.dtype for part in one.frozen._kept.values()} == {torch.bfloat16}
        assert all(part.is_pinned() for part in one.frozen._kept.values())
    assert found[0] == found[1]
