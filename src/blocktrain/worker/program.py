"""The worker program: joins a run, wires trainer, desk, sender and watchers, and ends cleanly.

Threads meet only in `Standing` and `Desk`. The main thread trains; a stop request reaches it between two
steps, and what it had done since its last update is kept as error feedback.
"""

from __future__ import annotations

import contextlib
import math
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient, Refusal
from blocktrain.client.run import Layout, load_run_corpus, run_setup
from blocktrain.client.snapshots import Base, Snapshots
from blocktrain.client.traffic import Spent, Traffic
from blocktrain.data.corpora import Corpus
from blocktrain.data.shards import Shards
from blocktrain.errors import BlocktrainError, StoppedError, UserError
from blocktrain.threads import Stopped, Threads
from blocktrain.training.setup import Setup
from blocktrain.wire import messages
from blocktrain.wire.identity import load_or_create
from blocktrain.wire.messages import Account, JoinRequest, RunAnswer
from blocktrain.wire.tokens import find_stamp
from blocktrain.worker.decisions import OPTIMIZER_SAVING_SECONDS, saving_is_due
from blocktrain.worker.desk import Desk, Task
from blocktrain.worker.frozen import FrozenSnapshots
from blocktrain.worker.progress import Progress, make_progress
from blocktrain.worker.sender import Sender
from blocktrain.worker.standing import Standing
from blocktrain.worker.state import StateFolder
from blocktrain.worker.training import LocalTraining
from blocktrain.worker.watcher import Watcher

GOODBYE_SECONDS = 5.0
"""How long a stopping worker lets a running transfer finish."""


@dataclass(frozen=True)
class WorkerOptions:
    coordinator: str
    data_dir: Path
    key: Path | None = None
    device: torch.device = torch.device("cpu")
    cache_bytes: int = 4_000_000_000
    """Snapshots and payloads kept on disk."""
    corpus: str | None = None
    """Where the run's text lies on this machine, if not where the recipe says."""
    invite: str | None = None
    """Token from the operator, where the run asks for one."""
    label: str = ""
    """A name for people, shown on the coordinator's dashboard."""


def run_worker(options: WorkerOptions, stop: threading.Event) -> None:
    """Train until the run is finished or `stop` is set."""
    check_label(options.label)
    identity = load_or_create(options.key or options.data_dir / "key.pem")
    traffic = Traffic()
    with contextlib.suppress(Stopped), make_progress(identity.worker_id, traffic) as progress:
        client = CoordinatorClient(options.coordinator, identity, traffic, stop, progress.line)
        with contextlib.closing(client):
            with unless_stopped(stop, f"{options.coordinator} had answered"):
                run = client.run()
            client.audience = run.run_id
            setup = run_setup(run)
            corpus = load_run_corpus(setup, run, options.corpus)
            state = StateFolder(options.data_dir / run.run_id[:16], progress.line)
            with state.locked():
                worker = Worker(options, client, progress, stop, state, setup, corpus, run)
                try:
                    worker.train()
                finally:
                    worker.close()


def check_label(label: str) -> None:
    try:
        TypeAdapter(messages.Label).validate_python(label)
    except ValidationError:
        raise UserError(
            f"--label {label!r}: expected at most 64 letters, digits, spaces and . _ : ( ) / @ + -"
        ) from None


@contextlib.contextmanager
def unless_stopped(stop: threading.Event, what: str) -> Iterator[None]:
    """Until it has joined, a worker that is stopped has not done what it was asked for; later it has."""
    with contextlib.suppress(Stopped):
        if not stop.is_set():
            yield
            return
    raise StoppedError(f"stopped before {what}")


class Worker:
    def __init__(
        self,
        options: WorkerOptions,
        client: CoordinatorClient,
        progress: Progress,
        stop: threading.Event,
        state: StateFolder,
        setup: Setup,
        corpus: Corpus,
        run: RunAnswer,
    ) -> None:
        self.client, self.progress, self.stop, self.state = client, progress, stop, state
        self.traffic, self.identity, self.device = client.traffic, client.identity, options.device
        self.setup, self.recipe, self.corpus = setup, setup.recipe, corpus
        self.invite, self.label = options.invite, options.label
        self.threads = Threads(stop)
        self._standings: dict[int, Standing] = {}
        self._lock = threading.Lock()
        self._accounted: dict[str, float] = {}
        self._saved_at: float | None = None
        self._saving_seconds = 0.0
        self._before_first_step: dict[str, float] = {}
        self._build_training()
        self._build_services(run, options.cache_bytes)

    def _build_training(self) -> None:
        setup = self.setup
        text = setup.tokenizer.encode(self.corpus.train)
        shards = Shards.of(self.recipe, text, self.corpus.sha256, self.device)
        codebook = setup.codebook().to(self.device)
        self.training = LocalTraining(setup, shards, codebook, self.device)

    def _build_services(self, run: RunAnswer, cache_bytes: int) -> None:
        cache = BlobCache(self.state.folder / "cache", cache_bytes)
        layouts = [Layout.of(layout) for layout in run.blocks]
        self.snapshots = Snapshots(self.client, cache, self.setup, layouts, self.progress.line)
        self.sender = Sender(
            self.client,
            self.snapshots,
            self.state,
            self.progress,
            self.stop,
            self.recipe.swarm.error_feedback,
            self.account,
            self.join,
            lambda: self.desk.beat_now(),
        )
        self.desk = Desk(
            self.client,
            self.progress,
            self.stop,
            self.standing_in,
            FrozenSnapshots(self.snapshots, self.state, self._trained).bring,
            self.join,
            self.state.load_last_block(),
        )

    def join(self) -> None:
        try:
            answer = self.client.join(self._join_request())
        except Refusal as refusal:
            if refusal.reason != "stamp_required":
                raise
            answer = self.client.join(self._join_request(stamped=True))
        self.state.save_receipt(answer.receipt)
        self.progress.line(f"joined {self.client.url} worker={answer.worker_id} device={self.device}")

    def _join_request(self, stamped: bool = False) -> JoinRequest:
        asked = self.client.challenge() if stamped else None
        if asked is not None:
            self.progress.line(f"stamping bits={asked.bits}: some seconds of hashing, once")
        return JoinRequest(
            corpus_sha256=self.corpus.sha256,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            device=self.device.type,
            label=self.label,
            memory_bytes=_device_memory(self.device),
            challenge=asked.challenge if asked is not None else None,
            stamp=None if asked is None else find_stamp(asked.challenge, asked.bits, self.stop.is_set),
            invite=self.invite,
        )

    # --- training

    def train(self) -> None:
        with unless_stopped(self.stop, f"joining {self.client.url}"):
            self.join()
        for layout in self.snapshots.layouts:
            self.sender.deliver_leftovers(layout.block)
        self.threads.start("asking", self.desk.run_asking)
        self.threads.start("heartbeats", self.desk.run_heartbeats)
        self.threads.start("sending", self.sender.run)
        while (task := self._next_task()) is not None:
            self._do(task)
        self.threads.check()

    def _next_task(self) -> Task | None:
        with self.traffic.spending(Spent.WAITING):
            return self.desk.next()

    def _since_first_step(self) -> dict[str, float]:
        return {
            spent: seconds - self._before_first_step.get(spent, seconds)
            for spent, seconds in self.traffic.seconds().items()
        }

    def _do(self, task: Task) -> None:
        assignment, standing = task.assignment, task.standing
        if self.training.standing is not standing:
            with self.traffic.spending(Spent.WAITING):
                self._change_block(task)
        self.training.freeze(task.frozen)
        self.progress.assigned(assignment.block, assignment.round, assignment.steps, assignment.reason)
        self._before_first_step = self._before_first_step or self.traffic.seconds()
        started, waited = time.monotonic(), self.training.waiting_seconds
        loss = self.training.run(
            assignment,
            lambda step, ce: self.desk.stepped(task, step, ce),
            lambda: self.desk.going_on(task),
        )
        waited = self.training.waiting_seconds - waited
        self.traffic.add_seconds(Spent.COMPUTING, time.monotonic() - started - waited)
        self.traffic.add_seconds(Spent.WAITING, waited)
        if loss is not None and math.isfinite(loss):
            self._finish(task, loss)
        elif loss is not None:
            self._start_over(task)
        elif task.cancelled:
            self.desk.give_up(task)

    def _start_over(self, task: Task) -> None:
        """Weights that are no numbers help nobody: take the snapshot again, with fresh optimizer state."""
        block = task.assignment.block
        self.progress.line(f"diverged block={block} round={task.assignment.round}; starting over")
        with contextlib.suppress(BlocktrainError):
            self.client.hand_back(task.assignment.assignment_id)
        self.desk.give_up(task)
        self.training.begin(task.standing, task.assignment.total_steps, None)

    def _change_block(self, task: Task) -> None:
        """Leave a block with everything it needs to be taken up again, and begin another."""
        self._leave_block()
        block = task.assignment.block
        self.state.save_last_block(block)
        self.training.begin(task.standing, task.assignment.total_steps, self.state.load_optimizer(block))

    def _leave_block(self) -> None:
        standing = self.training.standing
        if standing is not None:
            standing.abandon(self.training.weights())
            self.sender.keep_feedback(standing)
            self.state.save_optimizer(standing.block, self.training.optimizer_state())

    def _finish(self, task: Task, loss: float) -> None:
        with self.traffic.spending(Spent.WAITING):
            flight = task.standing.finish(task.assignment, self.training.weights(), loss)
            self.sender.send(task.standing, flight)
            now = time.monotonic()
            if saving_is_due(
                now=now,
                saved_at=self._saved_at,
                cost_seconds=self._saving_seconds,
                least_seconds=OPTIMIZER_SAVING_SECONDS,
            ):
                self._saved_at = now
                state = self.training.optimizer_state()
                self.threads.start("saving", lambda: self._save_optimizer(task.standing.block, state))

    def _save_optimizer(self, block: int, state: dict[str, Tensor]) -> None:
        start = time.monotonic()
        self.state.save_optimizer(block, state)
        self._saving_seconds = time.monotonic() - start

    # --- standings

    def standing_in(self, block: int) -> Standing:
        """Where this worker stands in `block`; brings its snapshot if it is new here."""
        with self._lock:
            standing = self._standings.get(block)
        if standing is not None:
            return standing
        kept = self.state.load_snapshot_name(block)
        held = self.snapshots.on_disk(block, kept.version, kept.hash) if kept is not None else None
        base = self.snapshots.newest_for_joiner(block, held)
        feedback, _ = self.state.load_feedback(block)
        standing = Standing(block, base, feedback, self.recipe.swarm.max_age)
        with self._lock:
            self._standings[block] = standing
        self._watch(standing)
        return standing

    def _trained(self, block: int) -> Base | None:
        """The snapshot of a block that this worker stands in, if it does."""
        with self._lock:
            standing = self._standings.get(block)
        return None if standing is None else standing.base

    def _watch(self, standing: Standing) -> None:
        def retired() -> bool:
            with self._lock:
                done = standing.block not in self.desk.blocks() and not standing.flights()
                if done:
                    del self._standings[standing.block]
                return done

        watcher = Watcher(
            standing,
            self.identity.worker_id,
            self.snapshots,
            self.state,
            self.sender,
            self.progress,
            retired,
        )
        self.threads.start(f"watching-{standing.block}", lambda: watcher.run(self.stop))

    # --- accounts and the end

    def account(self) -> Account:
        """What was spent since the last account."""
        totals = _totals(self.traffic)
        spent = {key: value - self._accounted.get(key, 0) for key, value in totals.items()}
        self._accounted = totals
        return Account(
            seconds_computing=spent["computing"],
            seconds_transferring=spent["transferring"],
            seconds_waiting=spent["waiting"],
            up=messages.Traffic(**_part(spent, "up.")),
            down=messages.Traffic(**_part(spent, "down.")),
        )

    def close(self) -> None:
        """Let a running transfer finish, keep what was not sent, hand the leases back."""
        if not self.stop.is_set():
            self.sender.wait_until_idle(GOODBYE_SECONDS)
        self.stop.set()
        with self._lock:
            standings = list(self._standings.values())
        for standing in standings:
            standing.close()
        self.threads.join(GOODBYE_SECONDS)
        self._hand_back(self.desk.leases() + self._keep_progress())
        self._write_report()

    def _keep_progress(self) -> list[str]:
        """Write everything down; returns assignments whose updates were given up."""
        self._leave_block()
        standing = self.training.standing
        if standing is not None:
            self.snapshots.keep(standing.base)
            self.state.save_snapshot_name(standing.block, standing.base.version, standing.base.hash)
        return self.sender.abandon()

    def _hand_back(self, leases: Sequence[str]) -> None:
        for lease in leases:
            with contextlib.suppress(BlocktrainError):
                self.client.hand_back(lease)
                self.progress.line(f"handed back assignment={lease[:12]}")

    def _write_report(self) -> None:
        self.state.save_report(
            {
                "worker_id": self.identity.worker_id,
                "seconds": self.traffic.seconds(),
                "steady_seconds": self._since_first_step(),
                "up": self.traffic.bytes_up(),
                "down": self.traffic.bytes_down(),
                "verdicts": dict(self.progress.doing.verdicts),
            }
        )


def _device_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _totals(traffic: Traffic) -> dict[str, float]:
    totals: dict[str, float] = dict(traffic.seconds())
    totals |= {f"up.{kind}": num_bytes for kind, num_bytes in traffic.bytes_up().items()}
    totals |= {f"down.{kind}": num_bytes for kind, num_bytes in traffic.bytes_down().items()}
    return totals


def _part(values: dict[str, float], prefix: str) -> dict[str, int]:
    return {key.removeprefix(prefix): int(value) for key, value in values.items() if key.startswith(prefix)}
