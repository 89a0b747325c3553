"""Learning rates of a recipe's blocks and of its end-to-end reference, found by one search for both.

    python benchmarks/tune.py RECIPE [--set SECTION.KEY=VALUE] [--device cuda] [--jobs 4] [--json FILE]

Every pair of `--matrix` and `--other` is tried once for block 0 and once for the reference, with the recipe's
steps and seed. The loss that chooses is that on pooling text, which nobody trains on and no report scores.
Prints both grids and the settings to write into the recipe. Trials that are in the report (--json) already
are not made again. A best rate on the edge of the grid is not a best rate: the run then exits 1 and says
which side to widen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from provenance import write_report

from blocktrain.config import Recipe, find_recipe, load_recipe
from blocktrain.data.batches import open_batches
from blocktrain.data.corpora import open_text
from blocktrain.data.dataset import RunText
from blocktrain.model.block import Block
from blocktrain.training.device import find_device
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.setup import Setup
from blocktrain.training.source import source_commit

SIDES = ("block", "reference")
WHAT_A_TRIAL_DEPENDS_ON = ("seed", "model", "objective", "data", "training", "evaluation")
"""Parts of a recipe. A trial has no swarm."""


@dataclass(frozen=True)
class Trial:
    side: str
    matrix_lr: float
    other_lr: float
    ce: float = 0.0
    """On pooling text, per token."""
    commit: str = ""
    """Of the code that made it: a search that is gone on with may have trials of several."""


@dataclass(frozen=True)
class Unit:
    """A block or the reference of a recipe, trained, with what scores it."""

    block: Block
    evaluator: Evaluator
    text: RunText


def train_unit(recipe: Recipe, device: torch.device, index: int | None) -> Unit:
    """Block `index`, or the reference where it is None, for the recipe's steps."""
    text = open_text(recipe)
    setup = Setup.of(recipe, text.manifest.vocabulary)
    block = (setup.initial_reference() if index is None else setup.initial(index)).to(device)
    codebook = setup.codebook().to(device)
    trainer = BlockTrainer(
        recipe, setup.objective, block, index, open_batches(recipe, text, device), codebook
    )
    for step in range(recipe.training.steps):
        trainer.step(step, index or 0)
    evaluator = Evaluator(setup.objective, codebook().detach(), recipe.evaluation, seed=recipe.seed)
    return Unit(block.eval(), evaluator, text)


def with_rates(settings: Sequence[str], matrix_lr: float, other_lr: float) -> list[str]:
    """The same two rates for blocks and reference, whichever is trained."""
    same = ["training.reference_matrix_lr=none", "training.reference_other_lr=none"]
    return [*settings, f"training.matrix_lr={matrix_lr}", f"training.other_lr={other_lr}", *same]


def run_trial(recipe_name: str, settings: Sequence[str], device_name: str, trial: Trial) -> Trial:
    """In a process of its own."""
    torch.set_num_threads(1)
    rates = with_rates(settings, trial.matrix_lr, trial.other_lr)
    recipe = load_recipe(find_recipe(recipe_name), rates)
    unit = train_unit(recipe, find_device(device_name), 0 if trial.side == "block" else None)
    pooling = unit.text.first_tokens("pooling", recipe.evaluation.pooling_bytes)
    ce = unit.evaluator.score_one(unit.block, pooling).ce
    return replace(trial, ce=ce, commit=source_commit() or "")


def best_of(trials: Sequence[Trial], side: str) -> Trial:
    return min((trial for trial in trials if trial.side == side), key=lambda trial: trial.ce)


def on_the_edge(best: Trial, matrix: Sequence[float], other: Sequence[float]) -> list[str]:
    """Which way the grid has to grow before `best` can be called the best."""
    found = []
    for name, rate, grid in (("matrix", best.matrix_lr, matrix), ("other", best.other_lr, other)):
        if rate in (min(grid), max(grid)):
            way = "below" if rate == min(grid) else "above"
            found.append(f"{best.side}: the best of --{name} is {rate:g}, the grid's edge; try {way} it too")
    return found


def grid_lines(
    trials: Sequence[Trial], side: str, matrix: Sequence[float], other: Sequence[float]
) -> list[str]:
    ce = {(one.matrix_lr, one.other_lr): one.ce for one in trials if one.side == side}
    return [
        f"| {side}: matrix_lr \\ other_lr | " + " | ".join(f"{rate:g}" for rate in other) + " |",
        "|---" * (len(other) + 1) + "|",
        *(f"| {m:g} | " + " | ".join(f"{ce[m, o]:.4f}" for o in other) + " |" for m in matrix),
    ]


def search(
    recipe: str,
    settings: Sequence[str],
    device: str,
    jobs: int,
    matrix: Sequence[float],
    other: Sequence[float],
    known: Sequence[Trial] = (),
) -> Iterator[list[Trial]]:
    """Every pair of rates for both sides. Yields all trials so far, again and again: a search that is cut off
    can be gone on with."""
    tried = {(one.side, one.matrix_lr, one.other_lr) for one in known}
    # The reference takes four times as long: begun first, it does not run alone at the end.
    wanted = [(side, *pair) for side in reversed(SIDES) for pair in product(matrix, other)]
    trials, began = list(known), time.monotonic()
    yield trials
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        left = [Trial(*key) for key in wanted if key not in tried]
        for future in as_completed([pool.submit(run_trial, recipe, settings, device, one) for one in left]):
            trials.append(future.result())
            print(f"{time.monotonic() - began:.0f} s {trials[-1]}", file=sys.stderr, flush=True)
            yield trials


def tried_before(path: Path | None, recipe: Recipe) -> list[Trial]:
    """The trials in a report; none where there is no report yet."""
    if path is None or not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(recipe.to_dict()))
    if any(report["recipe"][part] != wanted[part] for part in WHAT_A_TRIAL_DEPENDS_ON):
        sys.exit(f"{path} is of another recipe or other settings; name another file")
    made_by = report["provenance"]["commit"] or ""
    return [Trial(**{"commit": made_by, **trial}) for trial in report["trials"]]


def rates(text: str) -> list[float]:
    return sorted(float(part) for part in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--matrix", type=rates, default=rates("1.5e-3,3e-3,6e-3,1.2e-2"))
    parser.add_argument("--other", type=rates, default=rates("1e-3,3e-3,6e-3,1.2e-2"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe: Recipe = load_recipe(find_recipe(options.recipe), options.set)
    shared = (options.recipe, options.set, options.device, options.jobs, options.matrix, options.other)
    trials: list[Trial] = []
    numbers: dict[str, Any] = {}
    for trials in search(*shared, tried_before(options.json, recipe)):
        numbers = {"recipe": recipe.to_dict(), "trials": [asdict(trial) for trial in trials]}
        write_report(options.json, "tune", numbers, [recipe.seed])
    best = {side: best_of(trials, side) for side in SIDES}
    for side in SIDES:
        print("\n".join(["", *grid_lines(trials, side, options.matrix, options.other)]))
    print(f"\nmatrix_lr = {best['block'].matrix_lr:g}\nother_lr = {best['block'].other_lr:g}")
    print(f"reference_matrix_lr = {best['reference'].matrix_lr:g}")
    print(f"reference_other_lr = {best['reference'].other_lr:g}")
    numbers["best"] = {side: asdict(trial) for side, trial in best.items()}
    write_report(options.json, "tune", numbers, [recipe.seed])
    edges = [edge for trial in best.values() for edge in on_the_edge(trial, options.matrix, options.other)]
    print("\n".join(edges), file=sys.stderr)
    return 1 if edges else 0


if __name__ == "__main__":
    sys.exit(main())
