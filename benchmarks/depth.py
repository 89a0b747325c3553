"""Does depth compose? Blocks of equal size, more and more of them, beside end-to-end models as deep.

    python benchmarks/depth.py --corpus W [--device cuda] [--seeds 0,1] [--json FILE]
    python benchmarks/depth.py --quick            # CPU, builtin text, under a minute

Prints two tables. *Depth*: consensus of B = 1, 2, 4, 8 blocks beside end-to-end models of the same number
of layers, at equal bytes per unit. *Frontier*: one row per objective at B = 4 with its cost. Blocks
are trained once: independent blocks of a larger B contain those of a smaller one, so the depth
table pools prefixes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, build_block, num_parameters
from blocktrain.model.objective import Objective
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer, build_codebook

FULL = {"width": 384, "heads": 6, "layers_per_block": 3, "context": 512}
QUICK = {"width": 48, "heads": 2, "layers_per_block": 1, "context": 64}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "denoise, 15 % hints": {"objective": {"hint_probability": 0.15}},
    "denoise, no hints": {"objective": {"hint_probability": 0.0}},
    "no hints, no convolution": {"objective": {"hint_probability": 0.0}, "model": {"convolution": 0}},
    "chain of frozen features": {"objective": {"kind": "chain", "hint_probability": 0.0}},
}


class Bench:
    """One recipe's text, objective and evaluator on one device."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        tokenizer = load_tokenizer(recipe.data.tokenizer)
        corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
        self.vocabulary = tokenizer.vocabulary
        self.objective = Objective(recipe.model, recipe.objective, vocabulary=self.vocabulary)
        self.codebook = build_codebook(recipe, self.vocabulary).to(device)
        self.shards = Shards(
            tokenizer.encode(corpus.train),
            corpus.sha256,
            seed=recipe.seed,
            batch=recipe.training.batch,
            context=recipe.model.context,
            device=device,
        )
        self.pool = tokenizer.encode(corpus.pool)
        self.valid = tokenizer.encode(corpus.valid[: recipe.evaluation.max_bytes])
        self.evaluator = Evaluator(self.objective, self.codebook(), recipe.evaluation, seed=recipe.seed)
        self.tokens = recipe.training.steps * recipe.training.batch * recipe.model.context

    def train(self, block: Block, index: int | None, frozen: list[Block]) -> Block:
        trainer = BlockTrainer(
            self.recipe, self.objective, block, index, self.shards, self.codebook, frozen=frozen
        )
        for step in range(self.recipe.training.steps):
            trainer.step(step, index or 0)
        return block.eval()

    def blocks(self) -> list[Block]:
        trained: list[Block] = []
        for index in range(self.recipe.model.blocks):
            block = self.objective.build(index, derive_seed("init", self.recipe.seed, index))
            frozen = [trained[i] for i in self.objective.frozen(index)]
            trained.append(self.train(block.to(self.device), index, frozen))
        return trained

    def end_to_end(self, num_blocks: int) -> float:
        block = build_block(
            self.recipe.model,
            self.recipe.objective,
            vocabulary=self.vocabulary,
            seed=derive_seed("init", self.recipe.seed, "reference"),
            num_layers=num_blocks * self.recipe.model.layers_per_block,
            hints=False,
        )
        return self.evaluator.score_one(self.train(block.to(self.device), None, []), self.valid).ce

    def consensus(self, blocks: list[Block]) -> float:
        weights = self.evaluator.fit_weights(blocks, self.pool)
        return self.evaluator.score(blocks, weights, self.valid, euler=False).consensus.ce

    def flops(self, blocks: list[Block]) -> int:
        forward = [forward_flops_per_token(self.recipe.model, b, self.vocabulary) for b in blocks]
        return sum(
            training_flops(own, sum(forward[f] for f in self.objective.frozen(i)), self.tokens)
            for i, own in enumerate(forward)
        )


def recipe_of(arguments: argparse.Namespace, seed: int, blocks: int, extra: dict[str, Any]) -> Recipe:
    quick = arguments.quick
    training = {"steps": 60, "batch": 8, "warmup_steps": 6} if quick else {"steps": arguments.steps}
    values: dict[str, Any] = {
        "name": "depth",
        "seed": seed,
        "model": {**(QUICK if quick else FULL), "blocks": blocks, **extra.get("model", {})},
        "objective": extra.get("objective", {}),
        "data": {"corpus": arguments.corpus, "max_bytes": 2_000_000 if quick else None},
        "training": training,
        "evaluation": {"max_bytes": 20_000, "pooling_bytes": 20_000} if quick else {},
    }
    return resolve_recipe(values)


def depth_table(arguments: argparse.Namespace, counts: list[int]) -> list[dict[str, Any]]:
    rows = []
    for seed in arguments.seeds:
        bench = Bench(
            recipe_of(arguments, seed, counts[-1], OBJECTIVES["denoise, no hints"]), arguments.device
        )
        blocks = bench.blocks()
        for count in counts:
            composed, deep = bench.consensus(blocks[:count]), bench.end_to_end(count)
            rows.append({"seed": seed, "blocks": count, "composed": composed, "end_to_end": deep})
            print(f"  seed {seed} B={count} composed {composed:.4f} end to end {deep:.4f}", flush=True)
    return rows


def frontier_table(arguments: argparse.Namespace, blocks: int) -> list[dict[str, Any]]:
    rows = []
    for seed in arguments.seeds:
        for name, extra in OBJECTIVES.items():
            bench = Bench(recipe_of(arguments, seed, blocks, extra), arguments.device)
            trained = bench.blocks()
            row = {
                "seed": seed,
                "objective": name,
                "ce": bench.consensus(trained),
                "flops": bench.flops(trained),
                "parameters": sum(num_parameters(block) for block in trained),
            }
            rows.append(row)
            print(f"  seed {seed} {name}: {row['ce']:.4f}", flush=True)
    return rows


def mean(rows: list[dict[str, Any]], key: str, **match: Any) -> float:
    picked = [float(row[key]) for row in rows if all(row[k] == v for k, v in match.items())]
    return statistics.mean(picked)


def print_depth(rows: list[dict[str, Any]], counts: list[int]) -> None:
    print(
        "\n| B | composed | end to end | gain of doubling B: composed | end to end |\n|---|---|---|---|---|"
    )
    before: tuple[float, float] | None = None
    for count in counts:
        now = mean(rows, "composed", blocks=count), mean(rows, "end_to_end", blocks=count)
        gains = ("", "") if before is None else (f"{before[0] - now[0]:.4f}", f"{before[1] - now[1]:.4f}")
        print(f"| {count} | {now[0]:.4f} | {now[1]:.4f} | {gains[0]} | {gains[1]} |")
        before = now


def print_frontier(rows: list[dict[str, Any]]) -> None:
    print("\n| objective | consensus CE | total FLOPs | parameters |\n|---|---|---|---|")
    for name in OBJECTIVES:
        flops, parameters = mean(rows, "flops", objective=name), mean(rows, "parameters", objective=name)
        print(f"| {name} | {mean(rows, 'ce', objective=name):.4f} | {flops:.2e} | {parameters / 1e6:.2f} M |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", default="builtin")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--seeds", default="0", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tables", default="depth,frontier")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = [1, 2, 4] if arguments.quick else [1, 2, 4, 8]
    tables = arguments.tables.split(",")
    depth = depth_table(arguments, counts) if "depth" in tables else []
    frontier = frontier_table(arguments, 2 if arguments.quick else 4) if "frontier" in tables else []
    if depth:
        print_depth(depth, counts)
    if frontier:
        print_frontier(frontier)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"depth": depth, "frontier": frontier}, indent=1))


if __name__ == "__main__":
    main()
