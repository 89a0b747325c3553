"""Who poisons one cluster of a specialised run: real clients of a real coordinator, two blocks, two kinds.

Honest workers sit at both blocks, and an attacker at each. The composed model's loss on the held-out text of
each cluster is compared with that of the same honest workers alone, without judge and guard.
"""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.config import Recipe, resolve_recipe
from blocktrain.data.batches import open_batches
from blocktrain.data.dataset import Dataset
from blocktrain.training.evaluation import Evaluator
from blocktrain.training.inner import BlockTrainer
from blocktrain.training.setup import Setup, with_swarm_schedule
from blocktrain.training.snapshot import load_into, tensors_of
from blocktrain.training.update import Weights, difference
from tests.adversaries.swarm import Client
from tests.adversaries.training import blended, norm_of, scaled
from tests.coordinator.program import Program
from tests.kinds import held_out_text, two_kinds
from tests.waiting import until

BLOCKS = KINDS = 2
RECIPE = """
name = "specialists"
seed = {seed}
model = {{ width = 32, heads = 2, blocks = 2, layers_per_block = 1, context = 64, condition_width = 8 }}
objective = {{ hint_probability = 0.0 }}
training = {{ batch = 16, warmup_steps = 5, matrix_lr = 1e-3, other_lr = 1e-3, reference = false }}
evaluation = {{ noise_draws = 1, batch = 64 }}
swarm.steps_per_round = 20
swarm.rounds = 24
swarm.replicas = 1
swarm.stand_in = 0
swarm.lease_seconds = 3600.0
swarm.codec = "sparse:512"
swarm.min_deadline_seconds = 3600.0
swarm.max_deadline_seconds = 3600.0
swarm.evaluate_every_seconds = 3600.0
trust.stamp_bits = 0
trust.probation_verdicts = 1
trust.judge = "{judge}"
"""


class Specialists:
    """What workers of such a run train, and the loss of what they make."""

    def __init__(self, recipe: Recipe, dataset: Dataset) -> None:
        self.recipe, self.dataset = with_swarm_schedule(recipe), dataset
        self.setup = Setup.of_swarm(self.recipe)

    def delta(
        self, block: int, base: Weights, shard: int, first_step: int, kind: int | None = None
    ) -> Weights:
        """What an assignment takes away from `base`; with `kind`, trained on that kind of text alone."""
        recipe = self.recipe
        if kind is not None:
            recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, own_share=1.0))
        batches = open_batches(recipe, self.dataset, torch.device("cpu"))

        class Drawn:
            def batch(self, shard: int, step: int, block: int | None = None) -> tuple[Tensor, Tensor]:
                return batches.batch(shard, step, block if kind is None else kind)

        module = self.setup.initial(block)
        load_into(module, base)
        trainer = BlockTrainer(recipe, self.setup.objective, module, block, Drawn(), self.setup.codebook())
        for step in range(first_step, first_step + recipe.swarm.steps_per_round):
            trainer.step(step, shard)
        return difference(base, tensors_of(module))

    def losses(self, heads: list[Weights]) -> tuple[float, ...]:
        """Of the composed model, on each kind's held-out text, in nats per byte."""
        blocks = [self.setup.initial(block).eval() for block in range(BLOCKS)]
        for block, weights in zip(blocks, heads, strict=True):
            load_into(block, weights)
        evaluator = Evaluator(self.setup.objective, self.setup.codebook()(), self.recipe.evaluation, seed=0)
        pooling = evaluator.fit_pooling(blocks, self.dataset.first_tokens("pooling"), follow_text=True)
        texts = [self.dataset.tokenizer().encode(held_out_text(kind)) for kind in range(KINDS)]
        return tuple(evaluator.score(blocks, pooling, one, euler=False).consensus.ce for one in texts)


@dataclass(frozen=True)
class Poisoner:
    """An attacker of `block` at its turn."""

    training: Specialists
    block: int
    base: Weights
    shard: int
    first_step: int

    def on(self, kind: int) -> Weights:
        return self.training.delta(self.block, self.base, self.shard, self.first_step, kind)

    def honest(self) -> Weights:
        return self.training.delta(self.block, self.base, self.shard, self.first_step)

    def mixed(self, down: int, up: int, share: float) -> Weights:
        """Lowers the loss of one kind and raises that of the other, with an honest norm."""
        found = blended(self.on(down), self.on(up), -share)
        return scaled(found, norm_of(self.honest()) / norm_of(found))


Poison = Callable[[Poisoner], Weights]


def poisons_its_own_cluster(turn: Poisoner) -> Weights:
    return turn.mixed(1 - turn.block, turn.block, 0.3)


def poisons_the_other_cluster(turn: Poisoner) -> Weights:
    return turn.mixed(turn.block, 1 - turn.block, 0.3)


@dataclass
class PoisonedEnding:
    losses: list[tuple[float, ...]] = field(default_factory=list)
    """After each round, of each kind."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """On the attackers' updates."""
    honest_refused: Counter[str] = field(default_factory=Counter)

    def worst_rise_over(self, alone: PoisonedEnding) -> float:
        pairs = zip(self.losses, alone.losses, strict=True)
        return max(mine - theirs for one, other in pairs for mine, theirs in zip(one, other, strict=True))


def _moved_on(client: Client, block: int, version: int) -> bool:
    return client.block(block).head_version > version


def poisoned_campaign(
    folder: Path,
    seed: int,
    rounds: int,
    honest: int,
    poison: Poison | None = None,
    judge: str = "coordinator",
) -> PoisonedEnding:
    """Some rounds of `honest` workers at each block and, with `poison`, an attacker at each."""
    dataset = two_kinds(folder / "set")
    data = f'{{ dataset = "{folder}/set", own_share = 0.75 }}'
    recipe = RECIPE.format(seed=seed, judge=judge)
    values = resolve_recipe(tomllib.loads(f"{recipe}\ndata = {data}\n"))
    training, ending = Specialists(values, dataset), PoisonedEnding()
    program = Program(folder, recipe=recipe, data=data)
    clients: list[Client] = []
    try:
        for _ in range(BLOCKS * (honest + (poison is not None))):
            clients.append(Client(program.url, time.time))
            clients[-1].join()
        attackers = clients[BLOCKS * honest :]
        for round_ in range(rounds):
            # Asked one after another, they spread over both blocks and stay there.
            leases = [(client, client.lend()) for client in clients]
            sent = []
            for client, lease in reversed(leases):
                base = client.snapshot(lease.block, lease.base_hash)
                turn = Poisoner(training, lease.block, base, lease.shard, lease.first_step)
                delta = poison(turn) if poison is not None and client in attackers else turn.honest()
                sent.append((client, client.encoded(delta)))
                client.deliver_payload(lease, sent[-1][1])
            for client, payload in sent:
                reason = str(client.verdict_on(payload).reason)
                if client in attackers:
                    ending.verdicts[reason] += 1
                elif reason not in ("on_time", "carried"):
                    ending.honest_refused[reason] += 1
            watch = clients[0]
            for block in range(BLOCKS):
                until("the merge", partial(_moved_on, watch, block, round_))
            heads = [watch.snapshot(block, watch.block(block).head_hash) for block in range(BLOCKS)]
            ending.losses.append(training.losses(heads))
    finally:
        for client in clients:
            client.close()
        program.kill()
    return ending
