"""Several ranks that train one block give what one process gives, to rounding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from blocktrain.config import Recipe
from blocktrain.data.shards import Shards
from blocktrain.errors import UserError
from blocktrain.ids import CorpusHash
from blocktrain.training.device import HOST
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.ranks import Ranks, SpreadBatches, check_share, whole
from blocktrain.training.setup import Setup
from blocktrain.training.snapshot import tensors_of
from blocktrain.training.update import difference
from tests.forked import processes
from tests.tiny import tiny_recipe

TEXT = np.random.default_rng(0).integers(0, 256, 5000).astype(np.int64)
STEPS = 2
CASES = {
    "ours": ("training.micro_batch=3",),
    "ours-in-more-passes": ("training.micro_batch=1", "training.recompute=true"),
    "ours-with-adamw-and-clipped": ("training.optimizer=adamw", "training.clip_norm=0.01"),
    "llama": ("model.family=llama", "model.layers_per_block=3", "model.condition_width=64"),
    "behind-frozen-blocks": ("objective.kind=chain",),
}


def recipe_of(case: str) -> Recipe:
    return tiny_recipe("training.batch=6", "training.clip_norm=100", *CASES[case])


def trainer_of(recipe: Recipe, ranks: Ranks) -> BlockTrainer:
    setup = Setup.of(recipe)
    index = recipe.model.blocks - 1
    shards = Shards.of(recipe, TEXT, CorpusHash("0" * 64), HOST) if ranks.rank == 0 else None
    block = setup.initial(index)
    if ranks.sharded:
        ranks.shard(block)
    frozen = [setup.initial(one) for one in setup.objective.frozen(index)]
    batches = SpreadBatches(shards, recipe, ranks)
    trainer = BlockTrainer(
        recipe, setup.objective, block, index, batches, setup.codebook(), frozen=frozen, ranks=ranks
    )
    trainer.window_end = 1
    return trainer


def trained(recipe: Recipe, ranks: Ranks) -> dict[str, NDArray[np.float32]]:
    """How far each tensor has moved after some steps, the optimizer's state, and the last cross entropy."""
    trainer = trainer_of(recipe, ranks)
    first = tensors_of(Setup.of(recipe).initial(1))
    with ranks.together():
        for step in range(STEPS):
            ce = trainer.step(step, shard=1)
        weights = ranks.gather(trainer.block)
        state = {name: whole(one).float().numpy() for name, one in trainer.optimizer.state_tensors().items()}
    return {**difference(weights, first), **state, "ce": ce.numpy()}


def run_rank(rank: int, size: int, port: int, case: str, sharded: bool, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    met = Ranks.meet(HOST)
    ranks = Ranks(met.rank, met.size, HOST, sharded, met.commands)
    weights = trained(recipe_of(case), ranks)
    if rank == 0:
        save_file(dict(weights), out)
    ranks.part()


def by_ranks(size: int, case: str, sharded: bool, out: Path) -> Mapping[str, NDArray[np.float32]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        processes.Process(target=run_rank, args=(rank, size, store.port, case, sharded, out))
        for rank in range(size)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * size
    found: Mapping[str, NDArray[np.float32]] = load_file(out)
    return found


@pytest.mark.parametrize(
    ("case", "sharded"),
    [(case, sharded) for case in CASES for sharded in (False, True) if not sharded or "frozen" not in case],
)
def test_two_ranks_train_what_one_process_trains(case: str, sharded: bool, tmp_path: Path) -> None:
    alone, two = trained(recipe_of(case), Ranks()), by_ranks(2, case, sharded, tmp_path / "two")
    assert alone.keys() == two.keys()
    for name, values in alone.items():
        # Momenta are sums of gradients. Muon and Adam turn what is but rounding in a gradient into steps of
        # full size, so weights agree as tensors and not in every value.
        limit = 1e-3 if name[0].isdigit() else 0.03
        assert np.linalg.norm(two[name] - values) <= limit * np.linalg.norm(values), name


def test_ranks_that_cannot_share_a_batch_are_refused() -> None:
    with pytest.raises(UserError, match="start at most 6"):
        check_share(recipe_of("ours"), Ranks(size=8))
    check_share(recipe_of("ours"), Ranks(size=4))
    with pytest.raises(UserError, match="start 2 ranks"):
        check_share(recipe_of("ours"), Ranks(size=4, sharded=True))
