"""One large machine among small ones: real programs, each of which is lent what fits its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.judge.ledger_check import open_source
from blocktrain.local.assembly import save_final_checkpoint
from blocktrain.training.checkpoint import load_checkpoint
from blocktrain.training.device import HOST
from blocktrain.training.memory import block_needs
from blocktrain.training.setup import Setup
from tests.end_to_end.swarm_kit import Coordinator, Kit, tiny_recipe


def pooled_loss(kit: Kit, text: Path, name: str, last_layers: int) -> float:
    """Of a swarm of three small machines and one that has room for `last_layers`: 240 steps of each block."""
    recipe = tiny_recipe(
        text,
        model={"blocks": 4, "block_layers": [1, 1, 1, last_layers]},
        training={"batch": 16, "warmup_steps": 20, "reference": False},
        swarm={"steps_per_round": 60, "rounds": 4, "max_deadline_seconds": 60.0},
        trust={"judge": "coordinator", "probation_verdicts": 0, "stamp_bits": 0},
    )
    needs = block_needs(recipe, Setup.of(recipe).objective, "cuda")
    coordinator = Coordinator(kit, recipe, name=name).start()
    for number, need in enumerate(needs):
        kit.worker(coordinator.url, f"{name}-{number}", "--max-memory", str(1.05 * need / 1e9))
    coordinator.finished()
    with open_source(coordinator.url) as source:
        return float(save_final_checkpoint(source, kit.folder / f"{name}-checkpoint")["consensus_ce"])


@pytest.mark.slow
def test_one_large_machine_among_small_ones_lowers_the_pooled_loss(kit: Kit, text: Path) -> None:
    equal = pooled_loss(kit, text, "equal", 1)
    unequal = pooled_loss(kit, text, "unequal", 6)
    print(f"pooled loss: four equal blocks {equal:.4f}, one of six layers among them {unequal:.4f}")
    assert unequal < equal - 0.01


def test_the_large_block_is_lent_to_the_large_machine_and_all_blocks_are_trained(
    kit: Kit, text: Path
) -> None:
    recipe = tiny_recipe(
        text,
        model={"blocks": 4, "block_layers": [1, 1, 1, 6]},
        training={"batch": 8, "warmup_steps": 2, "reference": False},
        swarm={"steps_per_round": 5, "rounds": 2, "max_deadline_seconds": 10.0},
        trust={"judge": "coordinator", "probation_verdicts": 0, "stamp_bits": 0},
    )
    small, *_, large = block_needs(recipe, Setup.of(recipe).objective, "cuda")
    between = str((small + large) / 2 / 1e9)
    coordinator = Coordinator(kit, recipe).start()
    kit.worker(coordinator.url, "large", "--label", "large", "--max-memory", str(2 * large / 1e9))
    for number in range(3):
        kit.worker(coordinator.url, f"small-{number}", "--label", "small", "--max-memory", between)
    status = coordinator.finished()
    assert [block.head_version for block in status.blocks] == [2, 2, 2, 2]
    labels = {worker.worker_id: worker.label for worker in status.workers}
    lent = [entry.body for entry in coordinator.ledger() if entry.kind == "assign"]
    assert {labels[body["worker_id"]] for body in lent if body["block"] == 3} == {"large"}
    assert "small" in {labels[body["worker_id"]] for body in lent}
    assert coordinator.verify().merges == 8

    with open_source(coordinator.url) as source:
        scores = save_final_checkpoint(source, kit.folder / "checkpoint")
    assert scores["consensus_ce"] < max(scores["block_ce"]) < 5.5, "ln 256 is 5.545"
    assert [b.num_layers for b in load_checkpoint(kit.folder / "checkpoint", HOST).blocks] == [1, 1, 1, 6]
