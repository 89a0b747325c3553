"""What frozen blocks upstream cost: device memory, host memory and time of one block's training, by kind.

    python benchmarks/frozen.py [--device cuda]
    python benchmarks/frozen.py --quick           # CPU, a batch of 4

The last block of each kind trains on random bytes beside frozen first weights, for one round. Memory is what
reports count (`PeakMemory`); *time* is that of a step, preparing the frozen outputs included, and *compute*
its floating-point operations, both as multiples of `denoise`. Exits 1 when frozen blocks cost more than
MAX_MEMORY of the device memory or MAX_COMPUTE of the operations: they pass through one at a time.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from provenance import check_claims

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.shards import Shards
from blocktrain.ids import CorpusHash
from blocktrain.model.objective import Objective
from blocktrain.training.cost import PeakMemory, forward_flops_per_token, training_flops
from blocktrain.training.inner import BlockTrainer, build_codebook

VOCABULARY = 256
KINDS = ("denoise", "chain")
SHAPE = {"width": 384, "heads": 6, "layers_per_block": 3, "blocks": 4, "context": 512}
MAX_MEMORY, MAX_COMPUTE = 1.1, 2.2


@dataclass(frozen=True)
class Cost:
    kind: str
    device_bytes: int
    host_bytes: int
    flops: int
    seconds: float
    """Seconds of a step, without the first round, which compiles."""


def trainer_of(recipe: Recipe, device: torch.device) -> BlockTrainer:
    objective = Objective(recipe.model, recipe.objective, vocabulary=VOCABULARY)
    last = recipe.model.blocks - 1
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 200_000)
    return BlockTrainer(
        recipe,
        objective,
        objective.build(last, seed=last).to(device),
        last,
        Shards.of(recipe, tokens, CorpusHash("random"), device),
        build_codebook(recipe, VOCABULARY).to(device),
        frozen=[objective.build(b, seed=b) for b in objective.upstream(last)],
    )


def timed_round(trainer: BlockTrainer, first: int, steps: int) -> tuple[float, int]:
    """Seconds of a step, and the most host memory held."""
    trainer.window_end, held = first + steps, 0
    began = time.perf_counter()
    for step in range(first, first + steps):
        trainer.step(step, 0)
        held = max(held, trainer.frozen.host_bytes)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps, held


def flops_of(trainer: BlockTrainer) -> int:
    """Per token."""
    config = trainer.recipe.model
    forward = [
        forward_flops_per_token(config, block, VOCABULARY)
        for block in (trainer.block, *trainer.frozen.blocks)
    ]
    return training_flops(forward[0], sum(forward[1:]), 1)


def measure(kind: str, device: torch.device, batch: int, warmup: int, steps: int) -> Cost:
    training = {"batch": batch, "frozen_host_bytes": 1 << 30}
    recipe = resolve_recipe({"model": SHAPE, "training": training, "objective": {"kind": kind}})
    trainer = trainer_of(recipe, device)
    timed_round(trainer, 0, warmup)
    memory = PeakMemory(device)
    memory.reset()
    seconds, held = timed_round(trainer, warmup, steps)
    with memory.count_activations():
        timed_round(trainer, warmup + steps, 1)
    memory.count_state(trainer.block, trainer.optimizer)
    return Cost(kind, memory.peak_bytes, held, flops_of(trainer), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    batch, warmup, steps = (4, 1, 4) if arguments.quick else (64, 10, 30)
    found = [measure(kind, arguments.device, batch, warmup, steps) for kind in KINDS]
    plain = found[0]
    print("| kind | device memory | times `denoise` | host memory | ms per step | time | compute |")
    print("|---|---|---|---|---|---|---|")
    for cost in found:
        memory, host = f"{cost.device_bytes / 2**20:.0f} MiB", f"{cost.host_bytes / 2**20:.0f} MiB"
        ratios = cost.seconds / plain.seconds, cost.flops / plain.flops
        print(
            f"| `{cost.kind}` | {memory} | {cost.device_bytes / plain.device_bytes:.3f} | {host} | "
            f"{1000 * cost.seconds:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |",
            flush=True,
        )
    return check_claims(
        {
            f"{cost.kind}: at most {MAX_MEMORY} of the memory and {MAX_COMPUTE} of the operations": (
                cost.device_bytes <= MAX_MEMORY * plain.device_bytes
                and cost.flops <= MAX_COMPUTE * plain.flops
            )
            for cost in found
        }
    )


if __name__ == "__main__":
    sys.exit(main())
