"""One worker through the coordinator with compression off is the local loop, bit for bit on CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from blocktrain.config import Recipe
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.snapshot import tensors_of
from blocktrain.wire.hashing import snapshot_hash
from tests.end_to_end.http_proxy import Plug, PlugProxy
from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe
from tests.waiting import until


def local_loop_hash(recipe: Recipe, out: Path) -> str:
    """The one block of `recipe` after rounds * H steps of the local run, as a snapshot hash."""
    torch.set_num_threads(1)
    training = dataclasses.replace(recipe.training, steps=recipe.swarm.total_steps)
    run = LocalRun(dataclasses.replace(recipe, training=training), out, torch.device("cpu"), Silent())
    run.train(resume=False)
    return snapshot_hash(tensors_of(run.blocks[0]))


def test_dense_swarm_of_one_equals_the_local_loop(kit: Kit, text: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(text)
    coordinator = Coordinator(kit, recipe).start()
    worker = kit.worker(coordinator.url)
    status = coordinator.finished()
    assert worker.wait() == 0, worker.text()
    assert status.blocks[0].head_hash == local_loop_hash(recipe, tmp_path / "local")
    assert coordinator.verify().merges == recipe.swarm.rounds


PLUGS = {
    "assignment lost": Plug("POST", "/v1/assignments", "answered"),
    "after assignment": Plug("POST", "/v1/assignments", "delivered"),
    "commit lost": Plug("POST", "/commit", "answered"),
    "after commit": Plug("POST", "/commit", "delivered"),
    "during upload": Plug("PUT", "", "half"),
    "verdict lost": Plug("PUT", "", "answered"),
    "after reveal": Plug("PUT", "", "delivered"),
    "during merge": Plug("PUT", "", "delivered", after_seconds=0.02),
}


def survive(kit: Kit, text: Path, tmp_path: Path, names: list[str], **model: int) -> None:
    """Pull the plug at each moment in turn; nothing may be lost, doubled or even rounded."""
    recipe = tiny_recipe(text, swarm={"rounds": len(names) + 3, "steps_per_round": 2}, model=model)
    coordinator = Coordinator(kit, recipe).start()
    proxy = PlugProxy(lambda: coordinator.port, coordinator.kill)
    worker = kit.worker(proxy.url)
    for name in names:
        until("the worker is at it", lambda: coordinator.status().workers)
        proxy.arm(PLUGS[name])
        until(f"the plug is pulled ({name})", proxy.pulled.is_set)
        before = coordinator.start().version()
        coordinator.reach(before + 1)
    status = coordinator.finished()
    assert worker.wait() == 0, worker.text()
    assert coordinator.verify().merges == recipe.swarm.rounds
    merged = [one.update_id for merge in coordinator.merges() for one in merge.inputs]
    assert len(merged) == len(set(merged)) == recipe.swarm.rounds
    assert status.blocks[0].head_hash == local_loop_hash(recipe, tmp_path / "local")
    proxy.close()


@pytest.mark.slow
def test_a_coordinator_killed_at_each_step_of_an_update(kit: Kit, text: Path, tmp_path: Path) -> None:
    survive(kit, text, tmp_path, list(PLUGS), width=256)
