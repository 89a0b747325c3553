"""Does depth compose? Blocks of equal size, more and more of them, beside end-to-end models as deep.

    python benchmarks/depth.py --corpus W [--device cuda] [--seeds 0] [--jobs 4] [--json FILE]
    python benchmarks/depth.py --quick            # CPU, builtin text, about a minute

Consensus of B = 1, 2, 4, 8 blocks beside end-to-end models of the same number of layers, at equal
bytes per unit; shallow end-to-end models get the better of two learning rates. Blocks are trained once:
independent blocks of a larger B contain those of a smaller one, so the table pools prefixes.
Units are independent and train in `--jobs` processes. Objectives that need other blocks were measured too and
lost: docs/decisions/0008, with the program at commit 59aa936.

Also fits composed loss = limit + spread / B, which is what averaging B exchangeable predictors gives, and
prints how far the rows are from it. Exits 1 when a doubling of B does not help, or when (without --quick) the
gap to end to end is above MAX_GAP at any B.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import check_claims, write_report
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.families import build_block
from blocktrain.model.objective import Objective
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer, build_codebook

FULL = {"width": 384, "heads": 6, "layers_per_block": 3, "context": 512}
QUICK = {"width": 48, "heads": 2, "layers_per_block": 1, "context": 64}
BLOCK_LR, DEEP_LR = 3e-3, 1e-3
MAX_GAP = 0.02
SHALLOW_LAYERS = 6
"""Up to here an end-to-end model may prefer the blocks' learning rate; 12 layers were 0.028 worse with it."""


@dataclass(frozen=True)
class Unit:
    """One model to train: block `index` of a recipe, or `deep` blocks' layers end to end."""

    seed: int
    index: int | None
    deep: int = 0
    other_lr: float = BLOCK_LR


@dataclass(frozen=True)
class Setting:
    """What is the same for all units; travels to the processes."""

    corpus: str
    device: str
    steps: int
    quick: bool

    def recipe(self, seed: int, blocks: int, other_lr: float) -> Recipe:
        training = {"steps": 60, "batch": 8, "warmup_steps": 6} if self.quick else {"steps": self.steps}
        values: dict[str, Any] = {
            "name": "depth",
            "seed": seed,
            "model": {**(QUICK if self.quick else FULL), "blocks": blocks},
            "objective": {"hint_probability": 0.0},
            "data": {"corpus": self.corpus, "max_bytes": 1_000_000 if self.quick else None},
            "training": {**training, "other_lr": other_lr, "reference_other_lr": None},
            "evaluation": {"max_bytes": 10_000, "pooling_bytes": 10_000} if self.quick else {},
        }
        return resolve_recipe(values)


class Bench:
    """One recipe's text, objective and evaluator on one device."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        tokenizer = ByteTokenizer()
        corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
        self.vocabulary = tokenizer.vocabulary
        self.objective = Objective(recipe.model, recipe.objective, vocabulary=self.vocabulary)
        self.codebook = build_codebook(recipe, self.vocabulary).to(device)
        self.shards = Shards.of(recipe, tokenizer.encode(corpus.train), corpus.sha256, device)
        self.pool = tokenizer.encode(corpus.pool)
        self.valid = tokenizer.encode(corpus.valid[: recipe.evaluation.max_bytes])
        self.evaluator = Evaluator(self.objective, self.codebook(), recipe.evaluation, seed=recipe.seed)

    def build(self, unit: Unit) -> Block:
        if unit.index is not None:
            return self.objective.build(unit.index, derive_seed("init", unit.seed, unit.index))
        return build_block(
            self.recipe.model,
            self.recipe.objective,
            vocabulary=self.vocabulary,
            seed=derive_seed("init", unit.seed, "reference"),
            num_layers=unit.deep * self.recipe.model.layers_per_block,
            hints=False,
        )

    def train(self, unit: Unit) -> Block:
        block = self.build(unit).to(self.device)
        trainer = BlockTrainer(self.recipe, self.objective, block, unit.index, self.shards, self.codebook)
        for step in range(self.recipe.training.steps):
            trainer.step(step, unit.index or 0)
        return block.eval()

    def consensus(self, blocks: list[Block]) -> float:
        pooling = self.evaluator.fit_pooling(blocks, self.pool)
        return self.evaluator.score(blocks, pooling, self.valid, euler=False).consensus.ce


def train_unit(setting: Setting, unit: Unit) -> tuple[Unit, float, dict[str, Tensor]]:
    """In a process of its own: the unit's cross entropy alone, and its weights."""
    torch.set_num_threads(1)
    bench = Bench(setting.recipe(unit.seed, 8, unit.other_lr), torch.device(setting.device))
    block = bench.train(unit)
    ce = bench.evaluator.score_one(block, bench.valid).ce
    weights = block.state_dict() if unit.index is not None else {}
    return unit, ce, {name: tensor.cpu() for name, tensor in weights.items()}


def units_of(seed: int, counts: Sequence[int], layers: int) -> list[Unit]:
    """Blocks first, composed while the end-to-end models train; of those the longest first."""
    deep = [
        Unit(seed, None, count, lr)
        for count in sorted(counts, reverse=True)
        for lr in ((DEEP_LR, BLOCK_LR) if count * layers <= SHALLOW_LAYERS else (DEEP_LR,))
    ]
    return [*(Unit(seed, index) for index in range(max(counts))), *deep]


def compose(setting: Setting, seed: int, counts: Sequence[int], found: list[Any]) -> dict[int, float]:
    """Cross entropy of the first 1, 2, 4... blocks of a seed, by how many."""
    bench = Bench(setting.recipe(seed, 8, BLOCK_LR), torch.device(setting.device))
    blocks = []
    for unit, _, weights in sorted(blocks_of(seed, found), key=lambda one: one[0].index):
        block = bench.build(unit)
        block.load_state_dict(weights)
        blocks.append(block.to(bench.device).eval())
    return {count: bench.consensus(blocks[:count]) for count in counts}


def blocks_of(seed: int, found: list[Any]) -> list[Any]:
    return [one for one in found if one[0].seed == seed and one[0].index is not None]


def depth_rows(composed: dict[int, dict[int, float]], found: list[Any]) -> list[dict[str, Any]]:
    """What is known so far; the better of the end-to-end models of a depth."""
    return [
        {
            "seed": seed,
            "blocks": count,
            "composed": ce,
            "end_to_end": min((ce for u, ce, _ in found if (u.seed, u.deep) == (seed, count)), default=None),
        }
        for seed, by_count in composed.items()
        for count, ce in by_count.items()
    ]


def mean(rows: list[dict[str, Any]], key: str, count: int) -> float:
    known = [row[key] for row in rows if row["blocks"] == count and row[key] is not None]
    return statistics.mean(known) if known else math.nan


@dataclass(frozen=True)
class Fit:
    """Composed loss = limit + spread / B, least squares on the means over seeds."""

    limit: float
    spread: float
    largest_residual: float


def ensemble_fit(rows: list[dict[str, Any]], counts: Sequence[int]) -> Fit:
    composed = np.array([mean(rows, "composed", count) for count in counts])
    terms = np.array([[1.0, 1 / count] for count in counts])
    limit, spread = np.linalg.lstsq(terms, composed, rcond=None)[0]
    residuals = composed - terms @ np.array([limit, spread])
    return Fit(float(limit), float(spread), float(np.abs(residuals).max()))


def claims_of(rows: list[dict[str, Any]], counts: Sequence[int], *, quick: bool) -> dict[str, bool]:
    composed = [mean(rows, "composed", count) for count in counts]
    claims = {
        f"{2 * count} blocks are better than {count}": after < before
        for count, before, after in zip(counts, composed, composed[1:], strict=False)
    }
    if not quick:
        gaps = [ce - mean(rows, "end_to_end", n) for n, ce in zip(counts, composed, strict=True)]
        claims[f"no gap above {MAX_GAP}"] = max(gaps) <= MAX_GAP
    return claims


def print_depth(rows: list[dict[str, Any]], counts: Sequence[int]) -> None:
    print("\n| B | composed | end to end | doubling gains: composed | end to end |\n|---|---|---|---|---|")
    before: tuple[float, float] | None = None
    for count in counts:
        now = mean(rows, "composed", count), mean(rows, "end_to_end", count)
        gains = ("", "") if before is None else (f"{before[0] - now[0]:.4f}", f"{before[1] - now[1]:.4f}")
        print(f"| {count} | {now[0]:.4f} | {now[1]:.4f} | {gains[0]} | {gains[1]} |")
        before = now
    fit = ensemble_fit(rows, counts)
    print(f"\ncomposed = {fit.limit:.5f} + {fit.spread:.5f} / B, within {fit.largest_residual:.5f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", default="builtin")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", default="0", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments, began = parse(), time.monotonic()
    counts = [1, 2, 4] if arguments.quick else [1, 2, 4, 8]
    layers = (QUICK if arguments.quick else FULL)["layers_per_block"]
    setting = Setting(arguments.corpus, arguments.device, arguments.steps, arguments.quick)
    depth: list[Any] = []
    composed: dict[int, dict[int, float]] = {}
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        units = [unit for seed in arguments.seeds for unit in units_of(seed, counts, layers)]
        for future in as_completed([pool.submit(train_unit, setting, unit) for unit in units]):
            unit, ce, weights = future.result()
            depth.append((unit, ce, weights))
            print(f"{time.monotonic() - began:.0f} s {unit} {ce:.4f}", flush=True)
            if unit.seed not in composed and len(blocks_of(unit.seed, depth)) == max(counts):
                composed[unit.seed] = compose(setting, unit.seed, counts, depth)
                print(f"composed: {composed[unit.seed]}", flush=True)
            # After each unit: a run that is cut off leaves what it has.
            found = [{**vars(unit), "ce": ce} for unit, ce, _ in depth]
            numbers = {"depth": depth_rows(composed, depth), "units": found}
            write_report(arguments.json, "depth", numbers, arguments.seeds)
    rows = depth_rows(composed, depth)
    print_depth(rows, counts)
    return check_claims(claims_of(rows, counts, quick=arguments.quick))


if __name__ == "__main__":
    sys.exit(main())
