"""How far pooled blocks end from end to end: equal operations, both sides tuned by one search, several seeds.

    python benchmarks/gap.py RECIPE [--set SECTION.KEY=VALUE] [--seeds 0,1,2] [--device cuda] [--jobs 6]
                             [--tuned tune.json] [--json FILE]

First the search of `tune.py` with the first seed, or its report (--tuned): rates are chosen on pooling text.
Then all blocks and the reference with every seed; the reference takes the number of steps that makes its
operations those of all blocks together. Held-out text is scored once, at the end. Prints the gap of each
seed, the mean and its standard error. Exits 1 where a best rate lies on the edge of the grid: such a side is
not tuned. The gap itself is a finding and no claim.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from provenance import check_claims, write_report
from torch import Tensor
from tune import SIDES, Trial, best_of, on_the_edge, rates, search, train_unit, tried_before, with_rates

from blocktrain.config import Recipe, find_recipe, load_recipe
from blocktrain.data.corpora import open_text
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.device import find_device
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.setup import Setup


@dataclass(frozen=True)
class Work:
    """A unit to train: a block, or the reference (index None)."""

    seed: int
    index: int | None
    settings: tuple[str, ...]


def run_unit(name: str, work: Work, device: str) -> tuple[Work, dict[str, Tensor], float | None]:
    """In a process of its own: the weights of a block, or the reference's score."""
    torch.set_num_threads(1)
    recipe = load_recipe(find_recipe(name), [*work.settings, f"seed={work.seed}"])
    unit = train_unit(recipe, find_device(device), work.index)
    if work.index is None:
        held_out = unit.text.first_tokens("held_out", recipe.evaluation.max_bytes)
        return work, {}, unit.evaluator.score_one(unit.block, held_out).ce
    return work, {key: tensor.cpu() for key, tensor in unit.block.state_dict().items()}, None


def reference_steps(recipe: Recipe, vocabulary: int) -> int:
    """Steps that cost end to end what all blocks' steps cost together."""
    setup, model = Setup.of(recipe, vocabulary), recipe.model
    of_blocks = sum(
        training_flops(forward_flops_per_token(model, setup.initial(block), vocabulary), 0, 1)
        for block in range(model.blocks)
    )
    of_reference = training_flops(forward_flops_per_token(model, setup.initial_reference(), vocabulary), 0, 1)
    return round(recipe.training.steps * of_blocks / of_reference)


def composed(recipe: Recipe, device: torch.device, weights: Sequence[dict[str, Tensor]]) -> float:
    """The pooled blocks' cross entropy on held-out text."""
    text = open_text(recipe)
    setup = Setup.of(recipe, text.manifest.vocabulary)
    blocks = [setup.initial(index).to(device).eval() for index in range(recipe.model.blocks)]
    for block, found in zip(blocks, weights, strict=True):
        block.load_state_dict(found)
    table = setup.codebook().to(device)().detach()
    evaluator = Evaluator(setup.objective, table, recipe.evaluation, seed=recipe.seed)
    pooling = evaluator.fit_pooling(blocks, text.first_tokens("pooling", recipe.evaluation.pooling_bytes))
    held_out = text.first_tokens("held_out", recipe.evaluation.max_bytes)
    return evaluator.score(blocks, pooling, held_out, euler=False).consensus.ce


@dataclass(frozen=True)
class Gap:
    seed: int
    blocks: float
    reference: float

    @property
    def gap(self) -> float:
        return self.blocks - self.reference


def lines_of(gaps: Sequence[Gap]) -> list[str]:
    lines = ["| seed | blocks | end to end | gap |", "|---|---|---|---|"]
    lines += [f"| {one.seed} | {one.blocks:.4f} | {one.reference:.4f} | {one.gap:+.4f} |" for one in gaps]
    mean, error = mean_and_error(gaps)
    return [*lines, "", f"gap {mean:+.4f}, standard error {error:.4f}, {len(gaps)} seeds"]


def mean_and_error(gaps: Sequence[Gap]) -> tuple[float, float]:
    found = [one.gap for one in gaps]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.mean(found), error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--matrix", type=rates, default=rates("1.5e-3,3e-3,6e-3,1.2e-2"))
    parser.add_argument("--other", type=rates, default=rates("5e-4,1e-3,3e-3,6e-3"))
    parser.add_argument("--tuned", type=Path, help="a report of tune.py or of this program; no new search")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options, began = parse(), time.monotonic()
    base = load_recipe(find_recipe(options.recipe), options.set)
    shared = (options.recipe, options.set, options.device, options.jobs, options.matrix, options.other)
    numbers: dict[str, Any] = {"recipe": base.to_dict()}
    trials: list[Trial] = []
    for trials in [tried_before(options.tuned, base)] if options.tuned else search(*shared):
        numbers["trials"] = [asdict(trial) for trial in trials]
        write_report(options.json, "gap", numbers, options.seeds)
    best = {side: best_of(trials, side) for side in SIDES}
    for side, trial in best.items():
        print(f"{side}: matrix_lr={trial.matrix_lr:g} other_lr={trial.other_lr:g} {trial.ce:.4f}", flush=True)
    steps = reference_steps(base, open_text(base).manifest.vocabulary)
    numbers["steps"] = {"block": base.training.steps, "reference": steps}
    of_side = {
        side: tuple(with_rates(options.set, trial.matrix_lr, trial.other_lr)) for side, trial in best.items()
    }
    longer = (*of_side["reference"], f"training.steps={steps}")
    work = [Work(seed, None, longer) for seed in options.seeds]
    work += [Work(seed, i, of_side["block"]) for seed in options.seeds for i in range(base.model.blocks)]
    references: dict[int, float] = {}
    weights: dict[int, dict[int, dict[str, Tensor]]] = {seed: {} for seed in options.seeds}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(run_unit, options.recipe, one, options.device) for one in work]
        for future in as_completed(waiting):
            one, found, ce = future.result()
            if one.index is None:
                assert ce is not None
                references[one.seed] = ce
            else:
                weights[one.seed][one.index] = found
            print(
                f"{time.monotonic() - began:.0f} s seed {one.seed} {one.index}", file=sys.stderr, flush=True
            )
    gaps = []
    for seed in options.seeds:
        recipe = load_recipe(find_recipe(options.recipe), [*of_side["block"], f"seed={seed}"])
        in_order = [weights[seed][index] for index in range(base.model.blocks)]
        blocks = composed(recipe, find_device(options.device), in_order)
        gaps.append(Gap(seed, blocks, references[seed]))
    mean, error = mean_and_error(gaps)
    numbers |= {"gaps": [{**asdict(one), "gap": one.gap} for one in gaps], "mean": mean, "error": error}
    write_report(options.json, "gap", numbers, options.seeds)
    print("\n".join(["", *lines_of(gaps)]))
    grid = {axis: sorted({getattr(t, axis) for t in trials}) for axis in ("matrix_lr", "other_lr")}
    edges = [e for one in best.values() for e in on_the_edge(one, grid["matrix_lr"], grid["other_lr"])]
    return check_claims(dict.fromkeys(edges, False))


if __name__ == "__main__":
    sys.exit(main())
