"""Attacks on a trained model that strangers refine in serial parts: real clients of a real coordinator.

A tiny Llama is trained end to end, cut into two parts, and fine-tuned on text of another kind. Honest workers
sit at both parts, and an attacker at each. What is compared is the loss of the composed model on text that is
in no run, with that of the same honest workers alone, without judge and guard.
"""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.batches import open_batches
from blocktrain.data.corpora import open_text
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.ids import derive_seed
from blocktrain.model.pooling import Pooling
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.hugging_face import export_folder, import_folder
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.local import LocalRun, Silent
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.training.snapshot import load_into, tensors_of
from blocktrain.training.update import Weights, difference
from blocktrain.wire.codec import encode
from blocktrain.wire.messages import Assignment
from tests.adversaries.swarm import Client, fresh_text, text
from tests.adversaries.training import noise_like, scaled
from tests.coordinator.program import Program
from tests.waiting import until

PARTS, LAYERS = 2, 4
CPU = torch.device("cpu")
MODEL = 'family = "llama", width = 32, heads = 4, context = 32'
RECIPE = """
name = "refined"
seed = {seed}
model = {{ {model}, blocks = {parts}, layers_per_block = {layers} }}
objective = {{ kind = "serial" }}
training = {{ batch = 16, warmup_steps = 5, matrix_lr = 1e-3, other_lr = 1e-3, reference = false }}
evaluation = {{ max_bytes = 2000, pooling_bytes = 500, batch = 64 }}
swarm.steps_per_round = 10
swarm.rounds = 24
swarm.replicas = 1
swarm.stand_in = 0
swarm.lease_seconds = 3600.0
swarm.codec = "sign"
swarm.min_deadline_seconds = 3600.0
swarm.max_deadline_seconds = 3600.0
swarm.evaluate_every_seconds = 3600.0
trust.stamp_bits = 0
trust.probation_verdicts = 1
trust.judge = "{judge}"
"""


def of_another_kind(known: bytes) -> bytes:
    """Every word backwards: the letters are the same, and what follows them is not."""
    return " ".join(word[::-1] for word in known.decode(errors="ignore").split(" ")).encode()


def trained_parts(folder: Path, seed: int, steps: int = 150) -> Path:
    """A Llama that has learned the suite's text end to end, as the parts of a serial model."""
    (folder / "old.txt").write_bytes(text())
    sections = tomllib.loads(
        f"model = {{ {MODEL}, blocks = 1, layers_per_block = {LAYERS} }}\nseed = {seed}\n"
        f'data = {{ corpus = "{folder}/old.txt" }}\n'
        f"training = {{ steps = {steps}, batch = 16, warmup_steps = 5, matrix_lr = 1e-2, other_lr = 1e-2, "
        "reference = false }\nevaluation = { max_bytes = 2000, pooling_bytes = 500, sample_bytes = 0 }\n"
    )
    run = LocalRun(resolve_recipe(sections), folder / "first", CPU, Silent())
    run.train(resume=False)
    run.finish()
    export_folder(folder / "first" / "checkpoint", folder / "llama", "card")
    import_folder(folder / "llama", folder / "parts", PARTS)
    return folder / "parts"


class Refining:
    """What workers of such a run train, and the loss of what they make."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = with_swarm_schedule(recipe)
        self.setup = Setup.of_swarm(self.recipe)
        self._batches = open_batches(self.recipe, open_text(recipe), CPU)
        self._scored = ByteTokenizer().encode(of_another_kind(fresh_text()))

    def delta(self, lease: Assignment, base: Weights, frozen: Mapping[int, Weights]) -> Weights:
        """What honest work on this assignment takes away from `base`, beside these frozen parts."""
        setup, module = self.setup, self.setup.initial(lease.block)
        load_into(module, base)
        trainer = BlockTrainer(
            self.recipe, setup.objective, module, lease.block, self._batches, setup.codebook()
        )
        others = {part: setup.initial(part).eval() for part in frozen}
        for part, weights in frozen.items():
            load_into(others[part], weights)
        trainer.freeze([others[part] for part in setup.objective.frozen(lease.block)])
        for step in range(lease.first_step, lease.first_step + lease.steps):
            trainer.step(step, lease.shard)
        return difference(base, tensors_of(module))

    def loss(self, heads: Sequence[Weights]) -> float:
        """Of the composed model on fresh text of the kind that it is refined on, in nats per byte."""
        blocks = [self.setup.initial(part).eval() for part in range(PARTS)]
        for block, weights in zip(blocks, heads, strict=True):
            load_into(block, weights)
        evaluator = Evaluator(self.setup.objective, self.setup.codebook()(), self.recipe.evaluation, seed=0)
        last_speaks = Pooling((0.0,) * (PARTS - 1) + (1.0,))
        return evaluator.score(blocks, last_speaks, self._scored, euler=False).consensus.ce


Harm = Callable[[Weights, int], Weights]
"""What an attacker makes of its own honest update, with a seed."""


def reverses(update: Weights, seed: int) -> Weights:
    return scaled(update, -1.0)


def sends_noise(update: Weights, seed: int) -> Weights:
    return noise_like(update, seed)


ATTACKERS: Mapping[int, Harm] = MappingProxyType({0: reverses, 1: sends_noise})
"""By the part that they sit at."""


@dataclass
class RefinedEnding:
    losses: list[float] = field(default_factory=list)
    """Of the composed model after each round, that before the first at the front."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """On the attackers' updates."""
    merged: int = 0
    """Of theirs."""
    honest_refused: Counter[str] = field(default_factory=Counter)

    def rise_over(self, alone: RefinedEnding) -> list[float]:
        pairs = zip(self.losses[1:], alone.losses[1:], strict=True)
        return [mine - theirs for mine, theirs in pairs]


def refined_campaign(
    folder: Path,
    start: Path,
    seed: int,
    rounds: int,
    honest: int,
    harms: Mapping[int, Harm] = MappingProxyType({}),
    judge: str = "coordinator",
) -> RefinedEnding:
    """Some rounds of `honest` workers at each part and, with `harms`, an attacker at each. `start` are the
    parts that the run begins from."""
    folder.mkdir(parents=True)
    recipe = RECIPE.format(seed=seed, judge=judge, model=MODEL, parts=PARTS, layers=LAYERS // PARTS)
    new = of_another_kind(text()[:200_000])
    program = Program(folder, recipe=recipe, text=new, start=start)
    values: dict[str, Any] = tomllib.loads(f'{recipe}\ndata = {{ corpus = "{folder}/text.txt" }}\n')
    training, ending = Refining(resolve_recipe(values)), RefinedEnding()
    clients: list[Client] = []
    try:
        for _ in range(PARTS * (honest + bool(harms))):
            clients.append(Client(program.url, time.time))
            clients[-1].join()
        watch, attackers = clients[0], clients[PARTS * honest :]

        def scored() -> float:
            heads = [watch.snapshot(part, watch.block(part).head_hash) for part in range(PARTS)]
            return training.loss(heads)

        ending.losses.append(scored())
        for round_ in range(rounds):
            # Asked one after another, they spread over both parts and stay there.
            leases = [(client, client.lend()) for client in clients]
            sent = []
            for client, lease in reversed(leases):
                frozen = {one.block: client.snapshot(one.block, one.hash) for one in lease.frozen}
                base = client.snapshot(lease.block, lease.base_hash)
                update = training.delta(lease, base, frozen)
                if client in attackers:
                    update = harms[lease.block](update, derive_seed("harm", seed, round_, lease.block))
                schema = client.schema(lease.block)
                ordered = {name: update[name] for name, _ in schema.tensors}
                sent.append((client, encode(client.codec, schema, ordered)))
                client.deliver_payload(lease, sent[-1][1])
            for client, payload in sent:
                reason = str(client.verdict_on(payload).reason)
                if client in attackers:
                    ending.verdicts[reason] += 1
                elif reason not in ("on_time", "carried"):
                    ending.honest_refused[reason] += 1
            for part in range(PARTS):
                until("the merge", partial(_moved_on, watch, part, round_))
            ending.losses.append(scored())
        ending.merged = sum(
            one.worker_id in {client.identity.worker_id for client in attackers}
            for part in range(PARTS)
            for merge in watch.merges(part).merges
            for one in merge.inputs
        )
    finally:
        for client in clients:
            client.close()
        program.kill()
    return ending


def _moved_on(client: Client, part: int, version: int) -> bool:
    return client.block(part).head_version > version
