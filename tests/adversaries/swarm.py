"""A real coordinator process with SQLite, and clients that speak to it over HTTP, honest or not.

One block of a small model, judged and guarded as by default. Deltas are trained before they are asked for
(shards are lent in order, so a client knows which it will get): deadlines can be short and nothing waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from blocktrain.config import DataConfig, Recipe, find_recipe, load_recipe
from blocktrain.data.corpora import load_corpus
from blocktrain.training.update import Weights
from blocktrain.wire.codec import Tensors, decode, encode
from blocktrain.wire.hashing import content_hash
from blocktrain.wire.identity import Identity
from blocktrain.wire.messages import Assignment, BlockAnswer, Outcome, Verdict, WorkersAnswer, WorkerSummary
from tests.adversaries.training import Training
from tests.coordinator.peer import Peer
from tests.coordinator.program import Program
from tests.waiting import PATIENCE_SECONDS, until

torch.set_num_threads(1)

TEXT_BYTES = 400_000
FAR_AWAY = "127.0.0.2"
"""Another address of this machine: loopback has sixteen million."""

RECIPE = """
name = "attacked"
seed = {seed}
model = {{ {shape}, blocks = 1 }}
training = {{ batch = {batch}, {rates}, reference = false }}
evaluation = {{ max_bytes = 2000, pooling_bytes = 1000, noise_draws = 1, batch = 64 }}

swarm.steps_per_round = {steps}
swarm.rounds = {rounds}
swarm.replicas = {replicas}
swarm.stand_in = 0
swarm.lease_seconds = {lease}
swarm.codec = "{codec}"
swarm.min_deadline_seconds = {shortest}
swarm.max_deadline_seconds = {deadline}
swarm.evaluate_every_seconds = 3600.0
trust.stamp_bits = {stamp_bits}
trust.probation_verdicts = 2
trust.judge = "{judge}"
"""


@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and how its updates travel."""

    shape: str
    rates: str
    codec: str


@cache
def size_named(name: str) -> Size:
    """`suite`, a block that trains in a blink, or `demo`, a block of recipes/demo.toml."""
    if name == "suite":
        shape = "width = 32, heads = 2, layers_per_block = 1, context = 64, condition_width = 8"
        return Size(shape, "warmup_steps = 5, matrix_lr = 1e-3, other_lr = 1e-3", "sparse:512")
    recipe = load_recipe(find_recipe(name), ())
    shapes = ("width", "heads", "layers_per_block", "context", "condition_width")
    rates = ("warmup_steps", "matrix_lr", "other_lr")
    shape, rate = (
        ", ".join(f"{key} = {getattr(section, key)}" for key in keys)
        for section, keys in ((recipe.model, shapes), (recipe.training, rates))
    )
    return Size(shape, rate, recipe.swarm.codec)


@cache
def text() -> bytes:
    return load_corpus(DataConfig(corpus="builtin", max_bytes=TEXT_BYTES), 1000).train


@cache
def fresh_text() -> bytes:
    """Text of the same kind that is in no run of the suite."""
    return load_corpus(DataConfig(corpus="builtin", max_bytes=TEXT_BYTES), 1000).valid[:40_000]


@cache
def attackers_text() -> bytes:
    """Text of the same kind that only attackers have."""
    return load_corpus(DataConfig(corpus="builtin", max_bytes=TEXT_BYTES), 1000).valid[40_000:200_000]


@cache
def judges_text() -> bytes:
    """Text of the same kind that only the judge has, where `Settings.private` says so."""
    return load_corpus(DataConfig(corpus="builtin", max_bytes=TEXT_BYTES), 1000).valid[200_000:240_000]


PATIENT_SECONDS = max(600.0, PATIENCE_SECONDS)
"""Deadline and lease of runs whose rounds end when everybody has delivered. One process plays all workers:
honest ones are silent while attackers compute, which at a load of 17 took longer than a lease of 30 s."""
SHORTEST_SECONDS = 30.0
"""After this a round in which every update was refused may be tried again. Nothing is computed between the
first lease of a round and its last update, so no update comes that late."""


@dataclass(frozen=True)
class Settings:
    """What differs between the runs of the suite."""

    seed: int = 1
    steps: int = 30
    batch: int = 32
    deadline: float = 12.0
    replicas: int = 1
    lease: float = 30.0
    stamp_bits: int = 0
    private: bool = False
    """Whether the judge has text of its own (`trust.private_text`)."""
    judge: str = "coordinator"
    """With "off" every update counts, and equal runs differ by the order of sums only."""
    rounds: int = 24
    """Of the schedule; attacks may last fewer."""
    shortest: float = SHORTEST_SECONDS
    size: str = "suite"

    @property
    def recipe_text(self) -> str:
        size = size_named(self.size)
        values = {**dataclasses.asdict(size), **dataclasses.asdict(self)}
        return RECIPE.format(**values | {"shortest": min(self.deadline, self.shortest)})


@cache
def training_of(settings: Settings, folder: Path) -> Training:
    """Shared by all runs of the same settings, so that what one has trained the others have too."""
    (folder / "text.txt").write_bytes(text())
    path = folder / "recipe.toml"
    path.write_text(f'{settings.recipe_text}\ndata = {{ corpus = "{folder}/text.txt" }}\n')
    recipe = load_recipe(path, ())
    return Training(recipe, load_corpus(recipe.data, recipe.evaluation.pooling_bytes))


class Client(Peer):
    """A worker's side of the protocol; what it sends is up to who drives it."""

    def head(self) -> BlockAnswer:
        return self.block(0)

    def encoded(self, delta: Tensors) -> bytes:
        return encode(self.codec, self.schema(0), {name: delta[name] for name, _ in self.schema(0).tensors})

    def decoded(self, payload: bytes) -> Weights:
        return dict(decode(self.codec, self.schema(0), payload))

    def deliver_payload(self, lease: Assignment, payload: bytes, base_hash: str | None = None) -> Verdict:
        """Commit and reveal; the verdict may still be pending."""
        return self.reveal(self.commit(lease, payload, base_hash), payload)

    def verdict_on(self, payload: bytes) -> Verdict:
        """Once a judge has spoken."""
        path = f"/v1/updates/{content_hash(payload)}/verdict"

        def known() -> Verdict | None:
            found = Verdict.model_validate_json(self.call("GET", path).content)
            return None if found.outcome is Outcome.PENDING else found

        return until("the verdict", known)

    def judged(self, lease: Assignment, delta: Tensors, base_hash: str | None = None) -> Verdict:
        payload = self.encoded(delta)
        first = self.deliver_payload(lease, payload, base_hash)
        return self.verdict_on(payload) if first.outcome is Outcome.PENDING else first


@dataclass
class Swarm:
    """One coordinator process and who talks to it."""

    program: Program
    training: Training
    folder: Path
    clients: list[Client] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return self.training.recipe

    def client(
        self,
        identity: Identity | None = None,
        *,
        join: bool = True,
        address: str | None = None,
        **joining: Any,
    ) -> Client:
        found = Client(self.program.url, time.time, identity, address)
        self.clients.append(found)
        if join:
            found.join(**joining)
        return found

    def base(self, client: Client) -> Weights:
        return client.snapshot(0, client.head().head_hash)

    def honest_delta(self, client: Client, shard: int) -> Weights:
        """What an honest worker on this shard sends in the open round."""
        head = client.head()
        steps = self.recipe.swarm.steps_per_round
        base = client.snapshot(0, head.head_hash)
        return self.training.delta(0, base, shard, head.head_version * steps, steps)

    def second_try(self, client: Client, round_: int) -> Assignment | None:
        """The open round once more, to a worker that was refused in it; None where it has ended meanwhile, as
        an update of the round before that came late may be merged alone. Until the round may be tried again
        the worker is lent the next one, which a heartbeat then calls off."""
        lease = client.lend_or_end()
        if lease is not None and lease.round > round_:
            early = lease

            def open_or_over() -> str | None:
                if client.head().head_version > round_:
                    return "over"
                return "open" if client.heartbeat(early).cancel else None

            if until(f"round {round_} to be open again, or over", open_or_over) == "open":
                lease = client.lend_or_end()
        return lease if lease is not None and lease.round == round_ else None

    def retried(self, client: Client, lease: Assignment, base: Weights) -> bytes:
        """Honest work on just what was lent, delivered."""
        payload = client.encoded(self.training.delta(0, base, lease.shard, lease.first_step, lease.steps))
        client.deliver_payload(lease, payload)
        return payload

    def merged_or_refused(self, version: int, sent: Sequence[tuple[Client, bytes]]) -> bool:
        """Whether the round that makes this version was merged; False where every update was refused. The
        guard may refuse what a judge let pass, so verdicts are read until one or the other is true."""

        def end() -> str | None:
            if sent[0][0].head().head_version >= version:
                return "merged"
            standing = (client.verdict_on(payload).outcome is not Outcome.REFUSED for client, payload in sent)
            return None if any(standing) else "refused"

        return until(f"version {version}, or no update for it", end) == "merged"

    def wait_for_version(self, client: Client, version: int) -> str:
        until(f"version {version}", lambda: client.head().head_version >= version)
        return client.head().head_hash

    def standing(self, client: Client) -> WorkerSummary:
        shown = WorkersAnswer.model_validate_json(client.get("/v1/workers").content)
        return next(one for one in shown.workers if one.worker_id == client.identity.worker_id)

    # --- the process ---

    @property
    def pid(self) -> int:
        assert self.program.process.pid is not None
        return self.program.process.pid

    def resident_mb(self, name: str = "VmRSS") -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024

    def forget_peak(self) -> None:
        """So that VmHWM is the peak from here on."""
        with contextlib.suppress(PermissionError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def log_text(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def swarm(folder: Path, settings: Settings, training: Training, state: Path | None = None) -> Iterator[Swarm]:
    """A coordinator on a new folder, or on a copy of another's state."""
    folder.mkdir(parents=True)
    if state is not None:
        shutil.copytree(state, folder / "data")
    recipe = settings.recipe_text
    if settings.private:
        (folder / "private.txt").write_bytes(judges_text())
        recipe += f'trust.private_text = "{folder}/private.txt"\n'
    program = Program(folder, recipe=recipe, text=text())
    running = Swarm(program, training, folder)
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        program.kill()


# --- a state to attack ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Warm:
    """A run in which two honest workers are established, and some who will turn out not to be honest."""

    settings: Settings
    training: Training
    state: Path
    honest: tuple[Identity, ...]
    sleepers: tuple[Identity, ...]
    """Established too: what they send is not refused for being a newcomer's."""
    next_hash: str
    """The snapshot after the next round where nobody attacks."""

    @contextmanager
    def swarm(self, folder: Path) -> Iterator[Swarm]:
        with swarm(folder, self.settings, self.training, self.state) as running:
            yield running


HONEST, SLEEPERS = 2, 4
WARM_ROUNDS = 2


def warmed_up(folder: Path, settings: Settings = Settings()) -> Warm:  # noqa: B008
    training = training_of(settings, folder)
    honest = tuple(Identity.generate() for _ in range(HONEST))
    sleepers = tuple(Identity.generate() for _ in range(SLEEPERS))
    with swarm(folder / "warm", settings, training) as running:
        workers = [running.client(identity) for identity in honest]
        for identity in sleepers:
            running.client(identity)
        for _ in range(WARM_ROUNDS):
            honest_round(running, workers)
        assert not any(running.standing(worker).probation for worker in workers)
    state = folder / "warm" / "data"
    _establish(state / "coordinator.sqlite", sleepers)
    with swarm(folder / "unattacked", settings, training, state) as running:
        next_hash = honest_round(running, [running.client(identity, join=False) for identity in honest])
    return Warm(settings, training, state, honest, sleepers, next_hash)


def _establish(database: Path, identities: Sequence[Identity]) -> None:
    """As if these had done good work so far."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for identity in identities:
            connection.execute(
                "UPDATE workers SET established = 1, standing = ? WHERE worker_id = ?",
                ('{"good": 3.0, "good_verdicts": 3, "verdicts": 3}', identity.worker_id),
            )


def honest_leases(running: Swarm, workers: Sequence[Client]) -> list[tuple[Client, Assignment, Weights]]:
    """Trained first, lent in order: worker n gets shard n."""
    deltas = [running.honest_delta(worker, shard) for shard, worker in enumerate(workers)]
    leases = [worker.lend() for worker in workers]
    assert [lease.shard for lease in leases] == list(range(len(workers)))
    return list(zip(workers, leases, deltas, strict=True))


def honest_round(running: Swarm, workers: Sequence[Client]) -> str:
    """One round in which everybody is honest; the snapshot it ends with."""
    version = workers[0].head().head_version
    for worker, lease, delta in honest_leases(running, workers):
        worker.deliver_payload(lease, worker.encoded(delta))
    return running.wait_for_version(workers[0], version + 1)
