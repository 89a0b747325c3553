"""How far pooled blocks end from end to end: equal operations, both sides tuned by one search, several seeds.

    python benchmarks/gap.py RECIPE [--set SECTION.KEY=VALUE] [--seeds 0,1,2] [--tune-steps 400]
                             [--tuned tune.json] [--device cuda] [--jobs 6] [--work FOLDER]
                             [--checkpoint FOLDER] [--json FILE]

First a search with the first seed, or the report of one (--tuned): rates are chosen on pooling text, after
`--tune-steps` of training. Both sides begin in the middle of one grid and try the four neighbours of the best
pair so far, until the best has none left to try: the same rule for both, and far fewer trials than the grid
has pairs. Trials that are in the report (--json) already are not made again.
Then all blocks and the reference with every seed; the reference takes the number of steps that makes its
operations those of all blocks together. Held-out text is scored once, at the end. Prints the gap of each
seed, the mean and its standard error; the loss of the first 1, 2, ... blocks pooled, with the fit that an
ensemble of equal predictors follows (limit + spread / blocks); and block 0 of the first seed trained as many
times longer as there are blocks, which is as many operations. What is trained lies in --work, and the same
command goes on with the rest. Exits 1 where a best rate lies on the edge of the grid: such a side is not
tuned. The gap itself is a finding and no claim.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import check_claims, write_report
from safetensors.torch import load_file, save_file
from tune import SIDES, Trial, best_of, on_the_edge, rates, run_trial, train_unit, tried_before, with_rates

from blocktrain.config import Recipe, find_recipe, load_recipe
from blocktrain.data.corpora import open_text
from blocktrain.model.block import Block
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import save_checkpoint
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

    def kept_in(self, folder: Path) -> Path:
        told = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return folder / f"seed-{self.seed}-{'reference' if self.index is None else self.index}-{told}"


def run_unit(name: str, work: Work, device: str, folder: Path) -> Work:
    """In a process of its own: leaves the unit's weights in the folder."""
    kept = work.kept_in(folder)
    if not kept.exists():
        torch.set_num_threads(1)
        recipe = load_recipe(find_recipe(name), [*work.settings, f"seed={work.seed}"])
        unit = train_unit(recipe, find_device(device), work.index)
        save_file({key: tensor.cpu() for key, tensor in unit.block.state_dict().items()}, f"{kept}.part")
        Path(f"{kept}.part").replace(kept)
    return work


def reference_steps(recipe: Recipe, vocabulary: int) -> int:
    """Steps that cost end to end what all blocks' steps cost together."""
    setup, model = Setup.of(recipe, vocabulary), recipe.model
    of_blocks = sum(
        training_flops(forward_flops_per_token(model, setup.initial(block), vocabulary), 0, 1)
        for block in range(model.blocks)
    )
    of_reference = training_flops(forward_flops_per_token(model, setup.initial_reference(), vocabulary), 0, 1)
    return round(recipe.training.steps * of_blocks / of_reference)


class Scorer:
    """Scores units of one seed on held-out text, alone or pooled."""

    def __init__(self, name: str, work: Work, device: torch.device, folder: Path) -> None:
        self.recipe = load_recipe(find_recipe(name), [*work.settings, f"seed={work.seed}"])
        self.text = open_text(self.recipe)
        self.setup = Setup.of(self.recipe, self.text.manifest.vocabulary)
        self.device, self.folder = device, folder
        table = self.setup.codebook().to(device)().detach()
        self.evaluator = Evaluator(self.setup.objective, table, self.recipe.evaluation, seed=self.recipe.seed)
        self.held_out = self.text.first_tokens("held_out", self.recipe.evaluation.max_bytes)

    def trained(self, work: Work) -> Block:
        block = self.setup.initial_reference() if work.index is None else self.setup.initial(work.index)
        block.load_state_dict(load_file(work.kept_in(self.folder)))
        return block.to(self.device).eval()

    def alone(self, work: Work) -> float:
        return self.evaluator.score_one(self.trained(work), self.held_out).ce

    def pooled(self, work: Sequence[Work]) -> float:
        blocks = [self.trained(one) for one in work]
        return self.evaluator.score(blocks, self.pooling(blocks), self.held_out, euler=False).consensus.ce

    def pooling(self, blocks: Sequence[Block]) -> Pooling:
        text = self.text.first_tokens("pooling", self.recipe.evaluation.pooling_bytes)
        return self.evaluator.fit_pooling(blocks, text)

    def save(self, work: Sequence[Work], folder: Path) -> None:
        """As a checkpoint that other programs score and serve. Weights are rounded as bfloat16 rounds, which
        halves what they take when they are packed."""
        blocks = [self.trained(one) for one in work]
        for block in blocks:
            block.load_state_dict({name: one.bfloat16().float() for name, one in block.state_dict().items()})
        pooling, table = self.pooling(blocks), self.evaluator.codebook
        save_checkpoint(
            folder, self.recipe, self.text.sha256, [one.cpu() for one in blocks], table.cpu(), pooling
        )


@dataclass(frozen=True)
class Gap:
    seed: int
    blocks: float
    reference: float
    pools: tuple[float, ...] = ()
    """The first 1, 2, ... blocks pooled."""

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


@dataclass(frozen=True)
class Fit:
    """Pooled loss = limit + spread / blocks, least squares on the means over seeds."""

    limit: float
    spread: float
    largest_residual: float


def ensemble_fit(pools: Sequence[Sequence[float]]) -> Fit:
    """Of the pools of 1, 2, ... blocks of each seed."""
    means = np.mean(pools, axis=0)
    terms = np.array([[1.0, 1 / count] for count in range(1, len(means) + 1)])
    limit, spread = np.linalg.lstsq(terms, means, rcond=None)[0]
    residuals = means - terms @ np.array([limit, spread])
    return Fit(float(limit), float(spread), float(np.abs(residuals).max()))


def pool_lines(gaps: Sequence[Gap], fit: Fit, longer: float) -> list[str]:
    return [
        "| blocks pooled | " + " | ".join(f"seed {one.seed}" for one in gaps) + " |",
        "|---" * (len(gaps) + 1) + "|",
        *(
            f"| {count} | " + " | ".join(f"{ce:.4f}" for ce in row) + " |"
            for count, row in enumerate(zip(*(one.pools for one in gaps), strict=True), 1)
        ),
        "",
        f"pooled = {fit.limit:.4f} + {fit.spread:.4f} / blocks, within {fit.largest_residual:.4f}; "
        f"one block, as many operations as all: {longer:.4f}",
    ]


Pair = tuple[int, int]
"""Places of a pair of rates in the grid of --matrix and --other."""


def still_to_try(tried: Mapping[Pair, float], size: Pair) -> list[Pair]:
    """The best pair's neighbours that were not tried; nothing where the search is over."""
    if not tried:
        return [(size[0] // 2, size[1] // 2)]
    i, j = min(tried, key=lambda pair: tried[pair])
    around = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
    return [(m, o) for m, o in around if 0 <= m < size[0] and 0 <= o < size[1] and (m, o) not in tried]


def climb(
    recipe: str,
    settings: Sequence[str],
    options: argparse.Namespace,
    known: Sequence[Trial],
) -> Iterator[list[Trial]]:
    """Each side climbs by itself, from the middle of the grid. Yields all trials so far, again and again."""
    trials, began = list(known), time.monotonic()
    yield trials
    running: dict[Future[Trial], str] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        while True:
            # The reference takes longer: it is asked for first, so that it does not run alone at the end.
            for side in reversed(SIDES):
                if side in running.values():
                    continue
                tried = {
                    (options.matrix.index(one.matrix_lr), options.other.index(one.other_lr)): one.ce
                    for one in trials
                    if one.side == side
                }
                for m, o in still_to_try(tried, (len(options.matrix), len(options.other))):
                    trial = Trial(side, options.matrix[m], options.other[o])
                    running[pool.submit(run_trial, recipe, settings, options.device, trial)] = side
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                trials.append(future.result())
                print(f"{time.monotonic() - began:.0f} s {trials[-1]}", file=sys.stderr, flush=True)
            yield trials


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--matrix", type=rates, default=rates("3.75e-4,1.5e-3,6e-3,2.4e-2,9.6e-2"))
    parser.add_argument("--other", type=rates, default=rates("1.5e-5,6e-5,2.5e-4,1e-3,4e-3,1.6e-2,6.4e-2"))
    parser.add_argument("--tune-steps", type=int, help="of each trial of the search; default: the recipe's")
    parser.add_argument("--tuned", type=Path, help="a report of tune.py or of this program; no new search")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, help="folder for what is trained; default: one that goes away")
    parser.add_argument("--checkpoint", type=Path, help="folder for the first seed's blocks, to serve them")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options, began = parse(), time.monotonic()
    base = load_recipe(find_recipe(options.recipe), options.set)
    tune_steps = options.tune_steps or base.training.steps
    numbers: dict[str, Any] = {"recipe": base.to_dict(), "tune_steps": tune_steps}
    found = options.tuned or options.json
    before = tried_before(found, base)
    if before and json.loads(found.read_text(encoding="utf-8")).get("tune_steps", tune_steps) != tune_steps:
        sys.exit(
            f"{found} has trials of another length; name another file or the --tune-steps it was made with"
        )
    tune_settings = [*options.set, f"training.steps={tune_steps}", f"seed={options.seeds[0]}"]
    trials: list[Trial] = []
    for trials in [before] if options.tuned else climb(options.recipe, tune_settings, options, before):
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
    reference = (*of_side["reference"], f"training.steps={steps}")
    longer = (*of_side["block"], f"training.steps={base.training.steps * base.model.blocks}")
    long_one = Work(options.seeds[0], 0, longer)
    work = [Work(seed, None, reference) for seed in options.seeds]
    work += [long_one]
    work += [Work(seed, i, of_side["block"]) for seed in options.seeds for i in range(base.model.blocks)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            waiting = [pool.submit(run_unit, options.recipe, one, options.device, folder) for one in work]
            for future in as_completed(waiting):
                one = future.result()
                print(
                    f"{time.monotonic() - began:.0f} s seed {one.seed} {one.index}",
                    file=sys.stderr,
                    flush=True,
                )
        gaps, device = [], find_device(options.device)
        for seed in options.seeds:
            scorer = Scorer(options.recipe, Work(seed, None, of_side["block"]), device, folder)
            blocks = [Work(seed, index, of_side["block"]) for index in range(base.model.blocks)]
            pools = tuple(scorer.pooled(blocks[:count]) for count in range(1, base.model.blocks + 1))
            gaps.append(Gap(seed, pools[-1], scorer.alone(Work(seed, None, reference)), pools))
            if seed == long_one.seed:
                numbers["one_block_longer"] = scorer.alone(long_one)
                if options.checkpoint:
                    scorer.save(blocks, options.checkpoint)
    fit = ensemble_fit([one.pools for one in gaps])
    mean, error = mean_and_error(gaps)
    numbers |= {"gaps": [{**asdict(one), "gap": one.gap} for one in gaps], "mean": mean, "error": error}
    numbers["fit"] = asdict(fit)
    write_report(options.json, "gap", numbers, options.seeds)
    print("\n".join(["", *lines_of(gaps), "", *pool_lines(gaps, fit, numbers["one_block_longer"])]))
    grid = {axis: sorted({getattr(t, axis) for t in trials}) for axis in ("matrix_lr", "other_lr")}
    edges = [e for one in best.values() for e in on_the_edge(one, grid["matrix_lr"], grid["other_lr"])]
    return check_claims(dict.fromkeys(edges, False))


if __name__ == "__main__":
    sys.exit(main())
