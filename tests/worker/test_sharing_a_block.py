"""Whether the ranks of a worker copy a block or share it, by what it needs and what a device has."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from blocktrain.errors import DeviceError, UserError
from blocktrain.training.memory import block_needs
from blocktrain.training.ranks import Ranks
from blocktrain.training.setup import Setup
from blocktrain.worker.program import WorkerOptions, memory_to_tell
from tests.tiny import tiny_recipe

SIZE = 2
SETUP = Setup.of(tiny_recipe("model.width=128", "model.layers_per_block=4"))


@functools.cache
def needed(*, sharded: bool) -> int:
    return max(block_needs(SETUP.recipe, SETUP.objective, ranks=SIZE, sharded=sharded))


def options(bytes_each: int, shard: bool | None = None) -> WorkerOptions:
    # Ranks on CPUs share the memory of their machine.
    memory = SIZE * bytes_each
    return WorkerOptions("http://run.example", Path(), max_memory=memory, ranks=Ranks(size=SIZE), shard=shard)


def test_a_part_needs_less_than_a_copy_and_a_copy_less_than_one_process() -> None:
    assert needed(sharded=True) < needed(sharded=False) < max(block_needs(SETUP.recipe, SETUP.objective))


def test_ranks_share_a_block_only_where_it_does_not_fit_one_device() -> None:
    whole = max(block_needs(SETUP.recipe, SETUP.objective, "cuda"))
    assert memory_to_tell(options(needed(sharded=False)), SETUP) == (whole, False)
    # The coordinator lends by what one GPU would need: together the ranks have as much.
    assert memory_to_tell(options(needed(sharded=False) - 1), SETUP) == (whole, True)
    assert memory_to_tell(options(needed(sharded=False), shard=True), SETUP) == (whole, True)
    with pytest.raises(DeviceError, match="needs about"):
        memory_to_tell(options(needed(sharded=False) - 1, shard=False), SETUP)
    with pytest.raises(DeviceError, match="needs about"):
        memory_to_tell(options(needed(sharded=True) - 1), SETUP)


def test_blocks_beside_frozen_ones_are_not_shared() -> None:
    chain = Setup.of(tiny_recipe("objective.kind=chain"))
    with pytest.raises(UserError, match="frozen"):
        memory_to_tell(options(1 << 30, shard=True), chain)
    assert memory_to_tell(options(1 << 30), chain)[1] is False
