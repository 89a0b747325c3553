"""The coordinator as one object: its parts, its threads, its opening and its end.

Opening reads and writes; constructing does not. Everything that must survive is in the store and the
blobs, so a coordinator may be killed at any moment and opened again on the same data directory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from sqlalchemy import select
from torch import nn

from blocktrain.config import Recipe
from blocktrain.coordinator.admission import Admission
from blocktrain.coordinator.assignments import Assignments
from blocktrain.coordinator.judging import Judging
from blocktrain.coordinator.operator_notes import KEY_FILE, Display
from blocktrain.coordinator.published_text import publish
from blocktrain.coordinator.reports import Reports
from blocktrain.coordinator.resources import Resources
from blocktrain.coordinator.rounds import Rounds
from blocktrain.coordinator.run import finish_run, open_run, refuse_another_run
from blocktrain.coordinator.scoring import Scoring
from blocktrain.coordinator.storage.blobs import Blobs, snapshot_key
from blocktrain.coordinator.storage.nonces import Nonces
from blocktrain.coordinator.storage.store import BlockRow, RunRow, Store
from blocktrain.coordinator.updates import Updates
from blocktrain.coordinator.workers import Workers
from blocktrain.data.dataset import RunText
from blocktrain.errors import UserError
from blocktrain.files import locked_file
from blocktrain.threads import Threads
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.identity import load_or_create
from blocktrain.wire.messages import OperatorAnswer, StatusAnswer

DATABASE_FILE = "coordinator.sqlite"
LOCK_FILE = "coordinator.lock"
SWEEP_SECONDS = 60.0
PATIENCE_SECONDS = 5.0
POLL_SECONDS = 0.5
"""How soon a deadline is noticed; what arrives here, or in another process, wakes the threads at once."""


class Coordinator:
    def __init__(
        self,
        resources: Resources,
        scoring: Scoring | None,
        scorer: Scorer | None,
        data_dir: Path,
        display: Display,
    ) -> None:
        run = resources.run
        self.resources, self.display, self.metrics = resources, display, resources.metrics
        self.admission = Admission(run, resources.secret, data_dir)
        self.assignments = Assignments(resources, self.admission)
        self.workers = Workers(resources)
        self.updates = Updates(resources)
        self.reports = Reports(resources, display)
        self.judging = Judging(resources, scorer)
        self.rounds = Rounds(resources, self.judging)
        self.nonces = Nonces(resources.store)
        self._scoring = scoring
        self._stop = threading.Event()
        self._threads = Threads(self._stop)
        self._merging: threading.Thread | None = None

    @property
    def draining(self) -> bool:
        return self._stop.is_set()

    def drain(self) -> None:
        """Finish what is under way and begin nothing new; a signal handler may call it."""
        self._stop.set()
        self.resources.store.tell_watchers()  # event streams wait for a change, and then see that it ends

    def start(self) -> None:
        """Begin to close rounds, judge and score in the background."""
        # SQLite's lock file says that no other process serves this run; on PostgreSQL claims may be alive.
        if self.resources.store.is_sqlite:
            self.rounds.forget_claims()
            self.updates.give_up_lost()
        repeat = partial(self._threads.repeat, failed=self.metrics.failed, pause_seconds=POLL_SECONDS)
        changes, judge = self.resources.changes, self.resources.run.recipe.trust.judge
        if judge == "coordinator":
            self._threads.start("heads", self.rounds.load_heads)
        if not self.resources.store.is_sqlite:
            hear = partial(self.resources.store.hear, changes.notify, self._stop)
            repeat("listening", hear)
        self._merging = repeat("rounds", self.rounds.close_due, changes=changes)
        repeat("nonces", self.sweep, pause_seconds=SWEEP_SECONDS)
        self.resources.unneeded.find(self.resources.clock())
        repeat("payloads", self.resources.unneeded.delete_next, changes=changes)
        # Low priority: on a small host requests and merges go first.
        if self._scoring is not None:
            repeat("scoring", self._scoring.score_due, low_priority=True)
        if judge == "coordinator":
            repeat("judge", self.judging.judge_next, changes=changes, low_priority=True)

    def stop(self) -> None:
        """A merge under way is finished; a long evaluation is left: the next process repeats it."""
        self._stop.set()
        self.resources.changes.notify()
        # Without a limit: cut in the middle, the merge would be repeated by the next process (correct, but
        # late).
        if self._merging is not None:
            self._merging.join()
        self._threads.join(PATIENCE_SECONDS)
        self.rounds.shut_down()
        self.resources.store.close()

    def status(self) -> StatusAnswer:
        return self.reports.status(self.metrics.traffic("up"), self.metrics.traffic("down"))

    def finish(self) -> OperatorAnswer:
        """The operator ends the run here: what the blocks have now is its result."""
        resources = self.resources
        with resources.store.write() as session:
            receipt = finish_run(session, resources.run, resources.ledger, resources.clock())
            stored = session.scalars(select(RunRow.recipe)).one()
        resources.run.follow(stored)
        resources.changes.notify()
        return OperatorAnswer(receipt=receipt)

    def sweep(self) -> bool:
        """Forget old nonces and uploads nobody spoke of again; follow what other processes changed."""
        self.nonces.forget_old(self.resources.clock())
        with self.resources.store.read() as session:
            stored = session.scalars(select(RunRow.recipe)).one()
        self.resources.run.follow(stored)
        self.resources.unneeded.sweep_uploads(self.resources.clock())
        return False


def in_use(data_dir: Path) -> str:
    return (
        f"another coordinator is using {data_dir}; stop it, choose another --data-dir, or share a run "
        "between processes with --database postgresql://…"
    )


@contextmanager
def opened(
    recipe: Recipe,
    text: RunText,
    data_dir: Path,
    *,
    database_url: str | None = None,
    blobs_url: str | None = None,
    clock: Callable[[], float] = time.time,
    scoring: bool = True,
    display: Display | None = None,
    threads: bool = True,
    start: Sequence[nn.Module] | None = None,
) -> Iterator[Coordinator]:
    """A coordinator on this data directory, its threads running; stopped at the end. Without `threads` the
    caller closes rounds and judges by hand (`rounds.close_due()`, `judging.judge_next()`). `start` are the
    blocks that a new run begins from, instead of its seed."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot use --data-dir {data_dir}: {error.strerror}; name another folder") from None
    alone = locked_file(data_dir / LOCK_FILE, in_use(data_dir))
    database = database_url or f"sqlite:///{(data_dir / DATABASE_FILE).absolute()}"
    # SQLite takes one process.
    with alone if database_url is None else nullcontext(), closing(Store(database)) as store:
        identity = load_or_create(data_dir / KEY_FILE)
        refuse_another_run(store, identity, recipe, text)
        store.migrate()
        with store.read() as session:
            heads = session.execute(select(BlockRow.block, BlockRow.head_hash)).all()
        # A host that goes from a laptop to a database would else begin from nothing and not be told.
        if not heads and database_url is not None and (data_dir / DATABASE_FILE).exists() and start is None:
            raise UserError(
                f"{data_dir} has a run on SQLite, and the database has none: a run stays in the database it "
                f"began in; to go on with its model, name another --data-dir and --from {data_dir}"
            )
        blobs = Blobs.from_url(blobs_url or str(data_dir / "blobs"))
        for block, head in heads:
            # Of two processes with stores of their own, each would miss what the other has.
            if blobs.size(snapshot_key(head)) is None:
                raise UserError(
                    f"the newest snapshot of block {block} is not in {blobs_url or data_dir / 'blobs'}; name "
                    "the store of the run with --blobs, the same for all of its processes, or put it back"
                )
        run = open_run(store, blobs, identity, recipe, text, clock(), start)
        resources = Resources(run, store, blobs, identity, clock, text=publish(text, data_dir, blobs))
        recipe = run.recipe
        # Judges elsewhere bring their own; the guard of a merge is the coordinator's in any case.
        trust, display = recipe.trust, display or Display()
        judges = trust.judge == "coordinator" or (trust.judge == "external" and trust.guard)
        coordinator = Coordinator(
            resources,
            Scoring(resources, text, display) if scoring else None,
            Scorer(recipe, text) if judges else None,
            data_dir,
            display,
        )
        coordinator.nonces.load()
        if threads:
            coordinator.start()
        try:
            yield coordinator
        finally:
            coordinator.stop()
