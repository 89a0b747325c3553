"""The last part of a training, continued end to end or by parts that each see frozen neighbours.

    python benchmarks/refine.py --docs FOLDER [--swarm [--judge]] [--steps 4000] [--round 30] [--weight 1]
    python benchmarks/refine.py --docs FOLDER --size small ...    # 8 layers of width 64: minutes on a CPU
    python benchmarks/refine.py --docs FOLDER --quick      # CPU, tiny models, a minute

FOLDER has train.txt.xz and valid.txt.xz. A Llama of 12 layers of width 384 (`--size full`) is trained end to
end on bytes for three quarters of the steps. The last quarter is done twice from there, with the same
schedule and batches of the same size: end to end with fresh optimizer state, and as four parts
(`objective.kind = "serial"`), which train rounds of `--round` steps beside copies of the others from the
round's start and are then merged with weight `--weight`. Without compression and without a network; or with
--swarm as `blocktrain swarm` does it, with a worker for each part, over HTTP, updates in `sign`; with --judge
the coordinator judges them as it judges strangers, and the report has each verdict with its evidence. The
last quarter's schedule is then a cosine of its own from the rate that the whole schedule has there, for end
to end too. Also printed: the peak of device memory of a step, end to end and of each part alone (on CUDA),
without the text.
Exits 1 when the parts end more than 0.010 nats per byte above end to end, or take over 0.45 of its memory.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import lzma
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from blocktrain.judge.ledger_check import open_source
from blocktrain.model.block import Block
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import save_checkpoint
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.frozen import for_host_memory
from blocktrain.training.hugging_face import whole_name
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.optimizer import learning_rate_factor
from blocktrain.training.setup import Setup
from blocktrain.wire.messages import LedgerEntry

PARTS = 4


@dataclass(frozen=True)
class Size:
    """Of the model, its batches and its text; what is None is the recipe's default, or all of the text."""

    layers: int
    steps: int
    round: int
    model: Mapping[str, int] = field(default_factory=dict)
    training: Mapping[str, int] = field(default_factory=dict)
    text_bytes: int = -1
    scored_bytes: int | None = None


SIZES = {
    "full": Size(12, 4000, 30),
    "small": Size(
        8,
        400,
        20,
        {"width": 64, "heads": 2, "context": 128},
        {"batch": 8, "warmup_steps": 30},
        text_bytes=8_000_000,
        scored_bytes=65_536,
    ),
    "tiny": Size(
        4,
        40,
        5,
        {"width": 32, "heads": 2, "context": 32},
        {"batch": 8, "warmup_steps": 5},
        text_bytes=1_000_000,
        scored_bytes=4_000,
    ),
}
MAX_GAP, MAX_MEMORY = 0.010, 0.45
MODEL_KEYS = "family", "width", "heads", "context", "blocks", "layers_per_block"
TRAINING_KEYS = "steps", "batch", "warmup_steps", "matrix_lr", "other_lr"
REPORTED = "wall_seconds", "bytes_up", "bytes_down", "rounds", "verdicts"


class Experiment:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.size = SIZES["tiny" if arguments.quick else arguments.size]
        self.steps = arguments.steps or self.size.steps
        self.round = arguments.round or self.size.round
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.train_tokens, self.valid_tokens = (self._bytes(name) for name in ("train", "valid"))
        self.corpus = CorpusHash(hashlib.sha256(self.train_tokens.astype(np.uint8).tobytes()).hexdigest())
        # Batches are the same whatever the parts, so one copy of the text on the device is enough.
        self.shards = Shards.of(self.recipe(1), self.train_tokens, self.corpus, self.device)

    def _bytes(self, name: str) -> NDArray[np.int64]:
        with lzma.open(self.arguments.docs / f"{name}.txt.xz") as file:
            return np.frombuffer(file.read(self.size.text_bytes), np.uint8).astype(np.int64)

    def recipe(self, parts: int) -> Recipe:
        matrix_lr, other_lr = (float(rate) for rate in self.arguments.rates.split(","))
        shape: dict[str, Any] = {"family": "llama", "layers_per_block": self.size.layers // parts}
        model = {**shape, "blocks": parts, **self.size.model}
        rates = {"matrix_lr": matrix_lr, "other_lr": other_lr}
        training = {**rates, "steps": self.steps, **self.size.training}
        kind = "serial" if parts > 1 else "denoise"
        return resolve_recipe(
            {"seed": self.arguments.seed, "model": model, "training": training, "objective": {"kind": kind}}
        )

    def trainer(self, setup: Setup, block: Block, index: int) -> BlockTrainer:
        codebook = setup.codebook().to(self.device)
        return BlockTrainer(
            setup.recipe, setup.objective, block.to(self.device).train(), index, self.shards, codebook
        )

    def frozen(self, setup: Setup, heads: Sequence[Block], index: int) -> list[Block]:
        others = setup.objective.frozen(index)
        return [for_host_memory(copy.deepcopy(heads[other]), self.device) for other in others]

    def score(self, setup: Setup, blocks: Sequence[Block]) -> float:
        for block in blocks:
            block.to(self.device).eval()
        codebook = setup.codebook()().to(self.device)
        evaluator = Evaluator(setup.objective, codebook, setup.recipe.evaluation, seed=0)
        weights = (0.0,) * (len(blocks) - 1) + (1.0,)
        valid = self.valid_tokens[: self.size.scored_bytes]
        return evaluator.score(blocks, Pooling(weights), valid, euler=False).consensus.ce

    def last_quarter(self, parts: int) -> Recipe:
        """With a schedule of its own, as a run that begins there has one."""
        recipe = self.recipe(parts)
        training, steps = recipe.training, self.steps // 4
        factor = learning_rate_factor(self.steps - steps, training)
        changed = replace(
            training,
            steps=steps,
            warmup_steps=0,
            matrix_lr=training.matrix_lr * factor,
            other_lr=training.other_lr * factor,
        )
        return replace(recipe, training=changed)

    def continued_by_a_swarm(self, begun: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The report of a run over HTTP that goes on with the parts."""
        recipe, length = self.last_quarter(PARTS), self.round
        setup = Setup.of(recipe)
        with tempfile.TemporaryDirectory(prefix="refine-") as name:
            folder = Path(name)
            for part, tokens in (("train", self.train_tokens), ("valid", self.valid_tokens)):
                (folder / f"{part}.txt").write_bytes(tokens.astype(np.uint8).tobytes())
            parts, table = self.parts_of(setup, begun), setup.codebook()().detach()
            last_speaks = Pooling((0.0,) * (PARTS - 1) + (1.0,))
            save_checkpoint(folder / "parts", recipe, self.corpus, parts, table, last_speaks)
            model, training = recipe.model, recipe.training
            changed = {
                "seed": recipe.seed,
                "objective.kind": "serial",
                **{f"model.{key}": getattr(model, key) for key in MODEL_KEYS},
                **{f"training.{key}": getattr(training, key) for key in TRAINING_KEYS},
                "training.reference": "false",
                "data.corpus": folder,
                "evaluation.max_bytes": self.size.scored_bytes or len(self.valid_tokens),
                "swarm.steps_per_round": length,
                "swarm.rounds": recipe.training.steps // length,
                "swarm.replicas": 1,
                "swarm.codec": "sign",
                "swarm.run_ahead": 0.0,
                "trust.judge": "coordinator" if self.arguments.judge else "off",
            }
            (folder / "recipe.toml").write_text('name = "refine"\n')
            flags = [part for key, value in changed.items() for part in ("--set", f"{key}={value}")]
            command = [sys.executable, "-m", "blocktrain", "swarm", str(folder / "recipe.toml")]
            command += [
                "--from",
                str(folder / "parts"),
                "--workers",
                str(PARTS),
                "--out",
                str(folder / "run"),
            ]
            subprocess.run([*command, "--device", self.device.type, *flags], check=True)
            report: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
            with open_source(str(folder / "run" / "coordinator")) as source:
                report["verdicts"] = verdicts_of(source.entries)
            return report

    def continued_in_parts(self, start: dict[str, torch.Tensor], first: int) -> float:
        setup = Setup.of(self.recipe(PARTS))
        heads, length = self.parts_of(setup, start), self.round
        local = [copy.deepcopy(head) for head in heads]
        trainers = [self.trainer(setup, block, index) for index, block in enumerate(local)]
        for begin in range(first, self.steps, length):
            end = min(begin + length, self.steps)
            for index, trainer in enumerate(trainers):
                trainer.freeze(self.frozen(setup, heads, index))
                trainer.window_end = end
                for step in range(begin, end):
                    trainer.step(step, index)
            for head, block in zip(heads, local, strict=True):
                with torch.no_grad():
                    for kept, moved in zip(head.parameters(), block.parameters(), strict=True):
                        kept.lerp_(moved.to(kept.device), self.arguments.weight)
                        moved.copy_(kept)
        return self.score(setup, heads)

    def parts_of(self, setup: Setup, start: dict[str, torch.Tensor]) -> list[Block]:
        parts = []
        for index in range(PARTS):
            part, before = setup.initial(index), setup.recipe.model.layers_before(index)
            part.load_state_dict({name: start[whole_name(name, before)] for name in part.state_dict()})
            parts.append(part)
        return parts

    def peak_bytes(self, setup: Setup, heads: Sequence[Block], index: int) -> int:
        """Of two steps of one trainer alone, which is what a worker has."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer = self.trainer(setup, copy.deepcopy(heads[index]), index)
        trainer.freeze(self.frozen(setup, heads, index))
        for step in range(2):
            trainer.window_end = step + 1
            trainer.step(step, index)
        return torch.cuda.max_memory_allocated() - before


def verdicts_of(entries: Sequence[LedgerEntry]) -> list[dict[str, Any]]:
    """Each verdict's part and reason, and where it was judged what the judge found."""
    part_of = {one.body["update_id"]: one.body["block"] for one in entries if one.kind == "commit"}
    found = []
    for body in (one.body for one in entries if one.kind == "verdict"):
        row = {"part": part_of[body["update_id"]], "reason": body["reason"]}
        if "evidence" in body:
            gains = {name: body["evidence"][name] for name in ("held_out", "other")}
            row |= {name: [gain["mean"], gain["error"]] for name, gain in gains.items()}
        found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--swarm", action="store_true", help="the parts by workers over HTTP, in `sign`")
    parser.add_argument("--judge", action="store_true", help="with --swarm: updates are judged")
    parser.add_argument("--steps", type=int, help="default: 4000; small 400, --quick 40")
    parser.add_argument("--round", type=int, help="steps of a round; default: 30; small 20, --quick 5")
    parser.add_argument("--weight", type=float, default=1.0, help="of a part's move in its merge")
    parser.add_argument("--rates", default="6e-3,1e-3", help="matrix_lr,other_lr of the whole schedule")
    parser.add_argument(
        "--start", type=Path, help="keep the first three quarters in this file, or go on from it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=[name for name in SIZES if name != "tiny"], default="full")
    parser.add_argument("--quick", action="store_true", help="the tiny size, and no claims")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    experiment, began = Experiment(arguments), time.monotonic()
    whole = Setup.of(experiment.recipe(1))
    block, first = whole.initial(0), 3 * experiment.steps // 4
    trainer = experiment.trainer(whole, block, 0)
    if arguments.start is not None and arguments.start.exists():
        block.load_state_dict(load_file(arguments.start))
    else:
        for step in range(first):
            trainer.step(step, 0)
    start = {name: tensor.detach().cpu().clone() for name, tensor in block.state_dict().items()}
    if arguments.start is not None:
        save_file(start, arguments.start)
    report: dict[str, Any] = {"steps": experiment.steps, "round": experiment.round}
    report |= {"weight": arguments.weight, "judge": arguments.judge, "size": asdict(experiment.size)}
    report["before"] = experiment.score(whole, [block])
    print(f"{time.monotonic() - began:.0f} s: before {report['before']:.4f}", flush=True)
    after = Setup.of(experiment.last_quarter(1)) if arguments.swarm else whole
    steps = range(after.recipe.training.steps) if arguments.swarm else range(first, experiment.steps)
    trainer = experiment.trainer(after, block, 0)
    for step in steps:
        trainer.step(step, 0)
    report["end_to_end"] = experiment.score(whole, [block])
    print(f"{time.monotonic() - began:.0f} s: end to end {report['end_to_end']:.4f}", flush=True)
    if arguments.swarm:
        ended = experiment.continued_by_a_swarm(start)
        report["parts"] = ended["final"]["consensus_ce"]
        report |= {key: ended[key] for key in REPORTED}
    else:
        report["parts"] = experiment.continued_in_parts(start, first)
    report["gap"] = report["parts"] - report["end_to_end"]
    print(
        f"{time.monotonic() - began:.0f} s: parts {report['parts']:.4f}, gap {report['gap']:+.4f}", flush=True
    )
    if arguments.swarm:
        print(f"verdicts: {dict(Counter(one['reason'] for one in report['verdicts']))}")
    claims = {f"parts end within {MAX_GAP} of end to end": report["gap"] <= MAX_GAP}
    if experiment.device.type == "cuda":
        del trainer, block
        serial = Setup.of(experiment.recipe(PARTS))
        heads = experiment.parts_of(serial, start)
        joined = whole.initial(0)
        report["peak_bytes"] = {
            "end_to_end": experiment.peak_bytes(whole, [joined], 0),
            "parts": [experiment.peak_bytes(serial, heads, index) for index in range(PARTS)],
        }
        peaks = report["peak_bytes"]
        ratio = max(peaks["parts"]) / peaks["end_to_end"]
        print(f"device memory: {peaks}, {ratio:.2f} of end to end")
        claims[f"a part takes at most {MAX_MEMORY} of the memory"] = ratio <= MAX_MEMORY
    write_report(arguments.json, "refine", report, [arguments.seed])
    return 0 if arguments.quick else check_claims(claims)


if __name__ == "__main__":
    sys.exit(main())
