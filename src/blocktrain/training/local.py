"""A whole run on one machine: every block, then the end-to-end reference, then the report.

Units (blocks and the reference) train in groups: one unit per group when `training.order` is
sequential, all blocks in one group when they take turns. A group's state is one file, replaced
atomically, so a run killed at any point resumes at a step from which the result is the same.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

import blocktrain
from blocktrain.config import Recipe, changed_settings
from blocktrain.data.batches import open_batches
from blocktrain.data.corpora import open_text
from blocktrain.errors import CheckpointError, DivergedError, StoppedError, UserError
from blocktrain.ids import CorpusHash
from blocktrain.model.block import Block, num_parameters
from blocktrain.model.generation import LocalModel, generate
from blocktrain.model.pooling import Pooling
from blocktrain.training.checkpoint import load_weights, save_checkpoint, starting_blocks
from blocktrain.training.cost import (
    PeakMemory,
    forward_flops_per_token,
    training_flops,
)
from blocktrain.training.evaluation import Evaluator, bigram_cross_entropy
from blocktrain.training.frozen import for_host_memory
from blocktrain.training.inner import BlockTrainer, Codebook
from blocktrain.training.memory import block_needs, check_fits, usable_memory
from blocktrain.training.optimizer import Optimizer
from blocktrain.training.report import HeldOutScores, TrainingReport
from blocktrain.training.setup import REFERENCE, Setup
from blocktrain.training.source import source_commit
from blocktrain.training.storage import (
    SEAL,
    read_tensors,
    seal_is_broken,
    seal_of,
    stored_run,
    write_file,
    write_json,
    write_tensors,
)

# A curve of 200 points draws well, and the loss leaves the device 200 times and not at every step, which
# would stall CUDA.
LOSS_POINTS = 200
SAMPLE_PROMPT_BYTES = 64
MAX_COUNTED_BYTES = 128 << 20
"""Training text that bigrams are counted in; a dataset may be larger than memory."""
FEW_TOKENS = 2000
"""Losses of single tokens vary by about 2 nats, so a score on so many is good to 0.04."""
START_FOLDER = "start"
"""The checkpoint that a run began from, in its folder."""


class Observer(Protocol):
    """Who watches a run: the command line's progress display, or nobody."""

    def started(self, unit: str, step: int, total: int) -> None:
        return

    def stepped(self, unit: str, step: int, total: int, ce: float, tokens: int) -> None:
        return

    def message(self, text: str) -> None:
        return


class Silent(Observer):
    """Nobody: for benchmarks and tests."""


@dataclass
class Unit:
    """A block or the reference, its weights and its loss curve."""

    name: str
    index: int | None
    block: Block
    curve: list[tuple[int, float]] = field(default_factory=list)


class LocalRun:
    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        device: torch.device,
        observer: Observer,
        stop: threading.Event | None = None,
        start: Path | None = None,
    ) -> None:
        """`start` is a checkpoint to begin from instead of the seed; the reference begins from the seed."""
        self.recipe, self.out, self.device, self.observer = recipe, out, device, observer
        self.stop = stop or threading.Event()
        self.text = open_text(recipe)
        self.setup = setup = Setup.of(recipe, self.text.manifest.vocabulary)
        # First: the units below are as large as the recipe says.
        largest = max(block_needs(recipe, setup.objective, device.type))
        check_fits(recipe, largest, usable_memory(device), device)
        self.tokenizer, self.objective = self.text.tokenizer(), setup.objective
        self.shards = open_batches(recipe, self.text, device)
        self.codebook: Codebook = setup.codebook().to(device)
        self.start = start
        self.units = [Unit(f"block {b}", b, setup.initial(b)) for b in range(recipe.model.blocks)]
        if recipe.training.reference:
            self.units.append(Unit(REFERENCE, None, setup.initial_reference()))
        self.memory = PeakMemory(device)
        self.peaks: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    @property
    def blocks(self) -> list[Block]:
        return [unit.block for unit in self.units if unit.index is not None]

    @property
    def reference(self) -> Block | None:
        return next((unit.block for unit in self.units if unit.index is None), None)

    def groups(self) -> list[list[Unit]]:
        blocks = [unit for unit in self.units if unit.index is not None]
        rest = [[unit] for unit in self.units if unit.index is None]
        # The reference always trains alone: its peak memory is compared with that of one block (ratio 0.28).
        return [blocks, *rest] if self.recipe.training.order == "turns" else [[u] for u in blocks] + rest

    def train(self, *, resume: bool) -> bool:
        """Whether there was anything left to train."""
        trained = False
        if resume and self.start is not None:
            raise UserError(f"the run in {self.out} has begun from its own copy; leave out --from")
        if self.start is not None:
            starting_blocks(self.start, self.setup)  # one that does not fit leaves no folder behind
        prepare_folder(self.out, self.recipe, self.text.sha256, resume=resume)
        if self.start is not None:
            # A copy, so that a resumed run begins its later blocks from the same weights.
            shutil.copytree(self.start, self.out / START_FOLDER, dirs_exist_ok=True)
        if (self.out / START_FOLDER).is_dir():
            blocks, table = starting_blocks(self.out / START_FOLDER, self.setup)
            for unit, block in zip(self.units, blocks, strict=False):
                unit.block.load_state_dict(block.state_dict())
            if self.codebook.learned:
                self.codebook.load_state_dict({"table": table})
        for number, units in enumerate(self.groups()):
            # Only the group being trained is on the device; frozen blocks visit it one at a time.
            for unit in units:
                unit.block.to(self.device)
            # After the move, so that a peak counts this group only.
            self.memory.reset()
            path = self.out / "state" / f"group-{number}.safetensors"
            group = Group(self, units, path)
            start = group.load() if resume and path.exists() else 0
            trained = trained or start < self.recipe.training.steps
            group.train(start, self.recipe.training.steps)
            for unit in units:
                self.peaks[unit.name] = self.memory.peak_bytes
                self.seconds[unit.name] = group.seconds / len(units)
                unit.block.to("cpu")
        return trained

    def evaluate(self) -> HeldOutScores:
        self.observer.message("evaluating on held-out text")
        for unit in self.units:
            unit.block.to(self.device).eval()
        config = self.recipe.evaluation
        # A cut of bytes and not of tokens: every tokenizer is then scored on about the same text.
        valid = self.text.first_tokens("held_out", config.max_bytes)
        if len(valid) < FEW_TOKENS:
            self.observer.message(
                f"only {len(valid)} tokens of held-out text: a small difference of two scores is chance; use "
                "more text, or a larger data.valid_fraction or evaluation.max_bytes"
            )
        evaluator = Evaluator(self.objective, self.codebook().detach(), config, seed=self.recipe.seed)
        # Pooling weights are fitted on text that is neither trained on nor scored.
        pooling = evaluator.fit_pooling(
            self.blocks,
            self.text.first_tokens("pooling", config.pooling_bytes),
            follow_text=self.recipe.data.own_share > 0,
        )
        scores = evaluator.score(self.blocks, pooling, valid, euler=self.objective.composes_by_euler)
        return HeldOutScores(
            blocks=scores.blocks,
            consensus=scores.consensus,
            pooling=pooling,
            euler=scores.euler,
            reference=None if self.reference is None else evaluator.score_one(self.reference, valid),
            bigram_ce=bigram_cross_entropy(
                self.text.first_tokens("training", MAX_COUNTED_BYTES), valid, self.setup.vocabulary
            ),
            scored_tokens=len(valid) - 1,
            bytes_per_token=self.text.manifest.bytes_per_token("held_out"),
        )

    def report(self, scores: HeldOutScores, sample: str) -> TrainingReport:
        training, reference = self.recipe.training, self.reference
        tokens = training.steps * training.batch * self.recipe.model.context
        return TrainingReport(
            scores=scores,
            name=self.recipe.name,
            seed=self.recipe.seed,
            corpus_sha256=self.text.sha256,
            tokens={"per_block": tokens, "reference": 0 if reference is None else tokens},
            parameters={
                "blocks": sum(num_parameters(block) for block in self.blocks),
                "block": num_parameters(self.blocks[0]),
                "reference": None if reference is None else num_parameters(reference),
            },
            flops=self._flops(tokens),
            peak_memory={
                "block": max(self.peaks[unit.name] for unit in self.units if unit.index is not None),
                "reference": self.peaks.get(REFERENCE),
            },
            memory_method=self.memory.method,
            seconds=self.seconds,
            curves={unit.name: unit.curve for unit in self.units},
            recipe=self.recipe.to_dict(),
            versions=versions(self.device),
            sample=sample,
        )

    def _flops(self, tokens: int) -> dict[str, int | None]:
        model, vocabulary = self.recipe.model, self.setup.vocabulary
        forward = [
            forward_flops_per_token(model.of_block(index), block, vocabulary)
            for index, block in enumerate(self.blocks)
        ]
        blocks = sum(
            training_flops(own, sum(forward[other] for other in self.objective.upstream(block)), tokens)
            for block, own in enumerate(forward)
        )
        reference = None
        if self.reference is not None:
            per_token = forward_flops_per_token(model, self.reference, vocabulary)
            reference = training_flops(per_token, 0, tokens)
        return {"blocks": blocks, "reference": reference}

    def sample(self, pooling: Pooling) -> bytes:
        model = LocalModel(self.objective, self.blocks, self.codebook().detach(), pooling)
        prompt = self.text.first_tokens("held_out", SAMPLE_PROMPT_BYTES).tolist()
        per_token = self.text.manifest.bytes_per_token("held_out")
        length = math.ceil(self.recipe.evaluation.sample_bytes / per_token)
        return self.tokenizer.decode(
            [*prompt, *generate(model, prompt, max_tokens=length, seed=self.recipe.seed, temperature=0.8)]
        )

    def reported(self) -> TrainingReport | None:
        """The report that an earlier process wrote of this very run; None where it did not get there."""
        try:
            found = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
            report = TrainingReport.of_json(found)
        except (OSError, ValueError, UserError):
            return None
        same = dict(report.recipe) == json.loads(json.dumps(self.recipe.to_dict()))
        return report if same and (self.out / "checkpoint" / "config.json").exists() else None

    def finish(self) -> TrainingReport:
        """Evaluate, then write the checkpoint, the report and the sample."""
        scores = self.evaluate()
        # Before anything is written: a diverged block would make a checkpoint that nobody can use.
        for number, score in enumerate(scores.blocks):
            finite(score.ce, f"block {number}, held-out text")
        if scores.reference is not None:
            finite(scores.reference.ce, "reference, held-out text")
        table, folder = self.codebook().detach(), self.out / "checkpoint"
        save_checkpoint(
            folder, self.recipe, self.text.sha256, self.blocks, table, scores.pooling, self.tokenizer
        )
        sample = self.sample(scores.pooling)
        write_file(self.out / "sample.txt", sample)
        report = self.report(scores, sample.decode("utf-8", errors="replace"))
        write_json(self.out / "report.json", report.to_json())
        return report


class Group:
    """Units trained side by side, one step each in turn, saved and resumed together.

    A frozen block is one of another group, or a copy of a member of this group that is as old as the round,
    like the snapshots that a worker of a swarm has.
    """

    def __init__(self, run: LocalRun, units: list[Unit], path: Path) -> None:
        self.run, self.units, self.path = run, units, path
        shared = Optimizer(run.codebook, run.recipe.training) if run.codebook.learned else None
        self.codebook_optimizer = shared if any(unit.index is not None for unit in units) else None
        # Members train at the same time, so they share the room for frozen outputs.
        training = run.recipe.training
        host_bytes = max(1, training.frozen_host_bytes // len(units))
        recipe = replace(run.recipe, training=replace(training, frozen_host_bytes=host_bytes))
        self.trainers = [
            BlockTrainer(
                recipe,
                run.objective,
                unit.block.train(),
                unit.index,
                run.shards,
                run.codebook,
                codebook_optimizer=self.codebook_optimizer if unit.index is not None else None,
            )
            for unit in units
        ]
        # CPU copies of the members that others here take as input. Independent blocks have none: then nothing
        # is copied, and a group costs what its members cost.
        members = {unit.index: unit.block for unit in units if unit.index is not None}
        needed = {other for index in members for other in run.objective.frozen(index)}
        self.copies = {
            i: for_host_memory(copy.deepcopy(b), run.device) for i, b in members.items() if i in needed
        }
        self.table = run.codebook.copied()
        self.seconds = 0.0

    def _freeze(self, first: int, *, refresh: bool) -> None:
        """Give every trainer its frozen blocks for the round that began at step `first`."""
        recipe = self.run.recipe
        if refresh:
            for index, kept in self.copies.items():
                kept.load_state_dict(self.run.blocks[index].state_dict())
            self.table = self.run.codebook.copied()
        for unit, trainer in zip(self.units, self.trainers, strict=True):
            needed = () if unit.index is None else self.run.objective.frozen(unit.index)
            trainer.freeze([self.copies.get(i, self.run.blocks[i]) for i in needed], self.table)
            trainer.window_end = min(first + recipe.swarm.steps_per_round, recipe.training.steps)

    def train(self, start: int, steps: int) -> None:
        config = self.run.recipe.training
        every = max(1, steps // LOSS_POINTS)
        tokens = config.batch * self.run.recipe.model.context
        for unit in self.units:
            self.run.observer.started(unit.name, start, steps)
        started = saved = time.monotonic()
        seconds_before = self.seconds
        # Tensors and not numbers: `float()` here would wait for the device at every step.
        recent: list[list[Tensor]] = [[] for _ in self.units]
        for step in range(start, steps):
            # `swarm.steps_per_round` counts in `blocktrain train` too (docs/objective.md): blocks of a serial
            # model that train by turns then see neighbours as stale as in a swarm.
            first = step - step % self.run.recipe.swarm.steps_per_round
            if step in (first, start):
                # A resumed run enters a round in the middle, with the copies as they were saved.
                self._freeze(first, refresh=step == first)
            for unit, trainer, losses in zip(self.units, self.trainers, recent, strict=True):
                losses.append(self._step(trainer, unit, step, measured=step == start))
                if (step + 1) % every == 0 or step + 1 == steps:
                    ce = finite(float(torch.stack(losses).mean()), f"{unit.name}, step {step + 1}")
                    losses.clear()
                    unit.curve.append((step + 1, ce))
                    self.run.observer.stepped(unit.name, step + 1, steps, ce, tokens)
            self.seconds = seconds_before + time.monotonic() - started
            # Only where the curve has a point: a resumed run then has the same curve as one that was never
            # stopped.
            at_point = (step + 1) % every == 0
            stopped = self.run.stop.is_set() and step + 1 < steps
            if at_point and (stopped or time.monotonic() - saved >= config.checkpoint_seconds):
                self.save(step + 1)
                saved = time.monotonic()
                if stopped:
                    raise StoppedError(
                        f"stopped at step {step + 1} of {self.units[0].name}; the same command with --resume "
                        "goes on from there"
                    )
        if start < steps:
            self.save(steps)

    def _step(self, trainer: BlockTrainer, unit: Unit, step: int, *, measured: bool) -> Tensor:
        shard = unit.index or 0
        if not measured:
            return trainer.step(step, shard)
        # Only in the first step of a process: the hooks cost time, and every step saves the same tensors.
        with self.run.memory.count_activations():
            ce = trainer.step(step, shard)
        self.run.memory.count_state(unit.block, trainer.optimizer)
        return ce

    def save(self, step: int) -> None:
        # One file, so that weights, optimizer and copies are of one step whenever the process dies.
        tensors: dict[str, Tensor] = {}
        for unit, trainer in zip(self.units, self.trainers, strict=True):
            tensors |= {f"{unit.name}/weights/{k}": v for k, v in unit.block.state_dict().items()}
            state = trainer.optimizer.state_tensors()
            tensors |= {f"{unit.name}/optimizer/{k}": v for k, v in state.items()}
        for index, kept in self.copies.items():
            tensors |= {f"frozen/{index}/{k}": v for k, v in kept.state_dict().items()}
        if self.copies:
            tensors["frozen/codebook"] = self.table
        if self.codebook_optimizer is not None:
            tensors["codebook/weights/table"] = self.run.codebook.table
            state = self.codebook_optimizer.state_tensors()
            tensors |= {f"codebook/optimizer/{k}": v for k, v in state.items()}
        progress = {
            "step": step,
            "seconds": self.seconds,
            "peak_bytes": self.run.memory.peak_bytes,
            "curves": {unit.name: unit.curve for unit in self.units},
        }
        metadata = {"progress": json.dumps(progress)}
        write_tensors(self.path, tensors, metadata | {SEAL: seal_of(tensors, metadata)})

    def _start_over(self) -> str:
        names = " and ".join(unit.name for unit in self.units)
        return f"remove the file to train {names} again from the start, or restore it from a backup"

    def load(self) -> int:
        """Restore the saved state; returns the step to go on from."""
        try:
            tensors, metadata = read_tensors(self.path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._start_over()}") from None
        if seal_is_broken(tensors, metadata):
            raise CheckpointError(
                f"{self.path} is not what was written: the disk or a copy changed it; {self._start_over()}"
            )
        if "progress" not in metadata:
            raise CheckpointError(f"{self.path} is not training state of this program; start a new --out")

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        progress = json.loads(metadata["progress"])
        for unit, trainer in zip(self.units, self.trainers, strict=True):
            load_weights(unit.block, part(f"{unit.name}/weights/"), where=str(self.path))
            trainer.optimizer.load_state_tensors(part(f"{unit.name}/optimizer/"))
            unit.curve = [(int(step), float(ce)) for step, ce in progress["curves"][unit.name]]
        for index, kept in self.copies.items():
            load_weights(kept, part(f"frozen/{index}/"), where=str(self.path))
        if self.copies:
            self.table = tensors["frozen/codebook"].to(self.run.device)
        if self.codebook_optimizer is not None:
            self.run.codebook.load_state_dict(part("codebook/weights/"))
            self.codebook_optimizer.load_state_tensors(part("codebook/optimizer/"))
        self.seconds = float(progress["seconds"])
        self.run.memory.earlier_peak = int(progress["peak_bytes"])
        return int(progress["step"])


def finite(ce: float, where: str) -> float:
    if not math.isfinite(ce):
        raise DivergedError(
            f"the loss is not finite ({where}); lower the learning rate (training.matrix_lr, "
            "training.other_lr) or training.clip_norm, and start again"
        )
    return ce


def prepare_folder(out: Path, recipe: Recipe, corpus_sha256: CorpusHash, *, resume: bool) -> None:
    """Refuse to overwrite another run, and to resume one under a different recipe or text."""
    identity = {"recipe": recipe.to_dict(), "corpus_sha256": corpus_sha256}
    path = out / "run.json"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose a folder")
    if not path.exists():
        if resume:
            raise UserError(f"nothing to resume in {out}; leave out --resume to start")
        write_json(path, identity)
        return
    if not resume:
        raise UserError(f"{out} already holds a run; add --resume to go on with it, or choose another --out")
    before = stored_run(path)
    settings = changed_settings(before["recipe"], recipe)
    old_steps, new_steps = settings.get("training.steps", (0, 0))
    if new_steps > old_steps:  # a run may be extended: the schedule is then that of the longer run
        del settings["training.steps"]
    changed = list(settings)
    changed += ["corpus_sha256"] if before.get("corpus_sha256") != corpus_sha256 else []
    if changed:
        names = ", ".join(changed)
        raise UserError(
            f"{out} was started with other settings ({names}); resume with the same ones (training.steps may "
            "grow)"
        )
    if new_steps > old_steps:
        write_json(path, identity)


def versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    commit = source_commit()
    return {
        "blocktrain": blocktrain.__version__,
        **({} if commit is None else {"commit": commit}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": name,
    }
