"""Blocks that specialise in a part of the text, pooled by how well each predicted the text so far.

    python benchmarks/specialise.py --docs FOLDER [--steps 4000] [--shares 0,0.75] [--seeds 0] [--jobs 12]
    python benchmarks/specialise.py --docs FOLDER --tokenizer tokenizer.json --prepare
    python benchmarks/specialise.py --docs FOLDER --size small --equal-operations [--alone]    # CPU
    python benchmarks/specialise.py --quick ...      # CPU, tiny models, a few minutes

FOLDER has train.txt.xz and valid.txt.xz, documents that begin with a `---` line of front matter. Documents
are clustered once (hashed words, k-means with equal bytes per cluster). Block b draws `share` of each batch
from cluster b and the rest from all text; share 0 is the plain pool of blocks. Weights at a position t are

    w_b  ~  prior_b * exp(sum over decays d of tau_d * sum over s < t of d^(t-s-1) * log p_b(y_s))

and the pool is log-linear. Prior, taus and the sum of the weights are fitted on pooling documents, which
nobody trains on; held-out text is scored once. The end-to-end reference has the layers of all blocks and
sees as many bytes. Learning rates: `--tune` tries the same grid for a block and for the reference and chooses
by the loss on pooling text. Losses are nats per byte, whatever the tokenizer.

With a large vocabulary the output maps of four blocks cost more than one: `--block-steps` gives the blocks
fewer steps, and the report has the operations of each side. `--own-output` lets every model learn its output
map instead of using the fixed codebook. `--block-shape 2x448` gives blocks other layers and another width,
`--context` gives both sides another window at as many tokens a step, and `--clusters` another number of parts
(read when the text is prepared): what else might lower the loss, each to be measured at equal operations
(`--block-steps`, or `--equal-operations`, which works them out). `--alone` trains one block on all text with
the operations of all of them, beside them. `--size small` is four blocks of 2 layers of width 32, context
128, 512 bytes a step of the same text, scored on the first 262,144 bytes of pooling and of held-out text.
`--stop-after SECONDS` saves what is not finished and exits 3; the same command goes on. A search needs its
report only: trials that are in it are not made again, and neither is end to end. A report (`--json`) of the
same steps keeps its other seeds, so that it can be made seed by seed; of several seeds it has the mean gap of
each pool and its standard error.
Exits 1 when the specialised pool of the best share is more than 0.012 nats per byte above end to end with any
seed, and after `--tune` where a best rate lies on the edge of the grid.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import re
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from provenance import check_claims, write_report
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tune import SIDES, Trial, best_of, on_the_edge, rates

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.bpe import FileTokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.families import build_block
from blocktrain.model.objective import Objective
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.device import autocast
from blocktrain.training.inner import BlockTrainer, Codebook, build_codebook
from blocktrain.training.source import source_commit

BLOCKS = 4
NOT_FINISHED = 3
POOL_BYTES = 1_500_000
FEATURES, SKETCH = 1 << 15, 256
DECAYS = (0.9, 0.98, 0.998)
"""One decay of 0.98 gave 0.5633 where all three gave 0.5619; without decay it was 0.5656 (4000 steps)."""
FILTER_CHUNK = 64
MAX_GAP = 0.012
SIZES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "small": {
        "layers": 2,
        "width": 32,
        "context": 128,
        "head_width": 16,
        "tokens_per_step": 512,
        # 256 rows of this width cannot be orthogonal, so every model learns its output map.
        "own_output": True,
    },
}
"""What a unit has otherwise than a full one."""
SCORED_OF_SMALL = 1 << 18


@dataclass(frozen=True)
class Unit:
    """One model to train: a block that draws `share` of its batches from its own cluster, or end to end."""

    seed: int
    steps: int
    index: int | None
    matrix_lr: float
    other_lr: float
    share: float = 0.0
    own_output: bool = False
    layers: int = 3
    """Of one block; end to end has those of all blocks."""
    width: int = 384
    context: int = 512
    head_width: int = 64
    tokens_per_step: int = 32_768


@dataclass(frozen=True)
class Place:
    """Where a unit finds its text, how large it is, and when it must stop for now."""

    texts: str
    device: str
    quick: bool
    stop_at: float | None = None
    vocabulary: int = 256
    most_scored: int | None = None
    """Tokens of the pooling and of the held-out text; None: all."""

    def tokens(self, part: str) -> Tensor:
        dtype = np.uint8 if self.vocabulary <= 256 else np.uint16
        return torch.from_numpy(np.fromfile(Path(self.texts) / part, dtype).astype(np.int32))

    def bytes_per_token(self, part: str) -> float:
        return float(json.loads((Path(self.texts) / "text.json").read_text())["bytes_per_token"][part])


def prepare_texts(source: Path, folder: Path, clusters: int, tokenizer: Path | None) -> None:
    """Training, pooling and held-out text as files of tokens, and each document's length and cluster."""
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
    texts = {
        "train": training,
        "pool": [documents[i] for i in by_hash if i in pooling],
        "valid": [lzma.decompress((source / "valid.txt.xz").read_bytes())],
    }
    encoder = None if tokenizer is None else FileTokenizer.open(tokenizer)
    about: dict[str, Any] = {"vocabulary": encoder.vocabulary if encoder else 256, "bytes_per_token": {}}
    for part, found in texts.items():
        # Without the separator that the product puts between documents: bytes have none either.
        plain = [one.decode(errors="replace") for one in found]
        encoded = found if encoder is None else encoder.encode_documents(plain)
        (folder / part).write_bytes(b"".join(encoded))
        size = 1 if encoder is None else 2
        lengths = [len(one) // size for one in encoded]
        about["bytes_per_token"][part] = sum(map(len, found)) / sum(lengths)
        if part == "train":
            save_file(
                {"lengths": torch.tensor(lengths), "labels": torch.tensor(labels)}, folder / "documents"
            )
    (folder / "text.json").write_text(json.dumps(about))


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

    def __init__(self, place: Place, unit: Unit, recipe: Recipe) -> None:
        device = torch.device(place.device)
        everything = place.tokens("train")
        if unit.share and unit.index is not None:
            documents = load_file(Path(place.texts) / "documents")
            cluster_of_token = documents["labels"].repeat_interleave(documents["lengths"])
            # With fewer clusters than blocks several blocks have one; with more, a block has several.
            owned = unit.index % (int(documents["labels"].max()) + 1)
            own = everything[cluster_of_token % BLOCKS == owned]
        else:
            own = everything
        self.everything = everything.to(device)
        self.own = own.to(device) if unit.share else self.everything
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
        "width": unit.width,
        "heads": unit.width // unit.head_width,
        "blocks": BLOCKS,
        "layers_per_block": unit.layers,
        "context": unit.context,
    }
    training: dict[str, Any] = {
        "batch": unit.tokens_per_step // unit.context,
        "steps": unit.steps,
        "matrix_lr": unit.matrix_lr,
        "other_lr": unit.other_lr,
        "reference_other_lr": None,
    }
    if quick:
        model.update(width=64, heads=2, layers_per_block=1, context=64)
        training.update(batch=8, warmup_steps=5)
    objective = {"hint_probability": 0.0, "codebook": "own" if unit.own_output else "fixed"}
    sections = {"model": model, "training": training, "objective": objective}
    return resolve_recipe(
        {"name": "specialise", "seed": unit.seed, "data": {"corpus": "builtin"}, **sections}
    )


def build(unit: Unit, place: Place) -> tuple[Recipe, Objective, Codebook, Block]:
    recipe, device = recipe_of(unit, place.quick), torch.device(place.device)
    objective = Objective(recipe.model, recipe.objective, vocabulary=place.vocabulary)
    block = build_block(
        recipe.model,
        recipe.objective,
        vocabulary=place.vocabulary,
        seed=derive_seed("init", unit.seed, "reference" if unit.index is None else unit.index),
        num_layers=recipe.model.layers_per_block * (BLOCKS if unit.index is None else 1),
        hints=False,
    )
    return recipe, objective, build_codebook(recipe, place.vocabulary).to(device), block.to(device)


def operations(unit: Unit, place: Place) -> int:
    """Of its whole training."""
    recipe, _, _, block = build(unit, replace(place, device="cpu"))
    tokens = unit.steps * recipe.training.batch * recipe.model.context
    return training_flops(forward_flops_per_token(recipe.model, block, place.vocabulary), 0, tokens)


def train_unit(
    unit: Unit,
    place: Place,
    steps: range | None = None,
    begins_from: Path | None = None,
    batches_of: Callable[[Recipe], Any] | None = None,
) -> tuple[Unit, dict[str, float] | None]:
    """In a process of its own; leaves the weights beside the text, returns the losses of this model alone,
    or None if it had to stop before the end. A part of its `steps` may go on from the weights of another."""
    torch.set_num_threads(1)
    path = weights(unit, place)
    if not path.exists():
        recipe, objective, codebook, block = build(unit, place)
        if begins_from is not None:
            block.load_state_dict(load_file(begins_from))
        batches: Any = Batches(place, unit, recipe) if batches_of is None else batches_of(recipe)
        trainer = BlockTrainer(recipe, objective, block, unit.index, batches, codebook)
        steps = range(unit.steps) if steps is None else steps
        first, half_way = steps.start, path.with_suffix(".half")
        if half_way.exists():
            saved = load_file(half_way)
            first = int(saved.pop("step"))
            block.load_state_dict({n[2:]: saved.pop(n) for n in list(saved) if n.startswith("w.")})
            trainer.optimizer.load_state_tensors({n[2:]: v for n, v in saved.items()})
        for step in range(first, steps.stop):
            trainer.step(step, unit.index or 0)
            if step % 50 == 49 and place.stop_at is not None and step + 1 < steps.stop:
                if place.device == "cuda":
                    torch.cuda.synchronize()
                if time.time() > place.stop_at:
                    state = {"step": torch.tensor(step + 1)}
                    state |= {f"w.{n}": v.cpu().clone() for n, v in block.state_dict().items()}
                    moments = trainer.optimizer.state_tensors()
                    state |= {f"o.{n}": v.cpu().clone() for n, v in moments.items()}
                    save_file(state, half_way)
                    return unit, None
        save_file({n: v.cpu().clone() for n, v in block.state_dict().items()}, path)
    return unit, {part: -float(Rows([unit], place, part).picked().mean()) for part in ("pool", "valid")}


def weights(unit: Unit, place: Place) -> Path:
    return Path(place.texts) / f"{hashlib.sha256(repr(unit).encode()).hexdigest()[:16]}.safetensors"


class Rows:
    """Every model's log-probs of a text, by windows, in half precision. All at once only where that is small:
    a vocabulary of 16,384 makes 67 MB of a window of 512 tokens and four models."""

    kept: Tensor | None = None

    def __init__(self, units: list[Unit], place: Place, part: str) -> None:
        self.device = torch.device(place.device)
        self.models = []
        for unit in units:
            recipe, _, codebook, block = build(unit, place)
            block.load_state_dict(load_file(weights(unit, place)))
            self.models.append((block.eval(), codebook))
        context = recipe.model.context
        tokens = place.tokens(part)[: 20_000 if place.quick else place.most_scored].long().to(self.device)
        count = (len(tokens) - 1) // context
        self.x = tokens[: count * context].view(count, context)
        self.y = tokens[1 : count * context + 1].view(count, context)
        self.at_once = max(1, (2 << 30) // (2 * len(units) * context * place.vocabulary))

    @torch.no_grad()
    def of(self, windows: slice | Tensor) -> Tensor:
        """Log-probs B x windows x positions x vocabulary."""
        if self.kept is not None:
            return self.kept[:, windows]
        rows = []
        for block, codebook in self.models:
            parts = []
            for x in torch.split(self.x[windows], 16):
                with autocast(self.device):
                    logits = block(x, codebook()).logits_BTV
                parts.append(torch.log_softmax(logits.float(), -1).half())
            rows.append(torch.cat(parts))
        return torch.stack(rows)

    def keep(self) -> Rows:
        """Ask the models once only, if there is room for what they say of the whole text."""
        if len(self.x) <= self.at_once:
            self.kept = self.of(slice(None))
        return self

    def pieces(self) -> list[slice]:
        return [slice(i, i + self.at_once) for i in range(0, len(self.x), self.at_once)]

    def picked(self) -> Tensor:
        """Log-likelihood of each target under each model, B x windows x positions."""
        found = []
        for piece in self.pieces():
            index = self.y[piece][None, ..., None].expand(len(self.models), -1, -1, 1)
            found.append(self.of(piece).gather(-1, index)[..., 0].float())
        return torch.cat(found, 1)


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

    def past(rows: Rows) -> Tensor:
        likelihood = rows.picked()
        found = [past_likelihood(likelihood, decay) for decay in decays]
        return torch.stack(found) if found else torch.zeros(0, *likelihood.shape, device=rows.device)

    pooling = Rows(units, place, "pool").keep()
    # As much of the pooling text as fits: 8 numbers are fitted, so 46,000 positions are plenty.
    fitted = min(len(pooling.x), 4 * pooling.at_once)
    spread = torch.linspace(0, len(pooling.x) - 1, fitted, device=pooling.device).long()
    rows, y = pooling.of(spread).flatten(1, 2), pooling.y[spread].flatten()
    past_pool = past(pooling)
    past_fit = past_pool[:, :, spread].flatten(2)
    pool = Pool(len(units), decays).to(place.device)
    optimizer = torch.optim.Adam(pool.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    generator = torch.Generator(y.device).manual_seed(1)
    for _ in range(60 if place.quick else 250):
        chosen = torch.randint(0, len(y), (8192,), generator=generator, device=y.device)
        loss = F.nll_loss(pool(rows[:, chosen], past_fit[:, :, chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    del rows
    found = {}
    for part, text in (("pool", pooling), ("valid", Rows(units, place, "valid").keep())):
        past_all, total = (past_pool if part == "pool" else past(text)), 0.0
        for piece in text.pieces():
            for window, row in enumerate(text.of(piece).unbind(1), start=piece.start):
                with torch.no_grad():
                    rows = pool(row, past_all[:, :, window])
                    total += float(F.nll_loss(rows, text.y[window], reduction="sum"))
        found[part] = total / text.y.numel()
    return found


def mean_gaps(pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pool the mean gap over the seeds, and its standard error; of one seed there is none."""
    gaps: dict[tuple[int, float, tuple[float, ...]], list[float]] = {}
    for row in pools:
        key = row.get("blocks", BLOCKS), row["share"], tuple(row["decays"])
        gaps.setdefault(key, []).append(row["gap"])
    return [
        {
            "blocks": blocks,
            "share": share,
            "decays": decays,
            "seeds": len(found),
            "gap": statistics.mean(found),
            "error": statistics.stdev(found) / math.sqrt(len(found)),
        }
        for (blocks, share, decays), found in gaps.items()
        if len(found) > 1
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, help="not needed where --texts is already prepared")
    parser.add_argument(
        "--texts", type=Path, default=Path("build/specialise"), help="prepared text and weights"
    )
    parser.add_argument("--clusters", type=int, default=BLOCKS)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--block-shape", metavar="LAYERSxWIDTH", help="default: that of the size, 3x384")
    parser.add_argument("--context", type=int, help="default: that of the size, 512")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: bytes")
    parser.add_argument("--prepare", action="store_true", help="prepare the text and stop")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--block-steps", type=int, help="default: those of the reference")
    parser.add_argument(
        "--equal-operations",
        action="store_true",
        help="as many steps of each block as cost what end to end costs",
    )
    parser.add_argument("--alone", action="store_true", help="also one block with all the operations")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--shares", default="0,0.75")
    parser.add_argument("--block-lr", default="6e-3,3e-3", help="matrix_lr,other_lr")
    parser.add_argument("--reference-lr", default="6e-3,1e-3", help="matrix_lr,other_lr")
    parser.add_argument("--own-output", action="store_true", help="every model learns its output map")
    parser.add_argument(
        "--tune",
        nargs="?",
        const="3e-3,6e-3",
        metavar="MATRIX_LRS",
        help="try these, each with --other, for both sides; default 3e-3,6e-3",
    )
    parser.add_argument("--other", default=rates("1e-3,3e-3,6e-3"), type=rates, help="other_lr, for --tune")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stop-after", type=float, help="seconds of training; exit 3 if not finished")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    if not (arguments.texts / "text.json").exists():
        if arguments.docs is None:
            parser.error(f"{arguments.texts} is not prepared: --docs FOLDER is needed")
        prepare_texts(arguments.docs, arguments.texts, arguments.clusters, arguments.tokenizer)
    if arguments.prepare:
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(
        str(arguments.texts),
        device,
        arguments.quick,
        time.time() + arguments.stop_after if arguments.stop_after else None,
        json.loads((arguments.texts / "text.json").read_text())["vocabulary"],
        SCORED_OF_SMALL if arguments.size == "small" else None,
    )
    steps = 30 if arguments.quick else arguments.steps
    block_steps = steps if arguments.quick else arguments.block_steps or steps
    units: list[Unit] = []
    shared: dict[str, Any] = dict(SIZES[arguments.size])
    if arguments.own_output:
        shared["own_output"] = True
    if arguments.context:
        shared["context"] = arguments.context
    end_to_end = Unit(0, steps, None, 0.0, 0.0, **shared)
    one_block = replace(end_to_end, steps=block_steps, index=0)
    if arguments.block_shape:
        layers, width = map(int, arguments.block_shape.split("x"))
        one_block = replace(one_block, layers=layers, width=width)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.equal_operations:
        whole, own = (
            operations(replace(one, steps=1, matrix_lr=1, other_lr=1), place)
            for one in (end_to_end, one_block)
        )
        block_steps = round(steps * whole / (BLOCKS * own))
        one_block = replace(one_block, steps=block_steps)
    for seed in seeds:
        if arguments.tune:
            for matrix_lr, other_lr in product(rates(arguments.tune), arguments.other):
                units.append(replace(end_to_end, seed=seed, matrix_lr=matrix_lr, other_lr=other_lr))
                units.append(replace(one_block, seed=seed, matrix_lr=matrix_lr, other_lr=other_lr))
            continue
        matrix_lr, other_lr = (float(rate) for rate in arguments.reference_lr.split(","))
        units.append(replace(end_to_end, seed=seed, matrix_lr=matrix_lr, other_lr=other_lr))
        matrix_lr, other_lr = (float(rate) for rate in arguments.block_lr.split(","))
        plain = replace(one_block, seed=seed, matrix_lr=matrix_lr, other_lr=other_lr)
        for share in (float(share) for share in arguments.shares.split(",")):
            units += [replace(plain, index=index, share=share) for index in range(BLOCKS)]
        if arguments.alone:
            units.append(replace(plain, steps=BLOCKS * block_steps))
    losses: dict[Unit, dict[str, float]] = {}
    report: dict[str, Any] = {"units": [], "pools": []}
    if arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text(encoding="utf-8"))
        of_others = [] if arguments.tune else [row for row in before["pools"] if row["seed"] not in seeds]
        known = [(block_steps, steps), (BLOCKS * block_steps, steps)]
        if any((row["steps"], row["reference_steps"]) not in known for row in of_others):
            parser.error(f"{arguments.json} has pools of other steps; name another file")
        report["pools"] = of_others
        for row in before["units"]:
            unit = Unit(**{field.name: row[field.name] for field in fields(Unit) if field.name in row})
            if unit in units and (arguments.tune or unit.index is None or unit.steps != block_steps):
                # Only its loss is asked for; of a pool's blocks the weights are, which may be elsewhere.
                losses[unit] = row["ce_per_byte"]
                report["units"].append(row)
            elif not arguments.tune and row["seed"] not in seeds:
                report["units"].append(row)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as processes:
        left = [processes.submit(train_unit, unit, place) for unit in units if unit not in losses]
        for future in as_completed(left):
            unit, found = future.result()
            if found is None:
                print(f"{time.monotonic() - began:5.0f} s {unit} goes on with the same command", flush=True)
                continue
            losses[unit] = {part: ce / place.bytes_per_token(part) for part, ce in found.items()}
            recipe = recipe_of(unit, place.quick)
            tokens = unit.steps * recipe.training.batch * recipe.model.context
            row = {**asdict(unit), "ce_per_byte": losses[unit], "tokens": tokens}
            row |= {"training_flops": operations(unit, place), "commit": source_commit()}
            report["units"].append(row)
            if arguments.tune:
                write_report(arguments.json, "specialise", report, seeds)
            print(f"{time.monotonic() - began:5.0f} s {row}", flush=True)
    if len(losses) < len(units):
        return NOT_FINISHED
    for reference in () if arguments.tune else [unit for unit in units if unit.index is None]:
        pools: dict[tuple[int, float], list[Unit]] = {}
        for unit in units:
            if unit.seed == reference.seed and unit.index is not None:
                pools.setdefault((unit.steps, unit.share), []).append(unit)
        for (its_steps, share), blocks in pools.items():
            for decays in ((), DECAYS) if len(blocks) > 1 else ((),):
                if len(blocks) > 1:
                    per_token = score_pool(blocks, place, decays)
                    found = {part: ce / place.bytes_per_token(part) for part, ce in per_token.items()}
                else:
                    found = losses[blocks[0]]
                gap = found["valid"] - losses[reference]["valid"]
                row = {
                    "seed": reference.seed,
                    "steps": its_steps,
                    "reference_steps": steps,
                    "blocks": len(blocks),
                    "share": share,
                    "decays": decays,
                    "ce_per_byte": found,
                    "gap": gap,
                    "commit": source_commit(),
                }
                report["pools"].append(row)
                print(
                    f"seed {reference.seed} blocks {len(blocks)} share {share:g} decays {decays}: "
                    f"{found['valid']:.4f}, gap {gap:+.4f}",
                    flush=True,
                )
    report["means"] = mean_gaps(report["pools"])
    for row in report["means"]:
        print(
            f"blocks {row['blocks']} share {row['share']:g} decays {row['decays']}: "
            f"gap {row['gap']:+.4f}, {row['error']:.4f}"
        )
    write_report(arguments.json, "specialise", report, sorted({row["seed"] for row in report["units"]}))
    # The worst seed of the best share: a seed is no choice, and a share is.
    gaps: dict[float, list[float]] = {}
    for row in report["pools"]:
        if row["share"] and row["decays"]:
            gaps.setdefault(row["share"], []).append(row["gap"])
    gap_claim = {f"a gap of at most {MAX_GAP}": min(map(max, gaps.values())) <= MAX_GAP} if gaps else {}
    edges = []
    if arguments.tune:
        trials = [
            Trial(SIDES[unit.index is None], unit.matrix_lr, unit.other_lr, found["pool"])
            for unit, found in losses.items()
        ]
        best = [best_of(trials, side) for side in SIDES]
        print("\n".join(f"{one.side}: {one.matrix_lr:g}, {one.other_lr:g}: {one.ce:.4f}" for one in best))
        edges = [e for one in best for e in on_the_edge(one, rates(arguments.tune), arguments.other)]
    if arguments.quick:
        return 0
    return check_claims({**dict.fromkeys(edges, False), **gap_claim})


if __name__ == "__main__":
    sys.exit(main())
