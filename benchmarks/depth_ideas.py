"""Ideas for making depth compose, each beside its control: the experiments behind decision 0008.

    python benchmarks/depth_ideas.py --corpus W [--device cuda] [--steps 500] [--seeds 0] [--only NAME,...]
    python benchmarks/depth_ideas.py --quick            # CPU, builtin text, tiny shape

An idea is a kind of `Objective`, or one of its own: which blocks it needs frozen, what they hand on, its
loss, how blocks compose. All blocks of an idea train at the same time in rounds, on frozen copies of their
neighbours that are `stale` rounds old, as in a swarm. One line per idea: cross entropy of the last block, of
the mean of log-probs, of weights fitted on text kept for that, of weights gated by context, and of the fitted
pool with weights averaged over time; total floating-point operations, extra forward passes included.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.data.shards import Shards, scoring_windows
from blocktrain.data.tokenizer import Tokens, load_tokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block, BlockOutput, build_block
from blocktrain.model.composition import block_log_probs, fit_pooling, pool
from blocktrain.model.objective import Loss, Objective
from blocktrain.training.cost import block_training_flops, forward_flops_per_token, training_flops
from blocktrain.training.device import autocast
from blocktrain.training.inner import BlockTrainer, build_codebook

FULL = {"width": 384, "heads": 6, "blocks": 4, "layers_per_block": 3, "context": 512}
QUICK = {"width": 48, "heads": 2, "blocks": 4, "layers_per_block": 2, "context": 64}
ROUND_STEPS = 10
AVERAGE_DECAY = 0.99
GATE_ROWS = 60_000


# --- the ideas


class HeadBlock(Block):
    """Hands on what it knew before its last layer, which serves its own prediction only."""

    def forward(self, tokens_BT, codebook_VD, hint=None, upstream_BTD=None, cache=None, both_ways=0):  # type: ignore[no-untyped-def]
        x_BTD, c_BC = self._inputs(tokens_BT, hint, upstream_BTD)
        rotary = self.rotary_cos[: tokens_BT.shape[1]], self.rotary_sin[: tokens_BT.shape[1]]
        features = x_BTD
        for layer in self.layers:
            features, x_BTD = x_BTD, layer(x_BTD, c_BC, rotary, None)
        z_hat = self._denoised(self.out(self.out_norm(x_BTD, c_BC)), hint)
        return BlockOutput(self.logit_scale * F.linear(z_hat, codebook_VD.to(z_hat.dtype)), z_hat, features)


class HeadChain(Objective):
    """A chain whose links branch off before the last layer: an auxiliary layer for each head where blocks
    have one layer more, one overlapping layer where they have not."""

    def build(self, block: int, seed: int) -> Block:
        return as_kind(HeadBlock, super().build(block, seed))


class BeliefBlock(Block):
    """Hears the log-probs so far, as an input and as the logits it corrects; its output map starts at 0."""

    def forward(self, tokens_BT, codebook_VD, hint=None, upstream_BTD=None, cache=None, both_ways=0):  # type: ignore[no-untyped-def]
        if upstream_BTD is None:
            return super().forward(tokens_BT, codebook_VD)
        expected = upstream_BTD.exp().to(codebook_VD.dtype) @ codebook_VD
        output = super().forward(tokens_BT, codebook_VD, None, expected)
        return BlockOutput(output.logits_BTV + upstream_BTD, output.z_hat_BTD, output.features_BTD)


class Beliefs(Objective):
    """On-policy beliefs with residual logits: every block corrects what the ones before predicted."""

    def build(self, block: int, seed: int) -> Block:
        return as_kind(BeliefBlock, super().build(block, seed))

    def relay(self, output: BlockOutput, heard: Tensor | None) -> Tensor:
        return F.log_softmax(output.logits_BTV.float(), dim=-1)


class HalfPooled(Objective):
    """`composed`, from the first weights that its rows were measured with: drawn beside an upstream map."""

    def build(self, block: int, seed: int) -> Block:
        with_map = build_block(
            self.model, self.config, vocabulary=self.vocabulary, seed=seed, hints=False, upstream=True
        )
        with_map.upstream = None
        return with_map


class Pooled(HalfPooled):
    """The composed model's loss alone."""

    composed_share = 1.0


class Distilled(HalfPooled):
    """Half of the loss towards the composed model's distribution."""

    def composed_loss(self, own_BTV: Tensor, others_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        teacher = F.softmax((own_BTV.detach() + others_BTV) / self.model.blocks, dim=-1)
        return -(teacher * own_BTV).sum(-1).mean()


class LookaheadBlock(Block):
    """Also predicts the second to fourth next byte, in training only."""

    later: list[nn.Linear]

    def ahead(self, tokens_BT: Tensor, codebook_VD: Tensor) -> list[Tensor]:
        x_BTD, c_BC = self._inputs(tokens_BT, None, None)
        rotary = self.rotary_cos[: tokens_BT.shape[1]], self.rotary_sin[: tokens_BT.shape[1]]
        for layer in self.layers:
            x_BTD = layer(x_BTD, c_BC, rotary, None)
        y_BTD = self.out_norm(x_BTD, c_BC)
        maps = [self.out, *self.later]
        return [
            self.logit_scale * F.linear(self.sigma_data * m(y_BTD), codebook_VD.to(y_BTD.dtype)) for m in maps
        ]


class Lookahead(Objective):
    weights = (1.0, 0.3, 0.2, 0.1)

    def build(self, block: int, seed: int) -> Block:
        return with_later(super().build(block, seed), len(self.weights) - 1)

    def build_reference(self, seed: int) -> Block:
        return with_later(super().build_reference(seed), len(self.weights) - 1)

    def loss(self, block, tokens_BT, targets_BT, codebook_VD, z=None, sigma=None, upstream_BTD=None) -> Loss:  # type: ignore[no-untyped-def]
        total = torch.zeros((), device=tokens_BT.device)
        ce = torch.zeros((), device=tokens_BT.device)
        for k, logits in enumerate(block.ahead(tokens_BT, codebook_VD)):
            length = targets_BT.shape[1] - k
            part = F.cross_entropy(logits[:, :length].flatten(0, 1).float(), targets_BT[:, k:].flatten())
            ce = part if k == 0 else ce
            total = total + self.weights[k] * part
        return Loss(4 * total, ce.detach())


def as_kind(kind: type[Block], block: Block) -> Block:
    block.__class__ = kind
    return block


def with_later(block: Block, count: int) -> Block:
    width = block.out.in_features
    maps = [nn.Linear(width, width, bias=False) for _ in range(count)]
    for one in maps:
        nn.init.zeros_(one.weight)
    block.later = nn.ModuleList(maps)
    return as_kind(LookaheadBlock, block)


@dataclass(frozen=True)
class Row:
    idea: type[Objective] = Objective
    kind: str = "denoise"
    """Of the objective: what it hears."""
    model: dict[str, Any] = field(default_factory=dict)
    stale: int = 1
    reference: bool = False
    """End to end instead of blocks."""
    training: dict[str, Any] = field(default_factory=dict)


IDEAS = {
    "independent blocks (control)": Row(),
    "end to end (control)": Row(reference=True),
    "next-2..4-byte losses": Row(Lookahead),
    "end to end, next-2..4-byte losses": Row(Lookahead, reference=True),
    "chain of features": Row(kind="chain"),
    "chain, 5 rounds stale": Row(kind="chain", stale=5),
    "chain, 20 rounds stale": Row(kind="chain", stale=20),
    "chain, one overlapping layer": Row(HeadChain, "chain"),
    "chain, auxiliary layer per head": Row(HeadChain, "chain", {"layers_per_block": 4}),
    "beliefs, residual logits": Row(Beliefs, "chain"),
    "beliefs, 5 rounds stale": Row(Beliefs, "chain", stale=5),
    "composed loss, others frozen": Row(Pooled, "composed"),
    "half composed loss": Row(HalfPooled, "composed"),
    "half composed loss, 5 rounds stale": Row(HalfPooled, "composed", stale=5),
    "distilled from the composed model": Row(Distilled, "composed"),
    "3 blocks of 4 layers": Row(model={"blocks": 3, "layers_per_block": 4}),
    "2 blocks of 6 layers": Row(model={"blocks": 2, "layers_per_block": 6}),
}


# --- training and scoring


class Bench:
    def __init__(self, recipe: Recipe, row: Row, device: torch.device) -> None:
        self.recipe, self.row, self.device = recipe, row, device
        tokenizer = load_tokenizer(recipe.data.tokenizer)
        corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
        self.vocabulary = tokenizer.vocabulary
        self.idea = row.idea(recipe.model, recipe.objective, vocabulary=self.vocabulary)
        self.codebook = build_codebook(recipe, self.vocabulary).to(device)
        self.shards = Shards.of(recipe, tokenizer.encode(corpus.train), corpus.sha256, device)
        self.pool = tokenizer.encode(corpus.pool)
        self.valid = tokenizer.encode(corpus.valid[: recipe.evaluation.max_bytes])

    def train(self) -> tuple[list[Block], list[Block]]:
        """The trained blocks, and the same with weights averaged over time."""
        trainers = self._trainers()
        averages = [copy.deepcopy(trainer.block) for trainer in trainers]
        history = [[host_copy(t.block) for t in trainers]]
        for first in range(0, self.recipe.training.steps, ROUND_STEPS):
            frozen = history[max(0, len(history) - self.row.stale)]
            for index, trainer in enumerate(trainers):
                self._round(trainer, index, frozen, first)
                average(averages[index], trainer.block)
            history = [*history[-self.row.stale :], [host_copy(t.block) for t in trainers]]
        return [trainer.block.eval() for trainer in trainers], [block.eval() for block in averages]

    def _trainers(self) -> list[BlockTrainer]:
        seed = self.recipe.seed
        if self.row.reference:
            block = self.idea.build_reference(derive_seed("init", seed, "reference"))
            return [self._trainer(block, None)]
        count = self.recipe.model.blocks
        return [self._trainer(self.idea.build(b, derive_seed("init", seed, b)), b) for b in range(count)]

    def _trainer(self, block: Block, index: int | None) -> BlockTrainer:
        block = block.to(self.device)
        return BlockTrainer(self.recipe, self.idea, block, index, self.shards, self.codebook)

    def _round(self, trainer: BlockTrainer, index: int, frozen: list[Block], first: int) -> None:
        steps = self.recipe.training.steps
        needed = () if trainer.index is None else self.idea.frozen(index, first / steps)
        trainer.freeze([frozen[i] for i in needed])
        trainer.window_end = min(first + ROUND_STEPS, steps)
        for step in range(first, trainer.window_end):
            trainer.step(step, index)

    @torch.no_grad()
    def rows(self, blocks: list[Block], tokens: Tokens) -> tuple[list[Tensor], Tensor]:
        """Log-probs of every block, [N, V], and the targets."""
        context, batch = self.recipe.model.context, self.recipe.evaluation.batch
        found: list[list[Tensor]] = [[] for _ in blocks]
        targets = []
        kept = torch.float16 if self.device.type == "cuda" else torch.float32
        for window in scoring_windows(tokens, context=context, batch=batch):
            x, y, mask = (part.to(self.device) for part in window)
            with autocast(self.device):
                log_probs = block_log_probs(self.idea, blocks, self.codebook(), x)
            for parts, log_prob in zip(found, log_probs, strict=True):
                parts.append(log_prob[mask].to(kept))
            targets.append(y[mask])
        return [torch.cat(parts) for parts in found], torch.cat(targets)

    def score(self, blocks: list[Block], averaged: list[Block]) -> dict[str, float]:
        pool_rows, pool_targets = self.rows(blocks, self.pool)
        weights = fit_pooling(pool_rows, pool_targets)
        gate = fit_gate(pool_rows, pool_targets)
        rows, targets = self.rows(blocks, self.valid)
        average_rows, _ = self.rows(averaged, self.valid)
        equal = [1 / len(blocks)] * len(blocks)
        return {
            "last": cross_entropy([rows[-1]], targets, lambda part: part[0].float()),
            "mean": cross_entropy(rows, targets, lambda part: pool([p.float() for p in part], equal)),
            "fitted": cross_entropy(rows, targets, lambda part: pool([p.float() for p in part], weights)),
            "gated": cross_entropy(rows, targets, gate),
            "averaged": cross_entropy(
                average_rows, targets, lambda part: pool([p.float() for p in part], weights)
            ),
        }

    def flops(self, blocks: list[Block]) -> int:
        config, steps = self.recipe.model, self.recipe.training.steps
        forward = [forward_flops_per_token(config, block, self.vocabulary) for block in blocks]
        tokens = self.recipe.training.batch * config.context
        if self.row.reference:
            return training_flops(forward[0], 0, tokens * steps)
        starts = [step - step % ROUND_STEPS for step in range(steps)]
        return sum(
            block_training_flops(self.idea, index, forward, starts, tokens) for index in range(len(blocks))
        )


def host_copy(block: Block) -> Block:
    return copy.deepcopy(block).to("cpu").eval()


@torch.no_grad()
def average(into: Block, block: Block) -> None:
    for kept, now in zip(into.parameters(), block.parameters(), strict=True):
        kept.lerp_(now, 1 - AVERAGE_DECAY**ROUND_STEPS)


def cross_entropy(
    rows: Sequence[Tensor], targets: Tensor, pooled: Callable[[list[Tensor]], Tensor], chunk: int = 65536
) -> float:
    total = 0.0
    for start in range(0, len(targets), chunk):
        log_probs = pooled([part[start : start + chunk] for part in rows])
        total += float(F.nll_loss(log_probs, targets[start : start + chunk], reduction="sum").double())
    return total / len(targets)


def fit_gate(rows: Sequence[Tensor], targets: Tensor) -> Callable[[list[Tensor]], Tensor]:
    """Pooling weights as a softmax of a linear map of every block's entropy and confidence."""

    def features(part: Sequence[Tensor]) -> Tensor:
        parts = [p.float() for p in part]
        return torch.stack([f for p in parts for f in (-(p.exp() * p).sum(-1), p.max(-1).values)], dim=-1)

    pick = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))[:GATE_ROWS]
    some = [row[pick.to(row.device)].float() for row in rows]
    inputs, wanted = features(some), targets[pick.to(targets.device)]
    gate = nn.Linear(inputs.shape[-1], len(rows)).to(inputs.device)
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)
    search = torch.optim.Adam(gate.parameters(), lr=0.02)
    stacked = torch.stack(some)
    for _ in range(200):
        search.zero_grad()
        mixed = torch.einsum("nb,bnv->nv", gate(inputs).softmax(-1), stacked)
        F.cross_entropy(mixed, wanted).backward()  # type: ignore[no-untyped-call]
        search.step()

    @torch.no_grad()
    def pooled(part: list[Tensor]) -> Tensor:
        weights = gate(features(part)).softmax(-1)
        return F.log_softmax(torch.einsum("nb,bnv->nv", weights, torch.stack(part).float()), dim=-1)

    return pooled


# --- the table


def recipe_of(arguments: argparse.Namespace, row: Row, seed: int) -> Recipe:
    quick = arguments.quick
    training = {"steps": 20, "batch": 4, "warmup_steps": 5} if quick else {"steps": arguments.steps}
    values: dict[str, Any] = {
        "name": "depth-ideas",
        "seed": seed,
        "model": {**(QUICK if quick else FULL), **row.model},
        "objective": {"hint_probability": 0.0, "kind": row.kind},
        "data": {"corpus": arguments.corpus, "max_bytes": 2_000_000 if quick else None},
        "training": {**training, **row.training},
        "evaluation": {"max_bytes": 8_000, "pooling_bytes": 8_000} if quick else {"batch": 32},
    }
    return resolve_recipe(values)


def measure(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    row, began = IDEAS[name], time.monotonic()
    if arguments.stale is not None:
        row = replace(row, stale=arguments.stale)
    bench = Bench(recipe_of(arguments, row, seed), row, arguments.device)
    blocks, averaged = bench.train()
    found = {"idea": name, "seed": seed, **bench.score(blocks, averaged), "flops": bench.flops(blocks)}
    return {**found, "seconds": time.monotonic() - began}


def table(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| idea | seed | last block | mean | fitted | gated | averaged over time | FLOPs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        numbers = " | ".join(f"{row[key]:.4f}" for key in ("last", "mean", "fitted", "gated", "averaged"))
        lines.append(f"| {row['idea']} | {row['seed']} | {numbers} | {row['flops']:.2e} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", default="builtin")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--seeds", default="0", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", help="names of ideas, or parts of them, separated by commas")
    parser.add_argument("--stale", type=int, help="age of neighbours in rounds, instead of each row's own")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else [""]
    names = [
        name for name in IDEAS if any(part in name if part not in IDEAS else part == name for part in wanted)
    ]
    found = []
    for name in names:
        for seed in arguments.seeds:
            found.append(measure(name, seed, arguments))
            print(json.dumps(found[-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(["", *table(found)]))


if __name__ == "__main__":
    main()
