"""One large machine among small ones: what a deep block in place of a shallow one is worth to the pool.

    python benchmarks/unequal.py --docs FOLDER [--steps 4000] [--seed 0] [--jobs 5] [--json FILE]
    python benchmarks/unequal.py --docs FOLDER --size small ...    # width 64: minutes on a CPU
    python benchmarks/unequal.py --docs FOLDER --quick      # CPU, tiny models, a minute

FOLDER has train.txt.xz and valid.txt.xz. Five blocks of one recipe train alone on the same text, four of 3
layers and one of 12 (`model.block_layers`), each with the same number of bytes. Then two models are pooled as
the product pools them: the four small blocks, and three small ones beside the large one. Pooling weights are
fitted on text that nobody trains on; held-out text is scored once. Weights are kept in --work, so that the
same command goes on with what is finished.
Exits 1 when the large block lowers the composed loss by less than 0.01 nats per byte.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from provenance import check_claims, write_report
from safetensors.torch import load_file, save_file

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.shards import Shards
from blocktrain.ids import CorpusHash
from blocktrain.model.block import num_parameters
from blocktrain.training.cost import forward_flops_per_token, training_flops
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.setup import Setup

SMALL, LARGE = 4, 4
"""How many small blocks there are, and which block is the large one."""
POOLING_CHUNK, POOLING_EVERY = 1 << 16, 80
"""Every 80th piece of the training text is for fitting the pool: 1.4 MB from all over it."""
MIN_GAIN = 0.01


@dataclass(frozen=True)
class Size:
    """Of the blocks, their batches and their text; what is not said is the recipe's default, or all of it."""

    steps: int = 4000
    layers: Sequence[int] = (3, 3, 3, 3, 12)
    model: Mapping[str, int] = field(default_factory=dict)
    training: Mapping[str, int] = field(default_factory=dict)
    chunk: int = POOLING_CHUNK
    codebook: str = "fixed"
    text_bytes: int = -1
    scored_bytes: int = -1


SIZES = {
    "full": Size(),
    "small": Size(
        steps=600,
        model={"width": 64, "heads": 2, "context": 128},
        training={"batch": 16, "warmup_steps": 50},
        chunk=POOLING_CHUNK // 16,
        codebook="own",  # 256 rows of width 64 cannot be orthogonal
        text_bytes=16_000_000,
        scored_bytes=262_144,
    ),
    "tiny": Size(
        steps=30,
        layers=(1, 1, 1, 1, 4),
        model={"width": 64, "heads": 2, "context": 64},
        training={"batch": 8, "warmup_steps": 5},
        chunk=POOLING_CHUNK // 16,
        text_bytes=4 * POOLING_EVERY * POOLING_CHUNK // 16,
        scored_bytes=20_000,
    ),
}


@dataclass(frozen=True)
class Job:
    docs: Path
    work: Path
    steps: int
    seed: int
    matrix_lr: float
    other_lr: float
    size: str
    device: str

    def recipe(self) -> Recipe:
        size = SIZES[self.size]
        model = {"blocks": SMALL + 1, "block_layers": list(size.layers), **size.model}
        rates = {"matrix_lr": self.matrix_lr, "other_lr": self.other_lr}
        training = {"steps": self.steps, **rates, **size.training}
        return resolve_recipe(
            {
                "name": "unequal",
                "seed": self.seed,
                "model": model,
                "training": training,
                "objective": {"hint_probability": 0.0, "codebook": size.codebook},
            }
        )

    def weights(self, block: int) -> Path:
        key = repr((self.steps, self.seed, self.matrix_lr, self.other_lr, self.size, block))
        return self.work / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"

    def texts(self) -> dict[str, NDArray[np.int64]]:
        """Training, pooling and held-out bytes."""
        size = SIZES[self.size]
        whole, valid = (
            beginning(self.docs / f"{name}.txt.xz", length)
            for name, length in (("train", size.text_bytes), ("valid", size.scored_bytes))
        )
        apart = np.arange(len(whole)) // size.chunk % POOLING_EVERY == POOLING_EVERY - 1
        parts = {"train": whole[~apart], "pool": whole[apart], "valid": valid}
        return {name: part.astype(np.int64) for name, part in parts.items()}


def beginning(path: Path, length: int) -> NDArray[np.uint8]:
    with lzma.open(path) as file:
        return np.frombuffer(file.read(length), np.uint8)


def train_block(job: Job, block: int) -> tuple[int, float]:
    """In a process of its own; leaves the weights in the work folder, returns the seconds that it took."""
    torch.set_num_threads(1)
    began = time.monotonic()
    if not job.weights(block).exists():
        recipe, device = job.recipe(), torch.device(job.device)
        setup, train = Setup.of(recipe), job.texts()["train"]
        corpus = CorpusHash(hashlib.sha256(train.astype(np.uint8).tobytes()).hexdigest())
        module = setup.initial(block).to(device)
        shards = Shards.of(recipe, train, corpus, device)
        trainer = BlockTrainer(recipe, setup.objective, module, block, shards, setup.codebook().to(device))
        for step in range(job.steps):
            trainer.step(step, block)
        save_file({name: one.cpu().clone() for name, one in module.state_dict().items()}, job.weights(block))
    return block, time.monotonic() - began


def scores(job: Job) -> dict[str, Any]:
    recipe, device, texts = job.recipe(), torch.device(job.device), job.texts()
    setup, blocks = Setup.of(recipe), []
    for index in range(recipe.model.blocks):
        block = setup.initial(index)
        block.load_state_dict(load_file(job.weights(index)))
        blocks.append(block.to(device).eval())
    evaluator = Evaluator(
        setup.objective, setup.codebook()().detach().to(device), recipe.evaluation, seed=job.seed
    )
    found: dict[str, Any] = {}
    pools = {"four small": range(SMALL), "three small, one large": (*range(SMALL - 1), LARGE)}
    for name, members in pools.items():
        chosen = [blocks[index] for index in members]
        pooling = evaluator.fit_pooling(chosen, texts["pool"][: recipe.evaluation.pooling_bytes])
        score = evaluator.score(chosen, pooling, texts["valid"], euler=False)
        found[name] = {
            "blocks": list(members),
            "consensus_ce": score.consensus.ce,
            "block_ce": [one.ce for one in score.blocks],
            "weights": list(pooling.weights),
        }
    tokens = job.steps * recipe.training.batch * recipe.model.context
    model = recipe.model
    shapes = [
        {
            "layers": model.of_block(index).layers_per_block,
            "parameters": num_parameters(block),
            "training_flops": training_flops(
                forward_flops_per_token(model.of_block(index), block, setup.vocabulary), 0, tokens
            ),
        }
        for index, block in enumerate(blocks)
    ]
    gain = found["four small"]["consensus_ce"] - found["three small, one large"]["consensus_ce"]
    return {"pools": found, "gain": gain, "blocks": shapes, "recipe": recipe.to_dict()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/unequal"), help="where weights are kept")
    parser.add_argument("--steps", type=int, help="default: 4000; small 600, --quick 30")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", default="6e-3,3e-3", help="matrix_lr,other_lr of all blocks")
    parser.add_argument("--jobs", type=int, default=1, help="blocks that train side by side")
    parser.add_argument("--size", choices=[name for name in SIZES if name != "tiny"], default="full")
    parser.add_argument("--quick", action="store_true", help="the tiny size, and no claims")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    matrix_lr, other_lr = (float(rate) for rate in arguments.rates.split(","))
    size = "tiny" if arguments.quick else arguments.size
    job = Job(
        arguments.docs,
        arguments.work,
        arguments.steps or SIZES[size].steps,
        arguments.seed,
        matrix_lr,
        other_lr,
        size,
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    seconds: dict[int, float] = {}
    # The large block first: it takes longest.
    order = sorted(range(SMALL + 1), key=lambda block: block != LARGE)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as processes:
        for future in as_completed([processes.submit(train_block, job, block) for block in order]):
            block, took = future.result()
            seconds[block] = took
            print(f"block {block} trained in {took:.0f} s", flush=True)
    report = {**scores(job), "steps": job.steps, "seconds": [seconds[block] for block in sorted(seconds)]}
    for name, pool in report["pools"].items():
        alone = ", ".join(f"{ce:.4f}" for ce in pool["block_ce"])
        weights = ", ".join(f"{weight:.2f}" for weight in pool["weights"])
        print(f"{name}: {pool['consensus_ce']:.4f} (alone {alone}; weights {weights})")
    print(f"gain of the large block: {report['gain']:.4f} nats per byte after {job.steps} steps")
    write_report(arguments.json, "unequal", report, [job.seed])
    claim = f"three small blocks and a large one are {MIN_GAIN} below four small ones"
    return 0 if arguments.quick else check_claims({claim: report["gain"] >= MIN_GAIN})


if __name__ == "__main__":
    sys.exit(main())
