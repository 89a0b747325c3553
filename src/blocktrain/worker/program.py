"""The worker program: joins a run, trains what it is lent, and ends cleanly.

The main thread trains. Beside it run asking and heartbeats (`asking`), sending (`sending`) and one watcher
per block (`watching`). They meet in `WorkerLogic` and its `BlockProgress`es alone. A stop request reaches the
trainer between two steps, and what it had done since its last update is kept as error feedback.
"""

from __future__ import annotations

import contextlib
import math
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from blocktrain.client.cache import BlobCache
from blocktrain.client.coordinator import CoordinatorClient
from blocktrain.client.run import Layout, load_run_text, run_setup
from blocktrain.client.snapshots import Snapshots
from blocktrain.client.texts import FetchedText
from blocktrain.client.traffic import Spent, Traffic
from blocktrain.config import Recipe
from blocktrain.data.batches import Drawing, open_batches
from blocktrain.data.dataset import RunText
from blocktrain.errors import BlocktrainError, StoppedError, UserError
from blocktrain.threads import Stopped, Threads
from blocktrain.training.device import HOST, device_label
from blocktrain.training.memory import block_needs, check_fits, free_memory, usable_memory
from blocktrain.training.ranks import ALONE, Ranks, check_share
from blocktrain.training.setup import Setup
from blocktrain.wire import messages
from blocktrain.wire.identity import load_or_create
from blocktrain.wire.messages import JoinRequest, RunAnswer
from blocktrain.worker.asking import Asking, FrozenSnapshots
from blocktrain.worker.block_progress import BlockProgress, PendingState, PendingUpdate
from blocktrain.worker.joining import Membership
from blocktrain.worker.live_view import PlainView, open_view
from blocktrain.worker.logic import TICK_SECONDS, WorkerLogic, may_step, own_steps
from blocktrain.worker.sending import Sending
from blocktrain.worker.shifts import Contribution
from blocktrain.worker.state import StateFolder, saving_is_due
from blocktrain.worker.training import LocalTraining
from blocktrain.worker.watching import Watching

GOODBYE_SECONDS = 5.0
"""How long a stopping worker lets a running transfer finish."""
LOSS_SECONDS = 0.5
"""How often the loss is read; reading it waits for a GPU."""
OPTIMIZER_SAVING_SECONDS = 120.0
"""The trainer pauses while its state is copied; and state two minutes old is about as good, because the
momenta forget within some twenty steps."""


@dataclass(frozen=True)
class WorkerOptions:
    coordinator: str
    data_dir: Path
    key: Path | None = None
    device: torch.device = torch.device("cpu")
    cache_bytes: int = 4_000_000_000
    """Everything it keeps in `data_dir`, of all runs together."""
    corpus: str | None = None
    """Where the run's text lies on this machine, if not where the recipe says."""
    invite: str | None = None
    """Token from the operator, where the run asks for one."""
    label: str = ""
    """A name for people, shown on the coordinator's dashboard."""
    max_up: float | None = None
    """Bytes per second that it may send; None has no limit."""
    max_down: float | None = None
    max_memory: int | None = None
    """Bytes of device memory that training may take; None has no limit. It takes blocks that fit only."""
    ranks: Ranks = ALONE
    """This process and those that train with it; it is the first of them."""
    shard: bool | None = None
    """Whether the ranks hold parts of a block; None: where it does not fit one device."""


def run_worker(
    options: WorkerOptions, stop: threading.Event, contribution: Contribution | None = None
) -> None:
    """Train until the run is finished or `stop` is set; what was given is added to `contribution`."""
    given = contribution or Contribution()
    try:
        TypeAdapter(messages.Label).validate_python(options.label)
    except ValidationError:
        raise UserError(
            f"--label {options.label!r}: expected at most 64 letters, digits, spaces and . _ : ( ) / @ + -"
        ) from None
    identity = load_or_create(options.key or options.data_dir / "key.pem")
    traffic = Traffic(max_up=options.max_up, max_down=options.max_down)
    with contextlib.suppress(Stopped), open_view(identity.worker_id, traffic) as view:
        client = CoordinatorClient(options.coordinator, identity, traffic, stop, view.line)
        with client:
            with stop_is_an_error(stop, f"{client.url} had answered"):
                run = client.run()
            client.audience = run.run_id
            setup = run_setup(run.recipe, run.vocabulary)
            told_memory, sharded = memory_to_tell(options, setup)
            ranks = options.ranks.sharing(sharded)
            check_share(setup.recipe, ranks)
            folder = options.data_dir / run.run_id[:16]
            cache = BlobCache(folder / "cache", options.cache_bytes, options.data_dir)
            state = StateFolder(folder, view.line, cache)
            with state.locked():
                text: RunText
                if options.corpus is None and run.dataset is not None:
                    text = FetchedText(client, run, cache, view.line)
                else:
                    text = load_run_text(setup, run, options.corpus)
                with ranks.together():
                    ranks.tell("join", recipe=run.recipe, vocabulary=run.vocabulary, sharded=sharded)
                worker = Worker(
                    options, told_memory, client, view, state, cache, setup, text, run, given, ranks
                )
                try:
                    worker.train()
                finally:
                    worker.close()
                    given.computing_seconds += traffic.seconds()[Spent.COMPUTING.value]
                    given.bytes_up += sum(traffic.bytes_of("up").values())
                    given.bytes_down += sum(traffic.bytes_of("down").values())
                    given.text_bytes += traffic.text_bytes


@contextlib.contextmanager
def stop_is_an_error(stop: threading.Event, what: str) -> Iterator[None]:
    """Raise StoppedError if the body is stopped: until it has joined, a worker has done nothing that it was
    asked for. Later a stop is a clean end."""
    with contextlib.suppress(Stopped):
        if not stop.is_set():
            yield
            return
    raise StoppedError(f"stopped before {what}")


def memory_to_tell(options: WorkerOptions, setup: Setup) -> tuple[int | None, bool]:
    """What the coordinator is told of the device's memory: it lends blocks that fit. None: as much as any
    block takes. And whether the ranks must hold parts of a block to fit it. A device that has no room for the
    smallest block is refused here."""
    device, size = options.device, options.ranks.size
    needs = partial(block_needs, setup.recipe, setup.objective)
    usable = usable_memory(device, options.max_memory)
    if usable is not None and device.type == "cpu":
        usable //= size  # ranks share their machine's
    own = needs(device.type, ranks=size)
    takes_others = any(map(setup.objective.frozen, range(setup.recipe.model.blocks)))
    if options.shard is None:
        sharded = size > 1 and usable is not None and max(own) > usable and not takes_others
    else:
        sharded = size > 1 and options.shard
    if sharded and takes_others:
        raise UserError(
            "--shard: the blocks of this run train beside frozen ones, which stay whole; leave it out"
        )
    if sharded:
        own = needs(device.type, ranks=size, sharded=True)
    check_fits(setup.recipe, min(own), usable, device)
    # The coordinator counts what a block needs on one GPU.
    told = needs("cuda") if size > 1 else []
    if usable is not None and (usable < max(own) or options.max_memory is not None):
        fitting = [need for need, mine in zip(told, own, strict=False) if mine <= usable]
        return max(fitting, default=usable), sharded
    # A GPU's size is of interest on the dashboard too; of the host's memory others have a part.
    total = free_memory(device)[1] if device.type == "cuda" else None
    return None if total is None else max([total, *told]), sharded


def bring_text(recipe: Recipe, text: RunText, assignment: messages.Assignment) -> None:
    """Fetch the text of an assignment, and of the steps in it for another, ahead of its first step."""
    if isinstance(text, FetchedText):
        shards = [assignment.shard] + ([] if assignment.stand_in is None else [assignment.stand_in.shard])
        for shard in shards:
            place = shard, assignment.first_step, assignment.block
            for files in Drawing.of(recipe).files(text.manifest, *place):
                text.bring(files)


class Worker:
    def __init__(
        self,
        options: WorkerOptions,
        told_memory: int | None,
        client: CoordinatorClient,
        view: PlainView,
        state: StateFolder,
        cache: BlobCache,
        setup: Setup,
        text: RunText,
        run: RunAnswer,
        given: Contribution,
        ranks: Ranks,
    ) -> None:
        self.given = view.given = given
        self.client, self.view, self.state, self.traffic = client, view, state, client.traffic
        self.stop, device = client.stop, options.device
        batches = open_batches(setup.recipe, text, device if ranks.alone else HOST)
        self.training = LocalTraining(setup, batches, setup.codebook().to(device), device, ranks)
        self.logic = WorkerLogic(setup.recipe.swarm, self.stop, state.load_last_block())
        self.threads = Threads(self.stop)
        layouts = [Layout.of(layout) for layout in run.blocks]
        self.snapshots = Snapshots(client, cache, setup, layouts, view.line)
        request = JoinRequest(
            corpus_sha256=run.corpus_sha256,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            device=device_label(device, ranks.size),
            label=options.label,
            memory_bytes=told_memory,
            invite=options.invite,
        )
        worker_id = client.identity.worker_id
        self.membership = Membership(client, request, state, view)
        self.watching = Watching(self.logic, self.threads, worker_id, self.snapshots, state, view)
        frozen = FrozenSnapshots(self.watching.keeper, self.logic)
        fetch_text = partial(bring_text, setup.recipe, text)
        self.asking = Asking(self.logic, client, self.membership, self.watching, frozen, view, fetch_text)
        self.sending = Sending(self.logic, client, self.membership, self.snapshots, state, view)
        self._optimizer_saved_at: float | None = None
        self._optimizer_saving_seconds = 0.0
        self._before_first_step: dict[str, float] = {}

    # --- training

    def train(self) -> None:
        with stop_is_an_error(self.stop, f"joining {self.client.url}"):
            self.membership.join()
        # Before the first assignment: its error feedback depends on what becomes of these.
        for layout in self.snapshots.layouts:
            self.sending.deliver_leftovers(layout.block)
        self.threads.start("asking", self.asking.run)
        self.threads.start("heartbeats", self.asking.run_heartbeats)
        self.threads.start("sending", self.sending.run)
        logic = self.logic
        while not self.stop.is_set():
            with self.traffic.spending(Spent.WAITING):
                logic.wait(lambda: logic.next is not None or logic.run_is_finished)
            if self.stop.is_set():
                break
            update = logic.begin_next(time.monotonic())
            if update is not None:
                self._train_assignment(update)
            elif logic.run_is_finished:
                break
        self.threads.check()

    def _train_assignment(self, update: PendingUpdate) -> None:
        """All steps of an assignment, unless it is cancelled or the worker stops."""
        assignment, progress, training = update.assignment, self.logic.blocks[update.block], self.training
        assert assignment is not None
        if training.progress is not progress:
            with self.traffic.spending(Spent.WAITING):
                # Leave a block with everything it needs to be taken up again, and begin another.
                self._leave_block()
                self.state.save_last_block(update.block)
                training.begin(progress, assignment.total_steps, self.state.load_optimizer(update.block))
        training.start(update, update.frozen)
        self.view.assigned(update.block, update.round, assignment.steps, assignment.reason)
        self._before_first_step = self._before_first_step or self.traffic.seconds()
        started = read_at = time.monotonic()
        waited = 0.0
        while update.step < assignment.steps and self._goes_on(update):
            before = time.monotonic()
            if not may_step(
                step=update.step,
                steps=own_steps(assignment),
                version=progress.base.version,
                round_=update.round,
                run_ahead=self.logic.swarm.run_ahead,
            ):
                self.logic.wait(lambda: progress.base.version >= update.round, TICK_SECONDS)
                waited += time.monotonic() - before
                continue
            # Between two steps, where nobody else touches the weights.
            if training.pick_up_move(update):
                waited += time.monotonic() - before
            loss = training.step(update)
            if time.monotonic() - read_at >= LOSS_SECONDS:
                update.loss = float(loss) if torch.isfinite(loss) else None
                read_at = time.monotonic()
            self.view.stepped(update.step, update.loss)
        # A cancellation that comes after this line is seen by `_finish`, under the lock.
        mean_loss = training.mean_loss(update) if self._goes_on(update) else None
        self.given.steps += update.step
        self.traffic.add_seconds(Spent.COMPUTING, time.monotonic() - started - waited)
        self.traffic.add_seconds(Spent.WAITING, waited)
        if mean_loss is None:
            return
        if math.isfinite(mean_loss):
            with self.traffic.spending(Spent.WAITING):
                self._finish(progress, update, mean_loss)
        else:
            # NaN in the weights spreads to every merge: take the snapshot again, with fresh optimizer state.
            self.view.line(f"diverged block={update.block} round={update.round}; starting over")
            self.client.let_go(update.assignment_id)
            self.logic.cancel(update)
            training.begin(progress, assignment.total_steps)

    def _goes_on(self, update: PendingUpdate) -> bool:
        return update.state is PendingState.ASSIGNED and not self.stop.is_set()

    def _finish(self, progress: BlockProgress, update: PendingUpdate, loss: float) -> None:
        weights = self.training.weights()  # copied from the device before anybody has to wait for it
        with self.logic.changed:
            if update.state is not PendingState.ASSIGNED:
                return  # a heartbeat cancelled it after its last step
            progress.finish(update, weights, loss)
            self.logic.trained(update)
        now = time.monotonic()
        if saving_is_due(
            now=now,
            saved_at=self._optimizer_saved_at,
            cost_seconds=self._optimizer_saving_seconds,
            least_seconds=OPTIMIZER_SAVING_SECONDS,
        ):
            self._optimizer_saved_at = now
            state = self.training.optimizer_state()
            self.threads.start("saving", partial(self._save_optimizer, update.block, state))

    def _save_optimizer(self, block: int, state: dict[str, Tensor]) -> None:
        start = time.monotonic()
        self.state.save_optimizer(block, state)
        self._optimizer_saving_seconds = time.monotonic() - start

    def _leave_block(self) -> None:
        progress = self.training.progress
        if progress is not None:
            progress.abandon(self.training.weights())
            self.state.save_progress(progress)
            self.state.save_optimizer(progress.block, self.training.optimizer_state())

    # --- the end

    def close(self) -> None:
        """Let a running transfer finish, keep what was not sent, hand the leases back."""
        if not self.stop.is_set():
            self.logic.wait(self.logic.is_idle, GOODBYE_SECONDS)
        self.stop.set()
        with self.logic.changed:
            self.logic.changed.notify_all()
        self.threads.join(GOODBYE_SECONDS)
        handed_back = [update.assignment_id for update in self.logic.leases()]
        self._leave_block()
        if self.training.progress is not None:
            self.watching.keeper.save(self.training.progress.block, self.training.progress.base)
        for update in self.logic.drop_unsent():
            self.state.save_progress(self.logic.blocks[update.block])
            handed_back.append(update.assignment_id)
        for assignment_id in handed_back:
            with contextlib.suppress(BlocktrainError):
                self.client.hand_back(assignment_id)
                self.view.line(f"handed back assignment={assignment_id[:12]}")
        seconds = self.traffic.seconds()
        steady = {what: value - self._before_first_step.get(what, value) for what, value in seconds.items()}
        self.state.save_report(
            {
                "worker_id": self.client.identity.worker_id,
                "seconds": seconds,
                "steady_seconds": steady,
                "up": self.traffic.bytes_of("up"),
                "down": self.traffic.bytes_of("down"),
                "text_bytes": self.traffic.text_bytes,
                "verdicts": dict(self.view.verdicts),
            }
        )
