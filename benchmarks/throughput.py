"""Speed of block training beside a bare PyTorch loop over the same layers and batch.

    python benchmarks/throughput.py [--device cuda] [--width 384 --layers 3 --batch 64 --context 512]

Both run in the same process in alternating segments, so that what disturbs one disturbs the other; the median
of the segments' ratios is printed last. The bare loop has the same block, optimizers (BatchedMuon and AdamW),
precision and compiler, fixed batches and nothing else: no shards, hints, schedule, loss weights or
bookkeeping. Exits 1 when block training has less than MIN_RATIO of the bare loop's speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from provenance import check_claims
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.shards import Shards
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block
from blocktrain.model.objective import Objective
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.device import autocast
from blocktrain.training.inner import BlockTrainer, build_codebook
from blocktrain.training.optimizer import Optimizer

VOCABULARY = 256
MIN_RATIO = 0.9
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "4090": 165e12}


def bare_loop(recipe: Recipe, block: Block, table: Tensor, device: torch.device) -> Callable[[int], None]:
    optimizers = Optimizer(block, recipe.training).parts
    shape = (8, recipe.training.batch, recipe.model.context + 1)
    batches = torch.randint(0, VOCABULARY, shape, device=device)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        logits = block(x, table).logits_BTV
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    compiled = torch.compile(loss_of, dynamic=False) if device.type == "cuda" else loss_of

    def step(number: int) -> None:
        batch = batches[number % len(batches)]
        with autocast(device):
            loss = compiled(batch[:, :-1], batch[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(block.parameters(), recipe.training.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def our_loop(
    recipe: Recipe, objective: Objective, block: Block, device: torch.device
) -> Callable[[int], None]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2_000_000)
    shards = Shards(
        tokens,
        CorpusHash("random"),
        seed=0,
        batch=recipe.training.batch,
        context=recipe.model.context,
        device=device,
    )
    trainer = BlockTrainer(recipe, objective, block, 0, shards, build_codebook(recipe, VOCABULARY).to(device))

    def step(number: int) -> None:
        trainer.step(number, 0)

    return step


def seconds_per_step(step: Callable[[int], None], first: int, count: int, device: torch.device) -> float:
    started = time.perf_counter()
    for number in range(first, first + count):
        step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--segments", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps per segment")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    recipe = resolve_recipe(
        {
            "model": {
                "width": arguments.width,
                "heads": max(1, arguments.width // 64),
                "layers_per_block": arguments.layers,
                "context": arguments.context,
            },
            "training": {"batch": arguments.batch, "steps": 10**6},
        }
    )
    objective = Objective(recipe.model, recipe.objective, vocabulary=VOCABULARY)
    table = build_codebook(recipe, VOCABULARY).to(device)()
    ours_block = objective.build(0, seed=1).to(device)
    loops = {
        "bare": bare_loop(recipe, objective.build(0, seed=1).to(device), table, device),
        "ours": our_loop(recipe, objective, ours_block, device),
    }
    for step in loops.values():
        seconds_per_step(step, 0, 5, device)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for segment in range(arguments.segments):
        for name, step in loops.items():
            first = 5 + segment * arguments.steps
            times[name].append(seconds_per_step(step, first, arguments.steps, device))
    return report(recipe, ours_block, times, device)


def report(recipe: Recipe, block: Block, times: dict[str, list[float]], device: torch.device) -> int:
    tokens = recipe.training.batch * recipe.model.context
    flops = training_flops(forward_flops_per_token(recipe.model, block, VOCABULARY), 0, tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    print(f"{name}, width {recipe.model.width}, {block.num_layers} layers, {tokens} tokens per step")
    for loop, seconds in times.items():
        median = statistics.median(seconds)
        mfu = f"  MFU {flops / median / peak:.1%} of {peak / 1e12:.0f} TFLOP/s" if peak else ""
        print(f"{loop:<5} {1000 * median:8.2f} ms/step  {tokens / median:12,.0f} tokens/s{mfu}")
    ratio = statistics.median(b / o for b, o in zip(times["bare"], times["ours"], strict=True))
    print(f"speed of block training over the bare loop: {ratio:.3f}")
    return check_claims({f"at least {MIN_RATIO} of the bare loop's speed": ratio >= MIN_RATIO})


if __name__ == "__main__":
    sys.exit(main())
