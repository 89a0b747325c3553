"""What else might lower the loss of specialised blocks, side by side at equal operations.

    python benchmarks/search.py --docs FOLDER [--shape 1x64] [--steps 300] [--jobs 2] [--json FILE]
    python benchmarks/search.py --docs FOLDER --quick      # a few minutes
    python benchmarks/search.py --docs FOLDER --size full --reference-lr 6e-3,2.5e-4 --block-lr 6e-3,4e-3

FOLDER has train.txt.xz and valid.txt.xz, as for specialise.py, which prepares the text, draws the batches
and has the pool by the text so far. Four blocks, `--shape` says of how many layers and which width, read
2,048 bytes a step from the first 16 MB. `--steps` are those of a block of the default, which takes 0.75
of its batches from one of four clusters. The operations of these four are what every other row gets,
whatever it spends them on:

- end to end; equal blocks; eight clusters; half and double the context, for both sides;
- own text only, but for all text in the first quarter or in the last tenth;
- a trunk: a block trained on all text first and frozen, whose features all four take as input (`chain`);
- branches: one block trained on all text, from which all four go on with their own text. They get its
  weights and no optimizer state, and the learning rate goes on down the one cosine of all their steps;
- the last quarter taught by the pool of the four blocks, weighed by the text so far;
- weights averaged over the last steps, for end to end too.

Rates: both sides climb from the same pair, by factors of 2, on pooling text after a quarter of the steps,
until all four neighbours of the best pair were tried. The weights of each pool are fitted on pooling text;
held-out text is scored once. End to end, the default and the best `--again` of the rows that beat it on
pooling text are trained with the later seeds too. What is trained and scored lies in --work, and the same
command goes on with the rest.
Exits 1 when a pool with the default's context lies more than 0.005 nats per byte below the default, in the
mean over the seeds that it has: then the default should change.

`--size full` has the shape, text, batches and scores of specialise.py (4 blocks of 3 layers of width 384,
32,768 bytes a step of all the text, `--steps 4000`), given rates and the rows that `--rows` names, all with
every seed. Two rows are there only: one block alone with all the operations, and branches whose common block
goes on with all text as a fifth in the pool. Of one model the loss is its own, without a temperature. The
report is written whenever a row is finished. `--stop-after SECONDS` saves what is not finished and exits 3;
the same command goes on. No loss fails there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import specialise
import torch
import torch.nn.functional as F
from provenance import check_claims, write_report
from safetensors.torch import load_file, save_file
from specialise import (
    BLOCKS,
    DECAYS,
    NOT_FINISHED,
    Batches,
    Place,
    Pool,
    Rows,
    Unit,
    past_likelihood,
    prepare_texts,
    score_pool,
    train_unit,
    weights,
)
from torch import Tensor, nn

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, Hint
from blocktrain.model.families import build_block
from blocktrain.model.objective import Loss, Objective
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.device import find_device
from blocktrain.training.inner import BlockTrainer, Codebook, build_codebook
from blocktrain.training.source import source_commit

CONTEXT, HEAD_WIDTH = 128, 32
TOKENS_PER_STEP, VOCABULARY = 2048, 256
SHARE = 0.75
CLUSTERS = (BLOCKS, 2 * BLOCKS)
TEXT_BYTES, POOL_BYTES, VALID_BYTES = 16_000_000, 1 << 17, 1 << 18
QUICK_SIZES = {"train": 4_000_000, "pool": 1 << 13, "valid": 1 << 13}
START = (6e-3, 4e-3)
"""Matrix and other rate from which both sides climb: the best of a block of width 384."""
AVERAGED = 0.05
"""The horizon of the averaged weights, as a part of all steps."""
TAUGHT = 0.5
"""The part of the loss that comes from the pool in the last quarter; the rest comes from the text."""
MAX_LOSS = 0.005
DEFAULT, END_TO_END = "share 0.75, four clusters (the default)", "end to end"
FULL_ROWS = {
    "end-to-end": END_TO_END,
    "alone": "one block alone",
    "half": "branches of one block, half of all operations",
    "goes-on": "branches of one block that goes on, half of all operations",
    "quarter": "branches of one block, a quarter of all operations",
    "default": DEFAULT,
    "own": "own text only, all text in the first quarter",
    "eight": "eight clusters, two for each block",
}
"""What --rows calls them; the longest chain first, whose end would wait alone."""
SMALL, FULL, TINY = "small", "full", "tiny"
"""Sizes of a learner; the last is what --quick makes of the full one."""


@dataclass(frozen=True)
class Learner:
    """One model to train, from the beginning or from where another one ended."""

    seed: int
    number: int
    """Of the block; it decides its first weights, its batches and its cluster."""
    steps: int
    """Of its schedule."""
    matrix_lr: float
    other_lr: float
    layers: int
    width: int
    context: int = CONTEXT
    share: float = 0.0
    """Of each batch from its own cluster."""
    clusters: int = BLOCKS
    all_first: float = 0.0
    """This part of the steps, the first ones, has batches from all text."""
    all_last: float = 0.0
    stop: int | None = None
    """Where it ends before its schedule does."""
    begins_from: Learner | None = None
    trunk: Learner | None = None
    """Trained before and frozen; its features are part of the input."""
    taught_by: tuple[Learner, ...] = ()
    size: str = SMALL

    @property
    def first(self) -> int:
        return 0 if self.begins_from is None else self.begins_from.end

    @property
    def end(self) -> int:
        return self.steps if self.stop is None else self.stop

    def needs(self) -> list[Learner]:
        return [one for one in (self.begins_from, self.trunk, *self.taught_by) if one is not None]

    def takes_all_text(self, step: int) -> bool:
        return step < self.all_first * self.steps or step >= (1 - self.all_last) * self.steps

    def __str__(self) -> str:
        told = hashlib.sha256(repr(self).encode()).hexdigest()[:16]
        return f"seed-{self.seed}-block-{self.number}-{told}"

    def unit(self) -> LearnerUnit:
        """At full size: what specialise.py builds, trains and scores, where end to end has no index."""
        whole = self.layers == BLOCKS * Unit.layers
        return LearnerUnit(
            self.seed,
            self.steps,
            None if whole else self.number,
            self.matrix_lr,
            self.other_lr,
            self.share,
            layers=Unit.layers if whole else self.layers,
            width=self.width,
            context=self.context,
            learner=str(self),
        )


@dataclass(frozen=True)
class LearnerUnit(Unit):
    learner: str = ""
    """Its weights' name must tell it from units that only begin or read otherwise."""


@dataclass(frozen=True)
class TableRow:
    """A row of the table: the models that are pooled at the end."""

    name: str
    learners: tuple[Learner, ...]
    averaged: bool = False
    trial: bool = False
    """Of rates: scored on pooling text only, as it is."""

    def __str__(self) -> str:
        told = hashlib.sha256(repr((self.learners, self.averaged, self.trial)).encode()).hexdigest()[:16]
        return f"row-{told}"

    def all_learners(self) -> list[Learner]:
        """Whatever must be trained for this row, each once, after what it needs."""
        found: dict[Learner, None] = {}

        def add(learner: Learner) -> None:
            for one in learner.needs():
                add(one)
            found.setdefault(learner)

        for learner in self.learners:
            add(learner)
        return list(found)

    def operations(self) -> int:
        """A trunk and a common beginning are trained once, and count once."""
        return sum(map(operations_of, self.all_learners()))


def recipe_of(learner: Learner) -> Recipe:
    if learner.size != SMALL:
        return specialise.recipe_of(learner.unit(), learner.size == TINY)
    return resolve_recipe(
        {
            "name": "search",
            "seed": learner.seed,
            "data": {"corpus": "builtin"},
            "model": {
                "width": learner.width,
                "heads": learner.width // HEAD_WIDTH,
                # Behind a trunk every block is the second of a chain of two.
                "blocks": BLOCKS if learner.trunk is None else 2,
                "layers_per_block": learner.layers,
                "context": learner.context,
            },
            "training": {
                "batch": TOKENS_PER_STEP // learner.context,
                "steps": learner.steps,
                "matrix_lr": learner.matrix_lr,
                "other_lr": learner.other_lr,
                "warmup_steps": min(50, learner.steps // 5),
            },
            # 256 rows of a small width cannot be orthogonal, so every model learns its output map.
            "objective": {
                "kind": "denoise" if learner.trunk is None else "chain",
                "hint_probability": 0.0,
                "codebook": "own",
            },
        }
    )


def build(learner: Learner) -> tuple[Recipe, Block, Codebook]:
    if learner.size != SMALL:
        here = Place("", "cpu", learner.size == TINY)
        recipe, _, codebook, block = specialise.build(learner.unit(), here)
        return recipe, block, codebook
    recipe = recipe_of(learner)
    block = build_block(
        recipe.model,
        recipe.objective,
        vocabulary=VOCABULARY,
        seed=derive_seed("init", learner.seed, learner.number),
        num_layers=learner.layers,
        hints=False,
        upstream=learner.trunk is not None,
    )
    return recipe, block, build_codebook(recipe, VOCABULARY)


@cache
def forward_of(layers: int, width: int, context: int, on_trunk: bool, size: str) -> tuple[int, int]:
    """Operations of a token's pass, and tokens of a step; building a model for each question would take
    longer than the answer."""
    plain = Learner(0, 0, 1, 1e-3, 1e-3, layers, width, context, size=size)
    recipe, block, _ = build(replace(plain, trunk=plain if on_trunk else None))
    tokens = recipe.training.batch * recipe.model.context
    return forward_flops_per_token(recipe.model, block, VOCABULARY), tokens


def operations_of(learner: Learner) -> int:
    """Of the steps that this learner makes itself: its own, and the passes of those it hears."""
    heard = (*([learner.trunk] if learner.trunk else ()), *learner.taught_by)
    (own, tokens), *others = (
        forward_of(one.layers, one.width, one.context, one.trunk is not None, one.size)
        for one in (learner, *heard)
    )
    return training_flops(own, sum(one for one, _ in others), (learner.end - learner.first) * tokens)


def fitted(name: str, make: Callable[[int], Sequence[Learner]], budget: int) -> TableRow:
    """The entry whose models have the steps that cost the budget; what `make` makes costs in proportion."""
    probe = 10_000
    steps = round(probe * budget / TableRow(name, tuple(make(probe))).operations())
    return TableRow(name, tuple(make(steps)))


def entries(
    seed: int,
    steps: int,
    rates: Mapping[str, tuple[float, float]],
    layers: int = 1,
    width: int = 64,
    size: str = SMALL,
) -> list[TableRow]:
    """Every row of a seed; the default's operations are the budget of all."""
    context = CONTEXT if size == SMALL else Unit.context
    whole = Learner(seed, 0, 0, *rates["end to end"], BLOCKS * layers, width, context, size=size)
    block = Learner(seed, 0, 0, *rates["block"], layers, width, context, share=SHARE, size=size)

    def four(steps: int, like: Learner) -> list[Learner]:
        return [replace(like, number=number, steps=steps) for number in range(BLOCKS)]

    def alone(steps: int, like: Learner) -> list[Learner]:
        return [replace(like, steps=steps)]

    def on_a_trunk(steps: int) -> list[Learner]:
        trunk = replace(block, number=BLOCKS, steps=steps, share=0.0)
        return four(steps, replace(block, trunk=trunk))

    def branches(steps: int, common: float, goes_on: bool = False) -> list[Learner]:
        begun = replace(block, number=BLOCKS, share=0.0, steps=steps, stop=round(common * steps))
        branched = four(steps, replace(block, begins_from=begun))
        return [*branched, replace(begun, stop=None, begins_from=begun)] if goes_on else branched

    def taught(steps: int) -> list[Learner]:
        teachers = [replace(one, stop=round(0.75 * steps)) for one in four(steps, block)]
        return [replace(one, stop=None, begins_from=one, taught_by=tuple(teachers)) for one in teachers]

    default = TableRow(DEFAULT, tuple(four(steps, block)))
    budget = default.operations()
    reference = fitted(END_TO_END, partial(alone, like=whole), budget)
    own = replace(block, share=1.0)
    found = [
        reference,
        default,
        replace(reference, name="end to end, weights averaged", averaged=True),
        replace(default, name="the default, weights averaged", averaged=True),
    ]
    makers: dict[str, Callable[[int], Sequence[Learner]]] = {
        "branches of one block, a quarter of all operations": partial(branches, common=4 / 7),
        "a frozen trunk, as large as a block": on_a_trunk,
        "own text only, all text in the first quarter": partial(four, like=replace(own, all_first=0.25)),
        "own text only, all text in the last tenth": partial(four, like=replace(own, all_last=0.1)),
        "last quarter taught by the pool": taught,
        "eight clusters, two for each block": partial(four, like=replace(block, clusters=2 * BLOCKS)),
    }
    if size != SMALL:
        makers[FULL_ROWS["alone"]] = partial(alone, like=replace(block, share=0.0))
        makers[FULL_ROWS["goes-on"]] = partial(branches, common=5 / 6, goes_on=True)
        makers[FULL_ROWS["half"]] = partial(branches, common=4 / 5)
        fitting = {name: fitted(name, make, budget) for name, make in makers.items()}
        fitting |= {reference.name: reference, default.name: default}
        return [fitting[name] for name in FULL_ROWS.values()]
    for context in (CONTEXT // 2, 2 * CONTEXT):
        makers[f"the default, context {context}"] = partial(four, like=replace(block, context=context))
        makers[f"end to end, context {context}"] = partial(alone, like=replace(whole, context=context))
    makers["branches of one block, half of all operations"] = partial(branches, common=4 / 5)
    makers["equal blocks"] = partial(four, like=replace(block, share=0.0))
    return found + [fitted(name, make, budget) for name, make in makers.items()]


class TwoTexts:
    """A learner's batches: with its share of own text, or for some of the steps from all text."""

    def __init__(self, learner: Learner, recipe: Recipe, work: Path, device: str = "cpu") -> None:
        self.learner = learner
        place = place_of(work, learner.clusters, device)
        unit = Unit(learner.seed, learner.steps, learner.number, 0.0, 0.0, share=learner.share)
        self.own = Batches(place, unit, recipe)
        mixed = learner.all_first or learner.all_last
        self.all = Batches(place, replace(unit, share=0.0), recipe) if mixed else self.own

    def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
        return (self.all if self.learner.takes_all_text(step) else self.own).batch(shard, step, block)


class TaughtByPool(Objective):
    """Half of the loss is that of the text, half the distance from what the teachers' pool says there."""

    def __init__(self, recipe: Recipe, teachers: Sequence[Learner], work: Path) -> None:
        super().__init__(recipe.model, recipe.objective, vocabulary=VOCABULARY)
        self.pool = fit(text_of(teachers, work, "pool"), DECAYS)
        self.teachers = [trained(one, work) for one in teachers]

    def loss(
        self,
        block: Block,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        codebook_VD: Tensor,
        hint: Hint | None = None,
        upstream_BTD: Tensor | None = None,
        swept: int | None = None,
    ) -> Loss:
        assert hint is None
        assert upstream_BTD is None
        with torch.no_grad():
            rows_MBTV = torch.stack([model(tokens_BT, codebook_VD).logits_BTV for model in self.teachers])
            said = said_by(self.pool, torch.log_softmax(rows_MBTV, -1), targets_BT, DECAYS)
        logits = block(tokens_BT, codebook_VD).logits_BTV.flatten(0, 1).float()
        ce = F.cross_entropy(logits, targets_BT.flatten())
        from_pool = F.cross_entropy(logits, said.exp())
        return Loss((1 - TAUGHT) * ce + TAUGHT * from_pool, ce.detach())


class OnTrunk(nn.Module):
    """A block behind a trunk, called as a block without one."""

    def __init__(self, trunk: nn.Module, block: Block) -> None:
        super().__init__()
        self.trunk, self.block = trunk, block

    def forward(self, tokens_BT: Tensor, codebook_VD: Tensor) -> Any:
        features = self.trunk(tokens_BT, codebook_VD).features_BTD
        return self.block(tokens_BT, codebook_VD, upstream_BTD=features)


def place_of(work: Path, clusters: int, device: str = "cpu") -> Place:
    return Place(str(work / f"clusters-{clusters}"), device, False)


def weights_of(learner: Learner, work: Path, averaged: bool = False) -> Path:
    if learner.size != SMALL:
        return weights(learner.unit(), place_of(work, BLOCKS))
    return work / f"{learner}{'-averaged' if averaged else ''}.safetensors"


def trained(learner: Learner, work: Path, averaged: bool = False) -> nn.Module:
    _, block, _ = build(learner)
    block.load_state_dict(load_file(weights_of(learner, work, averaged)))
    if learner.trunk is None:
        return block.eval()
    return OnTrunk(trained(learner.trunk, work, averaged), block).eval()


def train(learner: Learner, work: Path, stop_at: float | None = None) -> bool:
    """In a process of its own; leaves the last weights and the averaged ones, and what made them. False
    where it had to stop before the end."""
    torch.set_num_threads(1)
    path, began = weights_of(learner, work), time.monotonic()
    if learner.size != SMALL:
        # Code that was compiled for the model before, in this process, is of no use to this one.
        torch.compiler.reset()
        place = replace(
            place_of(work, BLOCKS, find_device("auto").type), quick=learner.size == TINY, stop_at=stop_at
        )
        _, alone = train_unit(
            learner.unit(),
            place,
            range(learner.first, learner.end),
            weights_of(learner.begins_from, work) if learner.begins_from else None,
            partial(TwoTexts, learner, work=work, device=place.device),
        )
        about = made_by(learner, work)
        about |= {"commit": source_commit(), "alone": alone}
        about["seconds"] = round(about.get("seconds", 0.0) + time.monotonic() - began, 1)
        path.with_suffix(".json").write_text(json.dumps(about))
        return alone is not None
    if path.exists():
        return True
    recipe, block, codebook = build(learner)
    if learner.begins_from is not None:
        # Weights only, as a worker gets them: optimizer state is never sent.
        block.load_state_dict(load_file(weights_of(learner.begins_from, work)))
    objective = (
        TaughtByPool(recipe, learner.taught_by, work)
        if learner.taught_by
        else Objective(recipe.model, recipe.objective, vocabulary=VOCABULARY)
    )
    index = learner.number if learner.trunk is None else 1
    batches: Any = TwoTexts(learner, recipe, work)
    trainer = BlockTrainer(recipe, objective, block, index, batches, codebook)
    if learner.trunk is not None:
        _, trunk, _ = build(learner.trunk)
        trunk.load_state_dict(load_file(weights_of(learner.trunk, work)))
        trainer.freeze([trunk.eval()])
    average = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    for step in range(learner.first, learner.end):
        trainer.step(step, learner.number)
        made = step + 1 - learner.first
        kept = max(1 / made, 1 / max(1.0, AVERAGED * learner.steps))
        for name, tensor in block.state_dict().items():
            average[name].lerp_(tensor, kept)
    save_file(average, weights_of(learner, work, averaged=True))
    about = {"commit": source_commit(), "seconds": round(time.monotonic() - began, 1)}
    path.with_suffix(".json").write_text(json.dumps(about))
    save_file({name: tensor.clone() for name, tensor in block.state_dict().items()}, f"{path}.part")
    Path(f"{path}.part").replace(path)
    return True


def train_in_time(learner: Learner, work: Path, stop_at: float | None) -> bool:
    """One that waited for a process until the time was over is not begun."""
    return (stop_at is None or time.time() < stop_at) and train(learner, work, stop_at)


def made_by(learner: Learner, work: Path) -> dict[str, Any]:
    """What `train` says of a learner beside its weights; nothing before it was first trained."""
    path = weights_of(learner, work).with_suffix(".json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


class LearnerRows(Rows):
    """Rows of learners, which a text so small can hold all at once."""

    def __init__(self, learners: Sequence[Learner], work: Path, part: str, averaged: bool) -> None:
        self.device = torch.device("cpu")
        _, _, codebook = build(learners[0])
        self.models = [(trained(one, work, averaged), codebook) for one in learners]  # type: ignore[misc]
        context = learners[0].context
        tokens = place_of(work, BLOCKS).tokens(part).long()
        count = (len(tokens) - 1) // context
        self.x = tokens[: count * context].view(count, context)
        self.y = tokens[1 : count * context + 1].view(count, context)


@dataclass(frozen=True)
class Text:
    """What several models say of a text: log-probs M x windows x positions x vocabulary, and the truth."""

    rows: Tensor
    y: Tensor


def text_of(learners: Sequence[Learner], work: Path, part: str, averaged: bool = False) -> Text:
    rows = LearnerRows(learners, work, part, averaged)
    return Text(rows.of(slice(None)), rows.y)


def picked_of(rows_MNTV: Tensor, y_NT: Tensor) -> Tensor:
    index = y_NT[None, ..., None].expand(len(rows_MNTV), -1, -1, 1)
    return rows_MNTV.gather(-1, index)[..., 0].float()


def past_of(rows_MNTV: Tensor, y_NT: Tensor, decays: Sequence[float]) -> Tensor:
    """The evidence of each decay, D x M x (windows x positions)."""
    picked = picked_of(rows_MNTV, y_NT)
    if not decays:
        return picked.new_zeros(0, len(picked), y_NT.numel())
    return torch.stack([past_likelihood(picked, decay).flatten(1) for decay in decays])


def said_by(pool: Pool, rows_MNTV: Tensor, y_NT: Tensor, decays: Sequence[float]) -> Tensor:
    pooled: Tensor = pool(rows_MNTV.flatten(1, 2), past_of(rows_MNTV, y_NT, decays))
    return pooled


def fit(text: Text, decays: tuple[float, ...], steps: int = 250) -> Pool:
    """As specialise.py fits; of one model it is a temperature."""
    rows, y, past = text.rows.flatten(1, 2), text.y.flatten(), past_of(text.rows, text.y, decays)
    pool = Pool(len(rows), decays)
    optimizer = torch.optim.Adam(pool.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(0, len(y), (1024,), generator=generator)
        loss = F.nll_loss(pool(rows[:, chosen], past[:, :, chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return pool


@torch.no_grad()
def score(pool: Pool, text: Text, decays: tuple[float, ...]) -> float:
    total = 0.0
    for piece in torch.split(torch.arange(len(text.y)), 64):
        said = said_by(pool, text.rows[:, piece], text.y[piece], decays)
        total += float(F.nll_loss(said, text.y[piece].flatten(), reduction="sum"))
    return total / text.y.numel()


def score_entry(entry: TableRow, work: Path) -> dict[str, Any]:
    """In a process of its own: the losses of one row, kept beside the weights."""
    torch.set_num_threads(1)
    path = work / f"{entry}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    if entry.learners[0].size != SMALL:
        return score_large(entry, work, path)
    pooling = text_of(entry.learners, work, "pool", entry.averaged)
    if entry.trial:
        found = {"fixed": {"pool": -float(picked_of(pooling.rows, pooling.y).mean())}}
        path.write_text(json.dumps(found))
        return found
    held_out = text_of(entry.learners, work, "valid", entry.averaged)
    found = {"commits": sorted({made_by(one, work)["commit"] or "" for one in entry.learners})}
    for how, decays in (("fixed", ()), ("by_text", DECAYS)):
        if decays and len(entry.learners) == 1:
            continue
        pool = fit(pooling, decays)
        found[how] = {"pool": score(pool, pooling, decays), "valid": score(pool, held_out, decays)}
    found["alone"] = [-float(one) for one in picked_of(held_out.rows, held_out.y).mean((1, 2))]
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").replace(path)
    return found


def score_large(entry: TableRow, work: Path, path: Path) -> dict[str, Any]:
    """As specialise.py does it, which never holds all rows: of one model there is no pool to fit."""
    told = {one: made_by(one, work) for one in entry.all_learners()}
    found: dict[str, Any] = {"commits": sorted({one["commit"] or "" for one in told.values()})}
    units: list[Unit] = [one.unit() for one in entry.learners]
    if len(units) == 1:
        found["fixed"] = told[entry.learners[0]]["alone"]
    else:
        tiny = entry.learners[0].size == TINY
        place = replace(place_of(work, BLOCKS, find_device("auto").type), quick=tiny)
        found |= {"fixed": score_pool(units, place, ()), "by_text": score_pool(units, place, DECAYS)}
    found["alone"] = [told[one]["alone"]["valid"] for one in entry.learners]
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").replace(path)
    return found


def loss_of(found: Mapping[str, Any], part: str) -> float:
    """By the text so far where there are several models to weigh."""
    return float(found.get("by_text", found["fixed"])[part])


class Progress:
    """What is done of the operations that are known to be needed, and how long the rest takes."""

    def __init__(self) -> None:
        self.began, self.needed, self.done = time.monotonic(), 0, 0

    def say(self, what: str) -> None:
        passed = time.monotonic() - self.began
        left = passed * (self.needed - self.done) / self.done if self.done else 0.0
        part = self.done / self.needed if self.needed else 1.0
        print(f"{passed:5.0f} s, {part:4.0%}, {left:5.0f} s left: {what}", flush=True)


@dataclass(frozen=True)
class Workers:
    """Processes that train and score side by side, until the time to stop for now."""

    processes: ProcessPoolExecutor
    work: Path
    progress: Progress
    stop_at: float | None = None


def run(
    rows: Sequence[TableRow],
    workers: Workers,
    finished: Callable[[Mapping[TableRow, dict[str, Any]]], None] = lambda scores: None,
) -> dict[TableRow, dict[str, Any]]:
    """Trains what the rows need, each model once and after those it needs itself, and scores a row as soon
    as its models are there. What there was no time for is missing in the answer."""
    work, progress = workers.work, workers.progress
    waiting = list(dict.fromkeys(one for entry in rows for one in entry.all_learners()))
    waiting = [one for one in waiting if not weights_of(one, work).exists()]
    progress.needed += sum(map(operations_of, waiting))
    scores: dict[TableRow, dict[str, Any]] = {}
    unscored = list(rows)
    running: dict[Future[Any], Learner | TableRow] = {}
    unfinished: set[Learner] = set(waiting)

    def ready(needs: Iterable[Learner]) -> bool:
        return not any(one in unfinished for one in needs)

    while True:
        for learner in [one for one in waiting if ready(one.needs())]:
            waiting.remove(learner)
            running[workers.processes.submit(train_in_time, learner, work, workers.stop_at)] = learner
        for entry in [one for one in unscored if ready(one.learners)]:
            unscored.remove(entry)
            running[workers.processes.submit(score_entry, entry, work)] = entry
        if not running:
            return scores
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            what, result = running.pop(future), future.result()
            if isinstance(what, TableRow):
                scores[what] = result
                ce = loss_of(result, "pool" if what.trial else "valid")
                progress.say(f"{ce:.4f} {what.name}, seed {what.learners[0].seed}")
                finished(scores)
            elif result:
                unfinished.remove(what)
                progress.done += operations_of(what)
                seconds = made_by(what, work)["seconds"]
                progress.say(f"trained {what}, steps {what.first} to {what.end}, in {seconds} s")
            else:
                progress.say(f"{what} goes on with the same command")


Pair = tuple[int, int]
"""How often both rates of START are doubled."""


def rates_at(pair: Pair) -> tuple[float, float]:
    return START[0] * 2.0 ** pair[0], START[1] * 2.0 ** pair[1]


def around(pair: Pair) -> list[Pair]:
    i, j = pair
    return [(i, j), (i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]


def climb(sides: Sequence[str]) -> Iterator[tuple[list[tuple[str, Pair]], dict[tuple[str, Pair], float]]]:
    """Yields pairs of rates to try and the dictionary for their losses, until for each side no neighbour of
    the best pair is left to try."""
    known: dict[tuple[str, Pair], float] = {}
    while True:
        wanted = []
        for side in sides:
            tried = {pair: ce for (whose, pair), ce in known.items() if whose == side}
            best = min(tried, key=lambda pair: tried[pair]) if tried else (0, 0)
            wanted += [(side, pair) for pair in around(best) if pair not in tried]
        if not wanted:
            return
        yield wanted, known


def tuned(
    steps: int, shape: tuple[int, int], workers: Workers
) -> tuple[dict[str, tuple[float, float]], list[dict[str, Any]]]:
    """The best rates of a block and of end to end, on pooling text, and all that was tried."""
    sides = {"end to end": BLOCKS * shape[0], "block": shape[0]}
    tried: dict[tuple[str, Pair], float] = {}
    for wanted, tried in climb(list(sides)):
        trials = {}
        for side, pair in wanted:
            learner = Learner(0, 0, steps, *rates_at(pair), sides[side], shape[1])
            trials[TableRow(f"rates of {side}", (learner,), trial=True)] = (side, pair)
        for entry, found in run(list(trials), workers).items():
            tried[trials[entry]] = loss_of(found, "pool")
    best = {}
    for side in sides:
        pair = min((pair for whose, pair in tried if whose == side), key=lambda pair: tried[side, pair])
        best[side] = rates_at(pair)
        workers.progress.say(f"rates of {side}: {best[side][0]:g}, {best[side][1]:g}")
    rows = [
        {"side": side, "matrix_lr": rates_at(pair)[0], "other_lr": rates_at(pair)[1], "ce": ce}
        for (side, pair), ce in tried.items()
    ]
    return best, rows


def prepare(
    docs: Path | None, work: Path, sizes: Mapping[str, int], numbers: Iterable[int] = CLUSTERS
) -> None:
    """The texts with each number of clusters, or their beginnings where there are sizes: their documents are
    shuffled."""
    missing = [clusters for clusters in numbers if not (work / f"clusters-{clusters}/text.json").exists()]
    if not missing:
        return
    if docs is None:
        sys.exit(f"{work} is not prepared: --docs FOLDER is needed")
    with tempfile.TemporaryDirectory(prefix="search-") as name:
        for part in ("train", "valid") if sizes else ():
            with lzma.open(docs / f"{part}.txt.xz") as whole:
                cut = whole.read(sizes[part] + 1)
            (Path(name) / f"{part}.txt.xz").write_bytes(lzma.compress(cut, preset=0))
        for clusters in missing:
            folder = work / f"clusters-{clusters}"
            prepare_texts(Path(name) if sizes else docs, folder, clusters, None)
            if sizes:
                pool = folder / "pool"
                pool.write_bytes(pool.read_bytes()[: sizes["pool"] + 1])


def table_of(scores: Mapping[TableRow, Mapping[str, Any]], work: Path) -> list[dict[str, Any]]:
    """Each row and seed, with its distance from end to end and default of the same seed and context, where
    they are there."""
    by_place: dict[tuple[str, int, int], float] = {}
    for entry, found in scores.items():
        first = entry.learners[0]
        if entry.name.startswith((END_TO_END, "the default", DEFAULT)) and not entry.averaged:
            side = "end to end" if entry.name.startswith(END_TO_END) else "the default"
            by_place[side, first.seed, first.context] = loss_of(found, "valid")
    table = []
    for entry, found in scores.items():
        first = entry.learners[0]
        ce = loss_of(found, "valid")
        reference, default = (
            by_place.get((side, first.seed, first.context)) for side in ("end to end", "the default")
        )
        table.append(
            {
                "name": entry.name,
                "seed": first.seed,
                "context": first.context,
                "ce": ce,
                "gap": None if reference is None else ce - reference,
                "over_default": None if default is None else ce - default,
                "operations": entry.operations(),
                "steps": [one.end - one.first for one in entry.all_learners()],
                "wall_seconds": [made_by(one, work).get("seconds") for one in entry.all_learners()],
                **found,
            }
        )
    return table


def lines_of(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each row, with all its seeds; the best on top."""
    names = dict.fromkeys(row["name"] for row in table)
    by_name = {
        name: sorted((r for r in table if r["name"] == name), key=lambda r: r["seed"]) for name in names
    }
    lines = [
        "| row | operations | best alone | fixed weights | by the text so far | to end to end | to default |",
        "|---" * 7 + "|",
    ]
    for name in sorted(names, key=lambda name: by_name[name][0]["ce"]):
        rows = by_name[name]

        def told(
            column: Callable[[Mapping[str, Any]], float | None], sign: str = "", rows: Any = rows
        ) -> str:
            values = [column(row) for row in rows]
            return ", ".join("" if value is None else f"{value:{sign}.4f}" for value in values)

        several = len(rows[0]["alone"]) > 1
        cells = [
            f"{rows[0]['operations']:.2e}",
            told(lambda row: min(row["alone"])),
            told(lambda row: row["fixed"]["valid"]),
            told(lambda row: row["by_text"]["valid"]) if several else "",
            told(lambda row: row["gap"], "+"),
            told(lambda row: row["over_default"], "+"),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def claims_of(table: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether any pool with the default's context is so much better that the default should change."""
    claims = {}
    pools = [row for row in table if row["context"] == CONTEXT and len(row["alone"]) > 1]
    for name in dict.fromkeys(row["name"] for row in pools):
        better = -mean(row["over_default"] for row in pools if row["name"] == name)
        claims[f"{name!r} is at most {MAX_LOSS} below the default"] = better <= MAX_LOSS
    return claims


def search_large(
    options: argparse.Namespace,
    steps: int,
    rates: Mapping[str, tuple[float, float]],
    seeds: Sequence[int],
    workers: Workers,
) -> bool:
    """The chosen rows at full size; True if there was no time for all."""
    names = [FULL_ROWS[name] for name in options.rows]
    size = TINY if options.quick else FULL
    by_seed = [entries(seed, steps, rates, Unit.layers, Unit.width, size) for seed in seeds]
    rows = [entry for same in zip(*by_seed, strict=True) for entry in same if entry.name in names]
    # All are scored on the text with four clusters, whatever they were trained on.
    clusters = {BLOCKS} | {one.clusters for entry in rows for one in entry.all_learners()}
    prepare(options.docs, workers.work, QUICK_SIZES if options.quick else {}, sorted(clusters))
    model = recipe_of(rows[0].learners[0]).model
    report = {
        "size": {
            "layers": model.layers_per_block,
            "width": model.width,
            "blocks": BLOCKS,
            "context": model.context,
            "steps": steps,
        },
        "trials": [],
        "rates": {side: list(pair) for side, pair in rates.items()},
    }

    def finished(scores: Mapping[TableRow, dict[str, Any]]) -> None:
        # After each row: the machine may be taken away before the next.
        table = table_of(scores, workers.work)
        write_report(options.json, "search", {**report, "table": table}, seeds)

    scores = run(rows, workers, finished)
    print("\n".join(["", *lines_of(table_of(scores, workers.work))]))
    return len(scores) < len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, help="not needed where --work has the text already")
    parser.add_argument("--work", type=Path, default=Path("build/search"), help="text, weights and scores")
    parser.add_argument("--size", choices=(SMALL, FULL), default=SMALL)
    parser.add_argument("--shape", metavar="LAYERSxWIDTH", help="of a block, small: default 1x64")
    parser.add_argument(
        "--rows", metavar="NAME,NAME", default=",".join(FULL_ROWS), help="full: default %(default)s"
    )
    parser.add_argument("--steps", type=int, help="of a block of the default; default: 300, full 4000")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--again", type=int, default=3, help="how many other rows get the later seeds")
    parser.add_argument("--block-lr", help="matrix_lr,other_lr; with that of the reference, no climb")
    parser.add_argument("--reference-lr", help="matrix_lr,other_lr")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stop-after", type=float, help="full: seconds; exit 3 if not finished")
    parser.add_argument("--quick", action="store_true", help="8 steps, 4 MB of text, and no claims")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    full = options.size == FULL
    options.rows = options.rows.split(",")
    if unknown := set(options.rows) - FULL_ROWS.keys():
        parser.error(f"no rows {', '.join(sorted(unknown))}: expected some of {', '.join(FULL_ROWS)}")
    if (options.block_lr is None) != (options.reference_lr is None) or (full and options.block_lr is None):
        parser.error("--block-lr and --reference-lr belong together, and the full size has no climb")
    if options.shape if full else options.stop_after:
        parser.error("--shape is for the small size, --stop-after for the full one")
    layers, width = (int(number) for number in (options.shape or "1x64").split("x"))
    first, *later = (int(seed) for seed in options.seeds.split(","))
    steps = options.steps or (4000 if full else 300)
    if options.quick and not (full and options.steps):
        steps = 8
    sizes = {"train": TEXT_BYTES, "pool": POOL_BYTES, "valid": VALID_BYTES}
    if options.quick:
        sizes = QUICK_SIZES
    rates: dict[str, tuple[float, float]] = {}
    for side, given in (("end to end", options.reference_lr), ("block", options.block_lr)):
        if given:
            matrix_lr, other_lr = (float(rate) for rate in given.split(","))
            rates[side] = matrix_lr, other_lr
    stop_at = time.time() + options.stop_after if options.stop_after else None
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as processes:
        workers = Workers(processes, options.work, Progress(), stop_at)
        if full:
            unfinished = search_large(options, steps, rates, [first, *later], workers)
            return NOT_FINISHED if unfinished else 0
        prepare(options.docs, options.work, sizes)
        trials: list[dict[str, Any]] = []
        if options.quick and not rates:
            # After two steps the best rate is whatever moves most, and the climb would go on and on.
            rates = dict.fromkeys(("end to end", "block"), START)
        elif not rates:
            rates, trials = tuned(steps // 4, (layers, width), workers)
        size = {"layers": layers, "width": width, "blocks": BLOCKS, "context": CONTEXT, "steps": steps}
        report: dict[str, Any] = {"size": size, "trials": trials}
        report["rates"] = {side: list(pair) for side, pair in rates.items()}
        scores = run(entries(first, steps, rates, layers, width), workers)
        # Written before the later seeds too: a table of one seed is worth having where time runs out.
        write_report(options.json, "search", {**report, "table": table_of(scores, options.work)}, [first])
        of_default = next(loss_of(found, "pool") for entry, found in scores.items() if entry.name == DEFAULT)
        better = [
            entry.name
            for entry, found in sorted(scores.items(), key=lambda item: loss_of(item[1], "pool"))
            if loss_of(found, "pool") < of_default
            and (len(entry.learners), entry.learners[0].context) == (BLOCKS, CONTEXT)
        ]
        chosen = {END_TO_END, DEFAULT, *better[: options.again]}
        for seed in later:
            rows = entries(seed, steps, rates, layers, width)
            again = [entry for entry in rows if entry.name in chosen]
            scores |= run(again, workers)
    table = table_of(scores, options.work)
    write_report(options.json, "search", {**report, "table": table}, [first, *later])
    print("\n".join(["", *lines_of(table)]))
    return 0 if options.quick else check_claims(claims_of(table))


if __name__ == "__main__":
    sys.exit(main())
