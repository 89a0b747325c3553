"""The coordinator as one object: its parts, its threads, its opening and its end.

Opening reads and writes; constructing does not. Everything that must survive is in the store and the
blobs, so a coordinator may be killed at any moment and opened again on the same data directory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from sqlalchemy import delete
from sqlalchemy.exc import IntegrityError

from blocktrain.config import Recipe, TrustConfig
from blocktrain.coordinator.admission import Door
from blocktrain.coordinator.assignments import Assignments
from blocktrain.coordinator.context import Context
from blocktrain.coordinator.judging import Judging
from blocktrain.coordinator.metrics import Metrics
from blocktrain.coordinator.operator_notes import Display
from blocktrain.coordinator.refusals import Refusal
from blocktrain.coordinator.reports import Reports
from blocktrain.coordinator.rounds import Rounds
from blocktrain.coordinator.run import open_run
from blocktrain.coordinator.scoring import Scoring
from blocktrain.coordinator.storage.blobs import Blobs
from blocktrain.coordinator.storage.ledger import Ledger
from blocktrain.coordinator.storage.store import NonceRow, Store
from blocktrain.coordinator.storage.weights import WeightCache
from blocktrain.coordinator.updates import Updates
from blocktrain.coordinator.workers import People
from blocktrain.data.corpora import Corpus
from blocktrain.errors import StorageError, UserError
from blocktrain.files import locked_file
from blocktrain.validation.scorer import Scorer
from blocktrain.wire.identity import load_or_create
from blocktrain.wire.messages import StatusAnswer
from blocktrain.wire.signing import Reason, VerifiedRequest
from blocktrain.wire.tokens import secret_of

log = logging.getLogger(__name__)

KEY_FILE = "coordinator.key"
DATABASE_FILE = "coordinator.sqlite"
LOCK_FILE = "coordinator.lock"
SWEEP_SECONDS = 60.0
PATIENCE_SECONDS = 5.0


class Coordinator:
    def __init__(
        self,
        context: Context,
        scoring: Scoring | None,
        scorer: Scorer | None,
        data_dir: Path,
        display: Display,
    ) -> None:
        self.context, self.display = context, display
        self.metrics = Metrics()
        self.door = Door(
            context.run.recipe.trust,
            context.run.run_id,
            context.run.coordinator_key,
            context.secret,
            data_dir,
        )
        self.assignments = Assignments(context, self.door)
        self.people = People(context)
        self.updates = Updates(context, self.assignments)
        self.reports = Reports(context, display)
        self.judging = Judging(context, scorer, self.metrics.judged)
        self.rounds = Rounds(context, self.metrics.merged, self.judging)
        self._scoring = scoring
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def draining(self) -> bool:
        return self._stop.is_set()

    def drain(self) -> None:
        """Finish what is under way and begin nothing new; a signal handler may call it."""
        self._stop.set()

    def start(self) -> None:
        if self.context.store.is_sqlite:
            self.rounds.forget_claims()
        loops: list[Callable[[threading.Event], None]] = [self.rounds.run, self._sweep]
        if self._scoring is not None:
            loops.append(self._scoring.run)
        if self.context.run.recipe.trust.judge == "coordinator":
            loops.append(self.judging.run)
        for loop in loops:
            thread = threading.Thread(target=loop, args=(self._stop,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """A merge under way is finished; an evaluation that takes long is left, it is repeated some day."""
        self._stop.set()
        self.context.changes.notify()
        rounds, *others = self._threads
        rounds.join()
        for thread in others:
            thread.join(PATIENCE_SECONDS)
        self.rounds.close()
        self.context.store.close()

    def remember(self, request: VerifiedRequest) -> None:
        """Refuse a nonce that any process has seen before."""
        try:
            with self.context.store.write() as session:
                session.add(NonceRow(replay_key=request.replay_key, forget_after=request.forget_after))
        except IntegrityError:
            raise Refusal(
                Reason.REPLAYED,
                f"the request was already received: its nonce {request.nonce} is used",
                "sign every attempt anew, with a fresh nonce",
            ) from None

    def status(self) -> StatusAnswer:
        return self.reports.status(self.metrics.traffic("up"), self.metrics.traffic("down"))

    def _sweep(self, stop: threading.Event) -> None:
        """Forget nonces whose requests are too old to be replayed."""
        while not stop.wait(SWEEP_SECONDS):
            try:
                with self.context.store.write() as session:
                    session.execute(delete(NonceRow).where(NonceRow.forget_after < self.context.clock()))
            except StorageError as error:
                log.error("cannot forget old nonces: %s", error)


@contextmanager
def opened(
    recipe: Recipe,
    corpus: Corpus,
    data_dir: Path,
    *,
    database_url: str | None = None,
    blobs_url: str | None = None,
    clock: Callable[[], float] = time.time,
    scoring: bool = True,
    display: Display | None = None,
) -> Iterator[Coordinator]:
    """A coordinator on this data directory, its threads running; stopped at the end."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot use --data-dir {data_dir}: {error.strerror}") from None
    with _alone(data_dir) if database_url is None else nullcontext():
        store = Store(database_url or f"sqlite:///{(data_dir / DATABASE_FILE).absolute()}")
        store.migrate()
        blobs = Blobs.from_url(blobs_url or str(data_dir / "blobs"))
        identity = load_or_create(data_dir / KEY_FILE)
        run = open_run(store, blobs, identity, recipe, corpus.sha256, clock())
        context = Context(
            run,
            store,
            blobs,
            Ledger(identity),
            WeightCache(run, blobs),
            clock,
            secret=secret_of(identity, "judging"),
        )
        scorer = Scorer(recipe, corpus) if _needs_scorer(recipe.trust) else None
        display = display or Display()
        coordinator = Coordinator(
            context, Scoring(context, corpus, display) if scoring else None, scorer, data_dir, display
        )
        coordinator.start()
        try:
            yield coordinator
        finally:
            coordinator.stop()


def _alone(data_dir: Path) -> AbstractContextManager[None]:
    """One process per data directory with SQLite."""
    return locked_file(
        data_dir / LOCK_FILE,
        f"another coordinator is using {data_dir}; stop it, choose another --data-dir, or share a run "
        "between processes with --database postgresql://…",
    )


def _needs_scorer(trust: TrustConfig) -> bool:
    return trust.judge == "coordinator" or (trust.judge == "external" and trust.guard)
