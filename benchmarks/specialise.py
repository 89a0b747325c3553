"""Blocks that specialise in a part of the text, pooled by how well each predicted the text so far.

    python benchmarks/specialise.py --docs FOLDER [--steps 4000] [--shares 0,0.75] [--seeds 0] [--jobs 12]
    python benchmarks/specialise.py --docs FOLDER --quick      # CPU, tiny models, a few minutes

FOLDER has train.txt.xz and valid.txt.xz, documents that begin with a `---` line of front matter. Documents
are clustered once (hashed words, k-means with equal bytes per cluster). Block b draws `share` of each batch
from cluster b and the rest from all text; share 0 is the plain pool of blocks. Weights at a position t are

    w_b  ~  prior_b * exp(sum over decays d of tau_d * sum over s < t of d^(t-s-1) * log p_b(y_s))

and the pool is log-linear. Prior, taus and the sum of the weights are fitted on pooling documents, which
nobody trains on; held-out text is scored once. The end-to-end reference has the layers of all blocks and
sees as many bytes. Learning rates: `--tune` tries the same grid for a block and for the reference and prints
the loss on pooling text.
Exits 1 when the best specialised pool is more than 0.012 nats per byte above end to end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import re
import subprocess
import sys
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, build_block
from blocktrain.model.objective import Objective
from blocktrain.training.device import autocast
from blocktrain.training.inner import BlockTrainer, Codebook, build_codebook

BLOCKS = 4
POOL_BYTES = 1_500_000
FEATURES, SKETCH = 1 << 15, 256
DECAYS = (0.9, 0.98, 0.998)
"""One decay of 0.98 gave 0.5633 where all three gave 0.5619; without decay it was 0.5656 (4000 steps)."""
FILTER_CHUNK = 64
MAX_GAP = 0.012
GRID = [(matrix, other) for matrix in (3e-3, 6e-3) for other in (1e-3, 3e-3, 6e-3)]


@dataclass(frozen=True)
class Unit:
    """One model to train: a block that draws `share` of its batches from its own cluster, or end to end."""

    seed: int
    steps: int
    index: int | None
    matrix_lr: float
    other_lr: float
    share: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a unit finds its text, and how large it is."""

    texts: str
    device: str
    quick: bool


def prepare_texts(source: Path, folder: Path, clusters: int) -> None:
    """Training text, its clusters, pooling and held-out text as files of bytes; made once."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = lzma.decompress((source / "train.txt.xz").read_bytes())
    starts = [found.start() for found in re.finditer(rb"(?:(?<=\n\n)|\A)---\n(?=[a-zA-Z_.-]+:)", whole)]
    documents = [whole[a:b] for a, b in zip(starts, [*starts[1:], len(whole)], strict=True)]
    # Pooling documents are chosen by hash: a choice by position would depend on the order of the files.
    by_hash = sorted(range(len(documents)), key=lambda i: hashlib.sha256(documents[i]).digest())
    sizes = np.cumsum([len(documents[i]) for i in by_hash])
    pooling = set(by_hash[: int(np.searchsorted(sizes, POOL_BYTES)) + 1])
    training = [document for i, document in enumerate(documents) if i not in pooling]
    labels = cluster(sketches(training), np.array([len(one) for one in training]), clusters)
    (folder / "valid").write_bytes(lzma.decompress((source / "valid.txt.xz").read_bytes()))
    (folder / "pool").write_bytes(b"".join(documents[i] for i in by_hash if i in pooling))
    (folder / "train").write_bytes(b"".join(training))
    for number in range(clusters):
        own = b"".join(one for one, label in zip(training, labels, strict=True) if label == number)
        (folder / f"cluster-{number}").write_bytes(own)


def sketches(documents: list[bytes]) -> NDArray[np.float32]:
    """Roots of word counts times inverse document frequency, hashed and projected at random, of length 1."""
    projection = np.random.default_rng(0).standard_normal((FEATURES, SKETCH)).astype(np.float32)
    counts, seen = [], np.zeros(FEATURES)
    for document in documents:
        words = re.findall(rb"[A-Za-z]{3,}", document[:20_000].lower())
        hashed = np.array([zlib.crc32(word) % FEATURES for word in words], dtype=np.int64)
        counts.append(np.unique(hashed, return_counts=True))
        seen[counts[-1][0]] += 1
    rarity = np.log((1 + len(documents)) / (1 + seen))
    rows = [(np.sqrt(count) * rarity[word]).astype(np.float32) @ projection[word] for word, count in counts]
    stacked = np.stack(rows)
    return np.asarray(stacked / (np.linalg.norm(stacked, axis=1, keepdims=True) + 1e-6), dtype=np.float32)


def cluster(rows: NDArray[np.float32], sizes: NDArray[np.int64], clusters: int) -> list[int]:
    """Spherical k-means; a price that rises while a cluster holds more than its part keeps bytes equal."""
    x, weight = torch.from_numpy(rows), torch.from_numpy(sizes).float()
    weight /= weight.sum()
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(clusters))[:clusters]
    centres, price = x[chosen].clone(), torch.zeros(clusters)
    labels = torch.zeros(len(x), dtype=torch.int64)
    for iteration in range(60):
        labels = (x @ centres.T - price).argmax(1)
        load = torch.zeros(clusters).index_add_(0, labels, weight)
        price += 0.3 * (load * clusters - 1).clamp(-1, 1) * 0.97**iteration
        for number in range(clusters):
            own = labels == number
            if bool(own.any()):
                centres[number] = F.normalize((x[own] * weight[own, None]).sum(0), dim=0)
    return [int(label) for label in labels]


class Batches:
    """Windows drawn by hash: the first rows from the block's own cluster, the rest from all text."""

    def __init__(self, folder: Path, unit: Unit, recipe: Recipe, device: torch.device) -> None:
        def on_device(name: str) -> Tensor:
            return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.uint8).to(device)

        self.everything = on_device("train")
        self.own = on_device(f"cluster-{unit.index}") if unit.share else self.everything
        self.seed, self.batch_size = unit.seed, recipe.training.batch
        self.own_rows = round(unit.share * self.batch_size)
        self.reach = torch.arange(recipe.model.context + 1, device=device)

    def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
        key = f"specialise/{self.seed}/{shard}/{step}".encode()
        drawn = np.frombuffer(hashlib.shake_128(key).digest(8 * self.batch_size), dtype="<u8")
        parts = []
        for text, draws in ((self.own, drawn[: self.own_rows]), (self.everything, drawn[self.own_rows :])):
            starts = torch.from_numpy((draws % np.uint64(len(text) - len(self.reach))).astype(np.int64))
            parts.append(text[starts.to(text.device)[:, None] + self.reach])
        windows = torch.cat(parts).long()
        return windows[:, :-1], windows[:, 1:]


def recipe_of(unit: Unit, quick: bool) -> Recipe:
    model: dict[str, Any] = {
        "width": 384,
        "heads": 6,
        "blocks": BLOCKS,
        "layers_per_block": 3,
        "context": 512,
    }
    training: dict[str, Any] = {
        "steps": unit.steps,
        "matrix_lr": unit.matrix_lr,
        "other_lr": unit.other_lr,
        "reference_other_lr": None,
    }
    if quick:
        model.update(width=64, heads=2, layers_per_block=1, context=64)
        training.update(batch=8, warmup_steps=5)
    sections = {"model": model, "training": training, "objective": {"hint_probability": 0.0}}
    return resolve_recipe(
        {"name": "specialise", "seed": unit.seed, "data": {"corpus": "builtin"}, **sections}
    )


def build(unit: Unit, place: Place) -> tuple[Recipe, Objective, Codebook, Block]:
    recipe, device = recipe_of(unit, place.quick), torch.device(place.device)
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    block = build_block(
        recipe.model,
        recipe.objective,
        vocabulary=256,
        seed=derive_seed("init", unit.seed, "reference" if unit.index is None else unit.index),
        num_layers=recipe.model.layers_per_block * (BLOCKS if unit.index is None else 1),
        hints=False,
    )
    return recipe, objective, build_codebook(recipe, 256).to(device), block.to(device)


def train_unit(unit: Unit, place: Place) -> tuple[Unit, dict[str, float]]:
    """In a process of its own; leaves the weights beside the text, returns the losses of this model alone."""
    torch.set_num_threads(1)
    recipe, objective, codebook, block = build(unit, place)
    batches: Any = Batches(Path(place.texts), unit, recipe, torch.device(place.device))
    trainer = BlockTrainer(recipe, objective, block, unit.index, batches, codebook)
    for step in range(unit.steps):
        trainer.step(step, unit.index or 0)
    save_file(
        {name: value.contiguous() for name, value in block.cpu().state_dict().items()}, weights(unit, place)
    )
    alone = {part: log_probs([unit], place, part) for part in ("pool", "valid")}
    return unit, {part: -float(picked(rows, y).mean()) for part, (rows, y) in alone.items()}


def weights(unit: Unit, place: Place) -> Path:
    return Path(place.texts) / f"{hashlib.sha256(repr(unit).encode()).hexdigest()[:16]}.safetensors"


@torch.no_grad()
def log_probs(units: list[Unit], place: Place, part: str) -> tuple[Tensor, Tensor]:
    """Every model's log-probs, B x windows x positions x vocabulary in half precision, and the targets."""
    text, device = (Path(place.texts) / part).read_bytes(), torch.device(place.device)
    rows, y = [], torch.empty(0)
    for unit in units:
        recipe, _, codebook, block = build(unit, place)
        block.load_state_dict(load_file(weights(unit, place)))
        block.eval()
        context = recipe.model.context
        tokens = torch.frombuffer(bytearray(text[:20_000] if place.quick else text), dtype=torch.uint8).long()
        count = (len(tokens) - 1) // context
        x = tokens[: count * context].view(count, context).to(device)
        y = tokens[1 : count * context + 1].view(count, context).to(device)
        parts = []
        for windows in torch.split(x, 64):
            with autocast(device):
                logits = block(windows, codebook()).logits_BTV
            parts.append(torch.log_softmax(logits.float(), -1).half())
        rows.append(torch.cat(parts))
    return torch.stack(rows), y


def picked(rows_BNTV: Tensor, y_NT: Tensor) -> Tensor:
    """Log-likelihood of each target under each model."""
    index = y_NT[None, ..., None].expand(len(rows_BNTV), -1, -1, 1)
    return rows_BNTV.gather(-1, index)[..., 0].float()


def past_likelihood(picked_BNT: Tensor, decay: float) -> Tensor:
    """Decayed sum of what came before each position in its window: a recursive filter, in chunks."""
    count, windows, length = picked_BNT.shape
    chunks = F.pad(picked_BNT, (0, -length % FILTER_CHUNK)).reshape(count, windows, -1, FILTER_CHUNK)
    i = torch.arange(FILTER_CHUNK, device=picked_BNT.device)
    distance = (i[:, None] - i[None, :] - 1).float()
    kernel = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
    inside = torch.einsum("bnkc,tc->bnkt", chunks, kernel)
    tails = torch.einsum("bnkc,c->bnk", chunks, decay ** (FILTER_CHUNK - 1 - i).float())
    carried = [torch.zeros_like(tails[..., 0])]
    for k in range(tails.shape[-1] - 1):
        carried.append(carried[-1] * decay**FILTER_CHUNK + tails[..., k])
    whole = inside + torch.stack(carried, -1)[..., None] * decay ** i.float()
    return whole.reshape(count, windows, -1)[..., :length]


class Pool(nn.Module):
    """The log-linear pool; without decays its weights are the same everywhere."""

    def __init__(self, count: int, decays: tuple[float, ...]) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.zeros(count))
        self.log_sum = nn.Parameter(torch.zeros(()))
        self.log_tau = nn.Parameter(torch.full((len(decays),), -4.0))

    def forward(self, rows_BPV: Tensor, past_DBP: Tensor) -> Tensor:
        evidence = self.prior[:, None] + torch.einsum("d,dbp->bp", self.log_tau.exp(), past_DBP)
        weight_BP = torch.softmax(evidence, 0) * self.log_sum.exp()
        return torch.log_softmax((rows_BPV.float() * weight_BP[..., None]).sum(0), -1)


def score_pool(units: list[Unit], place: Place, decays: tuple[float, ...]) -> dict[str, float]:
    """Fit on pooling text, score on both."""
    texts = {}
    for part in ("pool", "valid"):
        rows, y = log_probs(units, place, part)
        likelihood = picked(rows, y)
        past = [past_likelihood(likelihood, decay).flatten(1) for decay in decays]
        empty = torch.zeros(0, len(units), y.numel(), device=y.device)
        texts[part] = rows.flatten(1, 2), y.flatten(), torch.stack(past) if past else empty
    pool = Pool(len(units), decays).to(place.device)
    optimizer = torch.optim.Adam(pool.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    rows, y, past_all = texts["pool"]
    generator = torch.Generator(y.device).manual_seed(1)
    for _ in range(60 if place.quick else 250):
        chosen = torch.randint(0, len(y), (8192,), generator=generator, device=y.device)
        loss = F.nll_loss(pool(rows[:, chosen], past_all[:, :, chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    found = {}
    with torch.no_grad():
        for part, (rows, y, past_all) in texts.items():
            pieces = [slice(i, i + 65_536) for i in range(0, len(y), 65_536)]
            sums = [F.nll_loss(pool(rows[:, s], past_all[:, :, s]), y[s], reduction="sum") for s in pieces]
            found[part] = float(sum(sums)) / len(y)
    return found


def provenance() -> dict[str, Any]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    return {
        "commit": git("rev-parse", "HEAD") or None,
        "clean": not git("status", "--porcelain"),
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument(
        "--texts", type=Path, default=Path("build/specialise"), help="prepared text and weights"
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--shares", default="0,0.75")
    parser.add_argument("--block-lr", default="6e-3,3e-3", help="matrix_lr,other_lr")
    parser.add_argument("--reference-lr", default="6e-3,1e-3", help="matrix_lr,other_lr")
    parser.add_argument("--tune", action="store_true", help="try the grid of learning rates for both sides")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    if not (arguments.texts / f"cluster-{BLOCKS - 1}").exists():
        prepare_texts(arguments.docs, arguments.texts, BLOCKS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(str(arguments.texts), device, arguments.quick)
    steps = 30 if arguments.quick else arguments.steps
    units = []
    for seed in (int(seed) for seed in arguments.seeds.split(",")):
        if arguments.tune:
            units += [Unit(seed, steps, index, *rates) for rates in GRID for index in (None, 0)]
            continue
        block_rates = (float(rate) for rate in arguments.block_lr.split(","))
        reference_rates = (float(rate) for rate in arguments.reference_lr.split(","))
        plain = Unit(seed, steps, 0, *block_rates)
        units.append(Unit(seed, steps, None, *reference_rates))
        for share in (float(share) for share in arguments.shares.split(",")):
            units += [replace(plain, index=index, share=share) for index in range(BLOCKS)]
    losses: dict[Unit, dict[str, float]] = {}
    report: dict[str, Any] = {**provenance(), "units": [], "pools": []}
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as processes:
        for future in as_completed([processes.submit(train_unit, unit, place) for unit in units]):
            unit, losses[unit] = future.result()
            report["units"].append({**asdict(unit), "ce": losses[unit]})
            print(f"{time.monotonic() - began:5.0f} s {unit} {losses[unit]}", flush=True)
    gaps = []
    for reference in () if arguments.tune else [unit for unit in units if unit.index is None]:
        for share in sorted({unit.share for unit in units}):
            blocks = [
                u for u in units if (u.seed, u.share) == (reference.seed, share) and u.index is not None
            ]
            for decays in ((), DECAYS) if blocks else ():
                found = score_pool(blocks, place, decays)
                gap = found["valid"] - losses[reference]["valid"]
                if share and decays:
                    gaps.append(gap)
                row = {
                    "seed": reference.seed,
                    "steps": steps,
                    "share": share,
                    "decays": decays,
                    "ce": found,
                    "gap": gap,
                }
                report["pools"].append(row)
                print(
                    f"seed {reference.seed} share {share:g} decays {decays}: "
                    f"{found['valid']:.4f}, gap {gap:+.4f}"
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick and gaps and min(gaps) > MAX_GAP:
        print(f"the best gap of a specialised pool is {min(gaps):+.4f}; wanted at most {MAX_GAP:+.3f}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
