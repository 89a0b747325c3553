"""Training of large Llama blocks on one GPU: share of its peak, ratio to a bare loop, memory.

    python benchmarks/large_blocks.py --out large-blocks.json      # an H200: under 4 minutes
    python benchmarks/large_blocks.py --recipes gpt2-small:50257 one-billion covenant
    python benchmarks/large_blocks.py --tiny --device cpu          # tries the script itself

Needs torch, numpy and safetensors only, and no text: tokens are random, as time and memory do not depend on
them. A step is what a worker does: `BlockTrainer.step`, by micro-batches, clipping and Muon included. The
share is `training.cost.training_flops` (6 operations per parameter and token, half of attention's square,
nothing for recomputing) over 989 TFLOP/s. The bare loop calls the same block, loss and optimizers on the same
device without trainer, batches or schedule. Exits with 1 where a claim of CLAIMS fails.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import write_report
from torch import Tensor, nn

from blocktrain.config import Recipe, find_recipe, load_recipe, resolve_recipe
from blocktrain.data.shards import Shards
from blocktrain.ids import CorpusHash
from blocktrain.model.block import num_parameters
from blocktrain.model.objective import Objective
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.device import autocast
from blocktrain.training.inner import BlockTrainer, build_codebook
from blocktrain.training.memory import training_bytes

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200, by its data sheet."""
CLAIMS = {"share": 0.45, "of_bare": 0.97, "recompute_bytes": 24e9}
TOKENS_PER_STEP = 131_072


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    heads: int
    kv_heads: int
    layers: int
    feedforward_width: int
    context: int
    vocabulary: int
    batch: int
    micro_batch: int
    """Where memory is plenty."""
    small_micro_batch: int
    """Where recomputing is to save it."""


SHAPES = [
    Shape("width 2048", 2048, 16, 8, 22, 5632, 2048, 32768, TOKENS_PER_STEP // 2048, 16, 4),
    Shape("width 4096", 4096, 32, 8, 4, 14336, 2048, 32768, TOKENS_PER_STEP // 2048, 16, 4),
]
TINY = [Shape("tiny", 64, 4, 2, 2, 160, 64, 4096, 8, 4, 2)]


def recipe_of(shape: Shape, *, recompute: bool) -> Recipe:
    return resolve_recipe(
        {
            "name": shape.name,
            "model": {
                "family": "llama",
                "width": shape.width,
                "heads": shape.heads,
                "kv_heads": shape.kv_heads,
                "blocks": 1,
                "layers_per_block": shape.layers,
                "feedforward_width": shape.feedforward_width,
                "context": shape.context,
            },
            "training": {
                "steps": 1000,
                "batch": shape.batch,
                "micro_batch": shape.small_micro_batch if recompute else shape.micro_batch,
                "recompute": recompute,
                "momentum": "bfloat16",
            },
        },
        environment={},
    )


class Clock:
    """Seconds of the device inside its `with`; all work before it is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> Clock:
        self.wait()
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.seconds += time.perf_counter() - self.started


def built(recipe: Recipe, vocabulary: int, device: torch.device) -> BlockTrainer:
    objective = Objective(recipe.model, recipe.objective, vocabulary=vocabulary)
    tokens = np.random.default_rng(0).integers(0, vocabulary, 256 * recipe.model.context)
    shards = Shards.of(recipe, tokens, CorpusHash("00"), device)
    block = objective.build(0, seed=0).to(device).train()
    codebook = build_codebook(recipe, vocabulary).to(device)
    return BlockTrainer(recipe, objective, block, 0, shards, codebook)


def bare_step(trainer: BlockTrainer, tokens: Tensor, targets: Tensor) -> None:
    """The same kernels in a loop that anybody would write."""
    block, size, optimizer = trainer.block, trainer.micro_batch, trainer.optimizer
    for start in range(0, len(tokens), size):
        part = slice(start, start + size)
        with autocast(trainer.device):
            loss = trainer.objective.loss(block, tokens[part], targets[part], trainer.codebook())
        (loss.total * (size / len(tokens))).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(optimizer.parameters, 1.0)
    for one in optimizer.parts:
        one.step()
        one.zero_grad(set_to_none=True)


def alternating(trainer: BlockTrainer, steps: int) -> tuple[float, float]:
    """Seconds of a step, ours and bare, in turns, so that a clock that drifts meets both; medians."""
    tokens, targets = trainer.shards.batch(0, 0)
    ours, bare = [], []
    for step in range(steps):
        with Clock(trainer.device) as clock:
            trainer.step(step, 0)
        ours.append(clock.seconds)
        with Clock(trainer.device) as clock:
            bare_step(trainer, tokens, targets)
        bare.append(clock.seconds)
    return float(np.median(ours)), float(np.median(bare))


def shares(trainer: BlockTrainer, seconds: float, steps: int) -> dict[str, float | None]:
    """What a step spends on optimizer and batches, and how long the device waits for Python."""
    optimizer, data = Clock(trainer.device), Clock(trainer.device)
    trainer.step(0, 0)
    for step in range(steps):
        # The optimizer alone, on gradients as large as a step's.
        for parameter in trainer.optimizer.parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        with optimizer:
            trainer.optimizer.step(step)
        with data:
            trainer.shards.batch(0, step)
    return {
        "optimizer": optimizer.seconds / steps / seconds,
        "data": data.seconds / steps / seconds,
        "host": idle_share(trainer),
    }


def idle_share(trainer: BlockTrainer) -> float | None:
    """Share of a step in which no kernel runs; None where the profiler does not see the device."""
    if trainer.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile, Clock(trainer.device) as clock:
        trainer.step(0, 0)
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return max(0.0, 1 - busy / clock.seconds) if busy else None


def measure(shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    trainer = built(recipe_of(shape, recompute=False), shape.vocabulary, device)
    recipe, block = trainer.recipe, trainer.block
    began = time.perf_counter()
    with Clock(device):
        trainer.step(0, 0)
    first = time.perf_counter() - began
    reset_peak(device)
    ours, bare = alternating(trainer, steps)
    tokens = shape.batch * shape.context
    forward = forward_flops_per_token(recipe.model, block, shape.vocabulary)
    found: dict[str, Any] = {
        "shape": asdict(shape),
        "parameters": num_parameters(block),
        "tokens_per_step": tokens,
        "first_step_seconds": first,
        "step_seconds": ours,
        "bare_step_seconds": bare,
        "tokens_per_second": tokens / ours,
        "share": training_flops(forward, 0, tokens) / ours / PEAK_FLOPS,
        "of_bare": bare / ours,
        "peak_bytes": peak(device),
        "time": shares(trainer, ours, 2),
    }
    del trainer, block
    found["recompute"] = recomputed(shape, device)
    return found


def recomputed(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Memory and time with recomputing and small micro-batches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak(device)
    trainer = built(recipe_of(shape, recompute=True), shape.vocabulary, device)
    trainer.step(0, 0)
    with Clock(device) as clock:
        trainer.step(1, 0)
    return {"step_seconds": clock.seconds, "peak_bytes": peak(device), "micro_batch": trainer.micro_batch}


def of_recipe(name: str, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """A block of a shipped recipe as it stands there: what it takes, and how long."""
    recipe = load_recipe(find_recipe(name), environment={})
    reset_peak(device)
    trainer = built(recipe, vocabulary, device)
    trainer.step(0, 0)
    with Clock(device) as clock:
        trainer.step(1, 0)
    tokens = recipe.training.batch * recipe.model.context
    found = {
        "recipe": name,
        "vocabulary": vocabulary,
        "parameters": num_parameters(trainer.block),
        "micro_batch": trainer.micro_batch,
        "step_seconds": clock.seconds,
        "tokens_per_second": tokens / clock.seconds,
        "hours_of_a_block": recipe.training.steps * clock.seconds / 3600,
        "peak_bytes": peak(device),
        "foretold_bytes": training_bytes(
            recipe, trainer.objective, device.type, micro_batch=trainer.micro_batch
        ),
        "least_bytes": training_bytes(recipe, trainer.objective, "cuda", micro_batch=1),
    }
    print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return found


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def failures(found: dict[str, Any]) -> list[str]:
    failed = []
    if found["share"] < CLAIMS["share"]:
        failed.append(f"share of peak {found['share']:.1%}, claimed {CLAIMS['share']:.0%}")
    if found["of_bare"] < CLAIMS["of_bare"]:
        failed.append(f"{found['of_bare']:.1%} of the bare loop's speed, claimed {CLAIMS['of_bare']:.0%}")
    if found["shape"]["width"] == 2048 and found["recompute"]["peak_bytes"] > CLAIMS["recompute_bytes"]:
        failed.append(f"peak of {found['recompute']['peak_bytes'] / 1e9:.1f} GB with recompute, claimed 24")
    return failed


def show(found: dict[str, Any]) -> None:
    def percent(share: float | None) -> str:
        return "?" if share is None else f"{share:.1%}"

    again, spent = found["recompute"], found["time"]
    print(f"\n{found['shape']['name']}: {found['parameters'] / 1e9:.3f} B parameters")
    print(f"  step                 {found['step_seconds']:.3f} s, {found['tokens_per_second']:,.0f} tokens/s")
    print(f"  share of peak        {percent(found['share'])} of 989 TFLOP/s, optimizer counted")
    print(f"  of the bare loop     {percent(found['of_bare'])} ({found['bare_step_seconds']:.3f} s)")
    print(
        f"  time in              optimizer {percent(spent['optimizer'])}, data {percent(spent['data'])}, "
        f"device idle {percent(spent['host'])}"
    )
    print(f"  peak memory          {found['peak_bytes'] / 1e9:.2f} GB")
    print(
        f"  with recompute       {again['peak_bytes'] / 1e9:.2f} GB, {again['step_seconds']:.3f} s, "
        f"{again['micro_batch']} sequences at once"
    )
    print(f"  first step           {found['first_step_seconds']:.1f} s, compilation included", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a shape for trying the script; claims nothing")
    parser.add_argument("--only", type=int, help="the shape of this width alone")
    parser.add_argument(
        "--recipes", nargs="*", default=[], metavar="NAME:VOCABULARY", help="measure these recipes instead"
    )
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = TINY if options.tiny else [one for one in SHAPES if options.only in (None, one.width)]
    results: list[dict[str, Any]] = []
    for one in options.recipes:
        name, _, vocabulary = one.partition(":")
        results.append(of_recipe(name, int(vocabulary or 32768), device))
        write_report(options.out, "large_blocks", {"results": results}, [0])
    failed = []
    for shape in [] if options.recipes else shapes:
        found = measure(shape, device, options.steps)
        show(found)
        results.append(found)
        # After each shape: a run that is cut off leaves what it has.
        write_report(options.out, "large_blocks", {"results": results}, [0])
        failed += [] if options.tiny else [f"{shape.name}: {one}" for one in failures(found)]
    for one in failed:
        print(f"FAIL {one}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
