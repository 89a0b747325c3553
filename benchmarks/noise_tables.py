"""T1, T2 and T3 of the litepaper: what a block is, and how the noise is shared out. `litepaper.py` runs them.

Each row is one recipe trained in one process, all rows on the same text, steps and batch. Two compositions
are scored: `euler`, the litepaper's, and the pooled blocks (`consensus`), which the litepaper does not have.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from blocktrain.config import find_recipe, load_recipe
from blocktrain.data.shards import scoring_windows
from blocktrain.model.block import Hint, num_parameters
from blocktrain.model.noise import NORMAL, levels, owner
from blocktrain.training.device import autocast, find_device
from blocktrain.training.local import LocalRun, Silent

ADAMW_BYTES = 16
"""Weight, gradient and two moments of a parameter, in fp32: the litepaper's "active AdamW"."""
CURVE_POINTS = 13
"""Noise levels at which the loss of a trained model is measured, for `adapted`."""
EDGE = 0.05
"""Relative error of the noise edges that `noise_with_edges` accepts."""


@dataclass(frozen=True)
class Row:
    name: str
    settings: tuple[str, ...]
    theirs: float | None = None
    """Cross entropy that the litepaper prints."""


@dataclass(frozen=True)
class Trained:
    row: Row
    euler: float | None
    consensus: float
    reference: float | None
    block_parameters: int
    block_peak_bytes: int
    seconds: float
    edges: tuple[float, ...]
    noise_curve: tuple[tuple[float, float], ...]
    """Noise, and the loss on pooling text of the block that owns it, given the target with that noise."""

    @property
    def ce(self) -> float:
        """By the litepaper's composition, where there is one."""
        return self.consensus if self.euler is None else self.euler


MLP = ("model.mixer=none", "model.convolution=0")
SIGMAS = {
    (0.1, 2.0): 14.295,
    (0.2, 2.0): 8.869,
    (0.5, 2.0): 3.741,
    (0.5, 5.0): 3.642,
    (1.0, 5.0): 2.762,
    (1.0, 10.0): 2.755,
}


def _cut(blocks: int, layers: int) -> tuple[str, ...]:
    return (f"model.blocks={blocks}", f"model.layers_per_block={layers}")


T1 = tuple(
    Row(f"{low:g} to {high:g}", (*MLP, f"objective.sigma_min={low}", f"objective.sigma_max={high}"), theirs)
    for (low, high), theirs in SIGMAS.items()
)
T2 = (
    Row("denoiser, MSE, MLP blocks", (*MLP, "objective.loss=mse"), 3.243),
    Row("MLP blocks, cross entropy", MLP, 2.740),
    Row("Transformer, 4 blocks of 3", _cut(4, 3), 1.566),
    Row("Transformer, 3 blocks of 4", (*_cut(3, 4), "training.reference=true"), 1.359),
    Row("the same, 15 % hints", (*_cut(3, 4), "objective.hint_probability=0.15"), None),
)
T2_END_TO_END = 1.32
ADAMW = ("training.optimizer=adamw", "training.other_lr=1e-3")
"""As published; 3e-3, the default beside Muon, is too much for matrices."""
T3 = tuple(
    Row(f"{blocks} blocks of {layers}", (*_cut(blocks, layers), *ADAMW), theirs)
    for blocks, layers, theirs in ((12, 1, 2.728), (6, 2, 2.644), (4, 3, 2.563), (3, 4, 2.196))
)


def train_row(row: Row, settings: Sequence[str], device_name: str) -> Trained:
    """In a process of its own."""
    torch.set_num_threads(1)
    recipe = load_recipe(find_recipe("litepaper"), ["training.reference=false", *row.settings, *settings])
    device = find_device(device_name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = LocalRun(recipe, Path(folder) / "run", device, Silent())
        run.train(resume=False)
        seconds = time.monotonic() - began
        scores = run.evaluate()
        return Trained(
            row=row,
            euler=None if scores.euler is None else scores.euler.ce,
            consensus=scores.consensus.ce,
            reference=None if scores.reference is None else scores.reference.ce,
            block_parameters=num_parameters(run.blocks[0]),
            block_peak_bytes=max(run.peaks[unit.name] for unit in run.units if unit.index is not None),
            seconds=seconds,
            edges=tuple(levels(recipe.objective, recipe.model.blocks + 1)[::-1]),
            noise_curve=tuple(_noise_curve(run)),
        )


@torch.no_grad()
def _noise_curve(run: LocalRun) -> list[tuple[float, float]]:
    """How hard the blocks find their noise: the loss by noise level, of the block that owns the level."""
    config, table = run.recipe.objective, run.codebook().detach()
    pooling = run.text.first_tokens("pooling", run.recipe.evaluation.pooling_bytes)
    windows = list(
        scoring_windows(pooling, context=run.recipe.model.context, batch=run.recipe.evaluation.batch)
    )
    ratio, curve = config.sigma_max / config.sigma_min, []
    for point in range(CURVE_POINTS):
        sigma = config.sigma_min * ratio ** (point / (CURVE_POINTS - 1))
        block, total, count = run.blocks[owner(config, len(run.blocks), sigma)], 0.0, 0
        generator = torch.Generator(run.device).manual_seed(run.recipe.seed)
        for window in windows:
            x_BT, y_BT, mask_BT = (part.to(run.device) for part in window)
            e_BTD = F.embedding(y_BT, table)
            z_BTD = e_BTD + sigma * torch.randn(e_BTD.shape, generator=generator, device=run.device)
            hint = Hint(z_BTD, torch.full((len(x_BT),), sigma, device=run.device))
            with autocast(run.device):
                logits_BTV = block(x_BT, table, hint).logits_BTV
            total += float(F.cross_entropy(logits_BTV.float()[mask_BT], y_BT[mask_BT], reduction="sum"))
            count += int(mask_BT.sum())
        curve.append((sigma, total / count))
    return curve


def equal_progress(curve: Sequence[tuple[float, float]], blocks: int) -> list[float]:
    """Ascending edges between which the loss rises by the same amount, so that each block gets as much of the
    way from pure noise to the least noise as any other."""
    # More noise cannot make it easier: a score that says so is chance, and the running maximum leaves it out.
    losses, highest = [], -math.inf
    for _, loss in curve:
        highest = max(highest, loss)
        losses.append(highest)
    found = [curve[0][0]]
    for part in range(1, blocks):
        wanted = losses[0] + (losses[-1] - losses[0]) * part / blocks
        above = next(i for i, loss in enumerate(losses) if loss >= wanted)
        (low, _), (high, _) = curve[above - 1], curve[above]
        share = (wanted - losses[above - 1]) / max(losses[above] - losses[above - 1], 1e-12)
        found.append(low * (high / low) ** share)
    return [*found, curve[-1][0]]


def noise_with_edges(low: float, inner: Sequence[float], high: float) -> tuple[float, float] | None:
    """Mean and deviation of ln sigma that give three blocks these two inner edges; None where none do.

    A recipe has no list of edges: they follow from the distribution that noise is drawn from, at equal
    probability mass. Two inner edges fix its two numbers; found on a grid, as there is no formula.
    """
    wanted = [math.log(edge) for edge in inner]

    def error(mean: float, deviation: float) -> float:
        ends = [NORMAL.cdf((math.log(end) - mean) / deviation) for end in (low, high)]
        if not ends[1] - ends[0] > 1e-9:
            return math.inf
        at = [ends[0] + (ends[1] - ends[0]) * part / 3 for part in (1, 2)]
        if not all(1e-12 < q < 1 - 1e-12 for q in at):
            return math.inf
        return max(
            abs(mean + deviation * NORMAL.inv_cdf(q) - want) for q, want in zip(at, wanted, strict=True)
        )

    means = [math.log(low) + (math.log(high) - math.log(low)) * i / 60 for i in range(-120, 181)]
    deviations = [0.05 * 1.06**i for i in range(80)]
    best = min((error(m, s), m, s) for m in means for s in deviations)
    # Once more, finer, around the best.
    _, mean, deviation = best
    step = (math.log(high) - math.log(low)) / 60
    finer = [
        (error(m, s), m, s)
        for m in (mean + step * i / 10 for i in range(-10, 11))
        for s in (deviation * 1.06 ** (i / 10) for i in range(-10, 11))
    ]
    found, mean, deviation = min([best, *finer])
    return (mean, deviation) if found <= EDGE else None


def adapted(trained: Trained) -> Row | None:
    """The row again, with noise shared out by what the first run found hard."""
    low, *inner, high = equal_progress(trained.noise_curve, 3)
    noise = noise_with_edges(low, inner, high)
    if noise is None:
        return None
    mean, deviation = noise
    settings = (*trained.row.settings, f"objective.p_mean={mean}", f"objective.p_std={deviation}")
    return Row(f"{trained.row.name}, equal progress", settings)


def train_all(
    rows: Sequence[Row],
    settings: Sequence[str],
    device: str,
    jobs: int,
    known: Sequence[Trained],
    said: Callable[[list[Trained]], None],
) -> list[Trained]:
    """In the order of the rows. `said` hears of all that is trained, each time that one more is."""
    found = {one.row: one for one in known}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        left = [row for row in rows if row not in found]
        for future in as_completed([pool.submit(train_row, row, settings, device) for row in left]):
            found[future.result().row] = future.result()
            said(list(found.values()))
    return [found[row] for row in rows]


def trained_of(numbers: Mapping[str, Any]) -> Trained:
    """What `numbers_of` wrote down of a row."""
    row = Row(**{**numbers["row"], "settings": tuple(numbers["row"]["settings"])})
    curve = tuple((noise, loss) for noise, loss in numbers["noise_curve"])
    kept = {key: numbers[key] for key in ("euler", "consensus", "reference", "seconds")}
    kept |= {key: numbers[key] for key in ("block_parameters", "block_peak_bytes")}
    return Trained(row=row, edges=tuple(numbers["edges"]), noise_curve=curve, **kept)


def numbers_of(found: Sequence[Trained]) -> list[dict[str, Any]]:
    return [{**asdict(one), "ce": one.ce} for one in found]


def _cells(*cells: object) -> str:
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def _four(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def noise_range_lines(found: Sequence[Trained]) -> list[str]:
    return [
        "| noise | theirs | ours, euler | ours, pooled |",
        "|---|---|---|---|",
        *(_cells(one.row.name, one.row.theirs, _four(one.euler), _four(one.consensus)) for one in found),
    ]


def noise_range_claims(found: Sequence[Trained]) -> Mapping[str, bool]:
    """The litepaper's order: the lower end decides, and a higher one is better."""
    by_low: dict[str, list[float]] = {}
    for one in found:
        by_low.setdefault(one.row.name.split(" to ")[0], []).append(one.ce)
    lows = list(by_low)
    return {
        f"from noise {after} the loss is lower than from {before}": max(by_low[after]) < min(by_low[before])
        for before, after in zip(lows, lows[1:], strict=False)
    }


def progression_lines(found: Sequence[Trained]) -> list[str]:
    reference = next(one.reference for one in found if one.reference is not None)
    return [
        "| | theirs | ours, euler | ours, pooled |",
        "|---|---|---|---|",
        *(_cells(one.row.name, one.row.theirs, _four(one.euler), _four(one.consensus)) for one in found),
        _cells("end to end, 12 layers", T2_END_TO_END, _four(reference), None),
    ]


def progression_claims(found: Sequence[Trained]) -> Mapping[str, bool]:
    theirs = [one for one in found if one.row.theirs is not None]
    return {
        f"{after.row.name} below {before.row.name}": after.ce < before.ce
        for before, after in zip(theirs, theirs[1:], strict=False)
    }


def cut_lines(found: Sequence[Trained]) -> list[str]:
    return [
        "| 12 layers as | theirs | ours, euler | ours, pooled | a block with AdamW | peak, measured |",
        "|---|---|---|---|---|---|",
        *(
            _cells(
                one.row.name,
                one.row.theirs,
                _four(one.euler),
                _four(one.consensus),
                f"{one.block_parameters * ADAMW_BYTES / 2**30:.3f} GiB",
                f"{one.block_peak_bytes / 2**30:.2f} GiB",
            )
            for one in found
        ),
    ]


def cut_claims(found: Sequence[Trained]) -> Mapping[str, bool]:
    claims = {}
    for before, after in zip(found, found[1:], strict=False):
        if after.row.theirs is not None:
            claims[f"{after.row.name} below {before.row.name}"] = after.ce < before.ce
            more = after.block_peak_bytes > before.block_peak_bytes
            claims[f"{after.row.name} takes more memory than {before.row.name}"] = more
    return claims
