"""How good is text written in one traversal? A judge's opinion of `sweep` for 1, 2, 4, 8 passes.

    python benchmarks/sweep.py --corpus W --json sweep.json      (one H200, under four minutes)
    python benchmarks/sweep.py --quick                           (tiny, CPU, builtin text)
    python benchmarks/sweep.py --checkpoint DIR --corpus W       (a trained model; only the judge trains)

Trains blocks with `recipes/wikitext-2-sweep.toml`, and a *judge*: an end-to-end model of the same family
with another seed, which never meets the blocks. Both continue held-out prompts. The judge gives nats per
byte of what was written after the prompt; low is not enough (repeated text scores low), so distinct words
and word pairs stand beside it, and the share of words that the training text has. Controls: the human
continuation, plain sampling from the same blocks (`ar`), bytes drawn by frequency, and the end of the
prompt repeated. A pass is one Euler step in every block: all passes are one traversal of the network.
Exits 1 when one pass is not at least MIN_GAIN better than bytes by frequency, or eight are worse than one
(--quick trains too little to claim that).
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from provenance import check_claims, write_report
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from blocktrain.config import Recipe, load_recipe
from blocktrain.data.corpora import Corpus, load_corpus
from blocktrain.data.shards import Shards
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.block import Block
from blocktrain.model.composition import block_log_probs
from blocktrain.model.objective import Objective
from blocktrain.model.pooling import pool
from blocktrain.model.sampling import gumbel_noise
from blocktrain.model.sweep import begin_sweep, refine, sweep_noise
from blocktrain.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from blocktrain.training.device import autocast
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer, build_codebook

RECIPE = Path(__file__).parents[1] / "recipes" / "wikitext-2-sweep.toml"
PASSES = (1, 2, 4, 8)
MIN_GAIN = 1.0
"""Nats per byte by the judge."""
SHARPER = (1.5, 2.0)
"""Exponents on the probabilities that the Euler steps move towards."""
JUDGE_SEED = 1000
JUDGE_LAYERS_PER_BLOCK = 2
"""The judge has this many layers for each of the recipe's blocks: 8 in all for four blocks."""
QUICK = (
    *("model.width=64", "model.heads=2", "model.blocks=2", "model.layers_per_block=1", "model.context=96"),
    *("training.steps=60", "training.batch=16", "evaluation.max_bytes=4000", "evaluation.pooling_bytes=4000"),
)
Bytes = NDArray[np.uint8]
"""Prompts or continuations, one per line."""


@dataclass(frozen=True)
class Setting:
    corpus: Corpus
    device: torch.device
    num_prompts: int = 64
    prompt_bytes: int = 128
    new_bytes: int = 256

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Prompts and their human continuations, spread over the held-out text."""
        text = np.frombuffer(self.corpus.valid, np.uint8)
        size = self.prompt_bytes + self.new_bytes
        starts = np.linspace(0, len(text) - size, self.num_prompts).astype(int)
        both = torch.from_numpy(np.stack([text[start : start + size] for start in starts])).long()
        both = both.to(self.device)
        return both[:, : self.prompt_bytes], both[:, self.prompt_bytes :]


# ---- training ---------------------------------------------------------------------------------------------


def train_blocks(recipe: Recipe, corpus: Corpus, device: torch.device) -> Checkpoint:
    """Every block of the recipe, and the weights its consensus is pooled with."""
    tokenizer = ByteTokenizer()
    objective = Objective(recipe.model, recipe.objective, vocabulary=tokenizer.vocabulary)
    blocks = [train_unit(recipe, objective, corpus, device, index) for index in range(recipe.model.blocks)]
    codebook = build_codebook(recipe, tokenizer.vocabulary).to(device)()
    evaluator = Evaluator(objective, codebook, recipe.evaluation, seed=recipe.seed)
    pooling = evaluator.fit_pooling(blocks, tokenizer.encode(corpus.pool))
    return Checkpoint(recipe, corpus.sha256, objective, blocks, codebook, pooling, tokenizer)


def train_unit(
    recipe: Recipe, objective: Objective, corpus: Corpus, device: torch.device, index: int | None
) -> Block:
    """One block, or with None an end-to-end model of all layers."""
    began = time.monotonic()
    tokenizer = ByteTokenizer()
    shards = Shards.of(recipe, tokenizer.encode(corpus.train), corpus.sha256, device)
    codebook = build_codebook(recipe, tokenizer.vocabulary).to(device)
    seed = derive_seed("init", recipe.seed, "reference" if index is None else index)
    block = objective.build_reference(seed) if index is None else objective.build(index, seed)
    trainer = BlockTrainer(recipe, objective, block.to(device).train(), index, shards, codebook)
    recent: list[Tensor] = []
    for step in range(recipe.training.steps):
        recent = [*recent[-19:], trainer.step(step, shard=index or 0)]
    ce = float(torch.stack(recent).mean())
    name = "judge" if index is None else f"block {index}"
    print(f"  trained {name}: CE {ce:.3f} at the end, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return block.eval()


@dataclass(frozen=True)
class Judge:
    block: Block
    codebook: Tensor

    @torch.no_grad()
    def nats_per_byte(self, prompts_NP: Tensor, written_NW: Tensor) -> list[float]:
        """The loss of each continuation, given its prompt."""
        text = torch.cat([prompts_NP, written_NW], dim=1)
        with autocast(text.device):
            logits = self.block(text[:, :-1], self.codebook).logits_BTV
        nats = F.cross_entropy(logits.transpose(1, 2).float(), text[:, 1:], reduction="none")
        means: list[float] = nats[:, prompts_NP.shape[1] - 1 :].mean(dim=1).tolist()
        return means


def train_judge(recipe: Recipe, corpus: Corpus, device: torch.device) -> Judge:
    objective = Objective(recipe.model, recipe.objective, vocabulary=256)
    block = train_unit(recipe, objective, corpus, device, None)
    return Judge(block, build_codebook(recipe, 256).to(device)())


# ---- writing ----------------------------------------------------------------------------------------------


@torch.no_grad()
def write_by_sweep(
    model: Checkpoint, prompts_NP: Tensor, count: int, passes: int, temperature: float, sharpness: float = 1.0
) -> Tensor:
    length = prompts_NP.shape[1] + count - 1
    width = model.recipe.model.width
    noise = [sweep_noise(seed, prompts_NP.shape[1], length, width) for seed in range(len(prompts_NP))]
    z0 = torch.stack(noise).to(prompts_NP.device)
    sweep = begin_sweep(model.objective, prompts_NP, count, z0)
    blocks = dict(enumerate(model.blocks))
    _, log_probs = refine(model.objective, blocks, model.codebook_VD, sweep, passes, sharpness)
    return choose(log_probs, prompts_NP.shape[1], temperature)


def choose(log_probs_NWV: Tensor, position: int, temperature: float) -> Tensor:
    """Keyed Gumbel sampling as in generation.choose_token; row i has seed i."""
    if temperature == 0:
        return log_probs_NWV.argmax(dim=-1)
    rows, count, vocabulary = log_probs_NWV.shape
    noise = [[gumbel_noise(seed, position + i, vocabulary) for i in range(count)] for seed in range(rows)]
    keyed = torch.from_numpy(np.array(noise)).to(log_probs_NWV.device)
    return (log_probs_NWV.double() / temperature + keyed).argmax(dim=-1)


@torch.no_grad()
def write_plainly(model: Checkpoint, prompts_NP: Tensor, count: int, temperature: float) -> Tensor:
    """One byte at a time from the consensus, as mode `ar` does."""
    caches = [block.new_cache() for block in model.blocks]
    fresh, written = prompts_NP, []
    for i in range(count):
        parts = block_log_probs(model.objective, model.blocks, model.codebook_VD, fresh, caches)
        log_probs = pool([part[:, -1:] for part in parts], model.pooling.weights)
        fresh = choose(log_probs, prompts_NP.shape[1] + i, temperature)
        written.append(fresh)
    return torch.cat(written, dim=1)


def write_by_frequency(corpus: Corpus, prompts_NP: Tensor, count: int) -> Tensor:
    counts = np.bincount(np.frombuffer(corpus.train, np.uint8), minlength=256)
    generator = np.random.default_rng(0)
    drawn = generator.choice(256, (len(prompts_NP), count), p=counts / counts.sum())
    return torch.from_numpy(drawn).to(prompts_NP.device)


def repeat_the_prompt(prompts_NP: Tensor, count: int) -> Tensor:
    return prompts_NP[:, -16:].repeat(1, -(-count // 16))[:, :count]


# ---- measuring --------------------------------------------------------------------------------------------


def words(text: bytes) -> list[bytes]:
    return re.findall(rb"[A-Za-z]+", text)


def distinct(items: list[Any], n: int) -> float:
    """Share of n-grams that are new."""
    grams = list(zip(*(items[i:] for i in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class Meter:
    judge: Judge
    prompts_NP: Tensor
    known_words: set[bytes]

    def row(self, name: str, written_NW: Tensor) -> dict[str, Any]:
        nats = self.judge.nats_per_byte(self.prompts_NP, written_NW)
        texts = [bytes(line) for line in written_NW.cpu().numpy().astype(np.uint8)]
        # The first and last word of a continuation may be cut.
        found = [words(text)[1:-1] for text in texts]
        spelled = [word for line in found for word in line]
        return {
            "text": name,
            "judge_nats_per_byte": statistics.mean(nats),
            "standard_error": statistics.stdev(nats) / len(nats) ** 0.5,
            "distinct_1": statistics.mean(distinct(line, 1) for line in found),
            "distinct_2": statistics.mean(distinct(line, 2) for line in found),
            "distinct_bytes_4": statistics.mean(distinct(list(text), 4) for text in texts),
            "known_words": sum(w in self.known_words for w in spelled) / max(1, len(spelled)),
            "sample": texts[0].decode("utf-8", "replace"),
        }


HEADING = "text                     nats/byte    (se)  words distinct-1  -2     bytes distinct-4  known words"


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['text']:24s} {row['judge_nats_per_byte']:8.3f}  {row['standard_error']:6.3f}  "
        f"{row['distinct_1']:15.3f}  {row['distinct_2']:.3f}  {row['distinct_bytes_4']:15.3f}  "
        f"{row['known_words']:10.3f}"
    )


def measure(model: Checkpoint, judge: Judge, setting: Setting) -> list[dict[str, Any]]:
    prompts, human = setting.held_out()
    count = setting.new_bytes
    meter = Meter(judge, prompts, set(words(setting.corpus.train)))
    entries: list[tuple[str, Callable[[], Tensor]]] = [
        ("human text", lambda: human),
        ("ar", lambda: write_plainly(model, prompts, count, 1.0)),
        ("bytes by frequency", lambda: write_by_frequency(setting.corpus, prompts, count)),
        ("repeated prompt", lambda: repeat_the_prompt(prompts, count)),
    ]
    for passes, temperature in itertools.product(PASSES, (1.0, 0.0)):
        name = f"sweep {passes}" + (", most likely" if temperature == 0 else "")
        entries.append((name, partial(write_by_sweep, model, prompts, count, passes, temperature)))
    for passes, sharpness in itertools.product((1, 8, 32), SHARPER):
        name = f"sweep {passes}, sharpness {sharpness}"
        entries.append((name, partial(write_by_sweep, model, prompts, count, passes, 0.0, sharpness)))
    rows = []
    print(HEADING)
    for name, write in entries:
        rows.append(meter.row(name, write()))
        print(line(rows[-1]), flush=True)
    return rows


def claims_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    nats = {row["text"]: row["judge_nats_per_byte"] for row in rows}
    return {
        f"one pass is {MIN_GAIN} nats better than bytes by frequency": nats["sweep 1"]
        <= nats["bytes by frequency"] - MIN_GAIN,
        "eight passes are better than one": nats["sweep 8"] < nats["sweep 1"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", default="builtin")
    parser.add_argument("--checkpoint", type=Path, help="trained with objective.sweep_probability")
    parser.add_argument("--out", type=Path, help="keep the trained blocks here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    sizes = QUICK if arguments.quick else (f"training.steps={arguments.steps}",)
    overrides = [f"data.corpus={arguments.corpus}", *sizes, *arguments.set]
    recipe = load_recipe(RECIPE, overrides)
    corpus = load_corpus(recipe.data, recipe.evaluation.pooling_bytes)
    if arguments.checkpoint is not None:
        model = load_checkpoint(arguments.checkpoint, device)
    else:
        model = train_blocks(recipe, corpus, device)
    if arguments.out is not None:
        save_checkpoint(arguments.out, recipe, corpus.sha256, model.blocks, model.codebook_VD, model.pooling)
    judge_sizes = (f"seed={JUDGE_SEED}", f"model.layers_per_block={JUDGE_LAYERS_PER_BLOCK}")
    judge = train_judge(load_recipe(RECIPE, [*overrides, *judge_sizes]), corpus, device)
    setting = Setting(corpus, device, 8, 32, 64) if arguments.quick else Setting(corpus, device)
    rows = measure(model, judge, setting)
    for row in rows:
        print(f"\n--- {row['text']}\n{row['sample']}")
    numbers = {"recipe": model.recipe.to_dict(), "prompts": setting.num_prompts, "rows": rows}
    write_report(arguments.json, "sweep", numbers, [recipe.seed, JUDGE_SEED])
    return 0 if arguments.quick else check_claims(claims_of(rows))


if __name__ == "__main__":
    sys.exit(main())
