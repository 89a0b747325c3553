"""What the coordinator remembers: tables, transactions and migrations, on SQLite or PostgreSQL.

SQLite (WAL) takes one writer at a time and one process, so a write transaction begins with the lock. What is
acknowledged is on the disk before: writers wait for that after the lock, several for one call of the disk.
On PostgreSQL several coordinator processes share the tables: rows that two of them could change are read
`FOR UPDATE`, always in the order worker, block, run, so that no two wait for each other. The run row
carries the head of the ledger and is therefore locked last and by every transaction that acknowledges
something. Knows nothing of what the rows mean to training.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from alembic.config import Config as AlembicConfig
from pydantic import BaseModel
from sqlalchemy import (
    BigInteger,
    Boolean,
    ClauseElement,
    Connection,
    Dialect,
    Engine,
    Index,
    LargeBinary,
    String,
    Text,
    bindparam,
    create_engine,
    event,
    false,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy import Table as SqlTable
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import (
    DeclarativeBase,
    InstanceState,
    Mapped,
    Session,
    make_transient_to_detached,
    mapped_column,
    sessionmaker,
)
from sqlalchemy.sql.compiler import SQLCompiler

from blocktrain.errors import DamagedError, StorageError, UserError

MIGRATIONS = Path(__file__).parent / "migrations"
MIGRATION_LOCK = 0x626C6F636B
"""PostgreSQL advisory lock: two coordinators that start at once migrate one after the other."""
LEADER_LOCK = 0x626C6F
"""PostgreSQL advisory locks of this class: who has a block's number closes its rounds."""
BUSY_SECONDS = 30
POOL_SIZE = 16


class Table(DeclarativeBase):
    type_annotation_map = {int: BigInteger, str: Text}


Hex64 = String(64)
Hex32 = String(32)


class RunRow(Table):
    """One row: the run, and the head of its ledger."""

    __tablename__ = "run"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    run_id: Mapped[str] = mapped_column(Hex64)
    recipe: Mapped[str]
    corpus_sha256: Mapped[str] = mapped_column(Hex64)
    coordinator_key: Mapped[str] = mapped_column(Hex64)
    created: Mapped[float]
    ledger_length: Mapped[int]
    ledger_hash: Mapped[str] = mapped_column(Hex64)


class BlockRow(Table):
    """The head of a block and the state of its open round."""

    __tablename__ = "blocks"
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int]
    head_hash: Mapped[str] = mapped_column(Hex64)
    begun: Mapped[float | None]
    closing_version: Mapped[int | None]
    """Version that is being merged: its updates are fixed, later ones go to the next round."""
    claim_owner: Mapped[str | None] = mapped_column(Hex32)
    """No longer written: what the merge belongs to is `closing_version`, in any process."""
    claim_until: Mapped[float | None]
    """Time after which the process that merges is taken to be dead."""
    revision: Mapped[int] = mapped_column(default=0, server_default="0")
    """Raised with each arrival and verdict of the block, under its lock (`storage.open_rounds`)."""


class SnapshotRow(Table):
    __tablename__ = "snapshots"
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    hash: Mapped[str] = mapped_column(Hex64, index=True)
    num_bytes: Mapped[int]
    made: Mapped[float]


class WorkerRow(Table):
    __tablename__ = "workers"
    worker_id: Mapped[str] = mapped_column(Hex32, primary_key=True)
    public_key: Mapped[str] = mapped_column(Hex64)
    label: Mapped[str] = mapped_column(String(64), default="", server_default="")
    device: Mapped[str] = mapped_column(String(64))
    memory_bytes: Mapped[int | None]
    versions: Mapped[str]
    joined: Mapped[float]
    join_sequence: Mapped[int]
    last_seen: Mapped[float]
    block: Mapped[int | None]
    """The block it sits at; None after it handed its lease back."""
    step: Mapped[int | None]
    loss: Mapped[float | None]
    accepted: Mapped[int] = mapped_column(default=0)
    late: Mapped[int] = mapped_column(default=0)
    refused: Mapped[int] = mapped_column(default=0)
    unused: Mapped[int] = mapped_column(default=0, server_default="0")
    account: Mapped[str] = mapped_column(default="{}")
    """Sums of what its commits reported, as JSON of messages.Account."""
    address: Mapped[str | None] = mapped_column(Hex32, index=True)
    """Keyed hash of the network it joined from; the address itself is not kept."""
    standing: Mapped[str] = mapped_column(default="{}")
    """JSON of reputation.Standing."""
    established: Mapped[bool] = mapped_column(default=False)
    """Off probation."""
    # The live ones, counted by block, and those of one block: both without a look at the rows.
    __table_args__ = (
        Index("workers_by_sight", "last_seen", "block"),
        Index("workers_of_block", "block", "last_seen"),
    )


class AssignmentRow(Table):
    """`state` is one of states.AssignmentState."""

    __tablename__ = "assignments"
    assignment_id: Mapped[str] = mapped_column(Hex32, primary_key=True)
    worker_id: Mapped[str] = mapped_column(Hex32)
    block: Mapped[int]
    round: Mapped[int]
    shard: Mapped[int]
    base_version: Mapped[int]
    base_hash: Mapped[str] = mapped_column(Hex64)
    made: Mapped[float]
    reason: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    frozen: Mapped[str] = mapped_column(default="[]", server_default="[]")
    """JSON list of messages.FrozenSnapshot: other blocks' heads when it was lent."""
    stand_in_shard: Mapped[int | None]
    stand_in_steps: Mapped[int] = mapped_column(default=0, server_default="0")
    __table_args__ = (
        Index("assignments_of_round", "block", "round"),
        # A worker of a long run has thousands; what is asked for is of its last rounds, or minutes.
        Index("assignments_of_worker", "worker_id", "state", "round"),
        Index("assignments_of_worker_by_time", "worker_id", "made"),
        Index(
            "one_per_worker_block_round",
            "worker_id",
            "block",
            "round",
            unique=True,
            sqlite_where=text("state IN ('leased', 'committed')"),
            postgresql_where=text("state IN ('leased', 'committed')"),
        ),
    )


class UpdateRow(Table):
    """`state` is one of states.UpdateState."""

    __tablename__ = "updates"
    update_id: Mapped[str] = mapped_column(Hex64, primary_key=True)
    assignment_id: Mapped[str] = mapped_column(Hex32, unique=True)
    worker_id: Mapped[str] = mapped_column(Hex32)
    block: Mapped[int]
    round: Mapped[int]
    base_version: Mapped[int]
    base_hash: Mapped[str] = mapped_column(Hex64)
    payload_hash: Mapped[str] = mapped_column(Hex64, index=True)
    payload_bytes: Mapped[int]
    loss: Mapped[float | None]
    committed: Mapped[float]
    commit_sequence: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    weight: Mapped[float] = mapped_column(default=0.0)
    reason: Mapped[str | None] = mapped_column(String(32))
    sentence: Mapped[str | None]
    held_against: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Its refusal speaks against its worker; without that it is shown as unused."""
    norm: Mapped[float | None]
    revealed: Mapped[float | None]
    offset: Mapped[float | None]
    """Seconds from the beginning of its round to its arrival."""
    verdict_sequence: Mapped[int | None]
    merge_version: Mapped[int | None]
    """Version whose merge it belongs to, from the moment that merge is claimed."""
    scale: Mapped[float | None]
    reveal_sequence: Mapped[int | None]
    sketch: Mapped[bytes | None] = mapped_column(LargeBinary)
    """duplicates.Sketch, for as long as it is compared."""
    evidence: Mapped[str | None]
    """JSON of what the judge found."""
    score: Mapped[float | None]
    """Held-out gain in standard errors."""
    gain: Mapped[float | None]
    judge: Mapped[str | None] = mapped_column(Hex32)
    judge_until: Mapped[float | None]
    __table_args__ = (
        Index("updates_of_block", "block", "state", "base_version"),
        Index("updates_by_arrival", "block", "revealed"),
        Index("updates_of_merge", "block", "merge_version"),
        Index("updates_of_worker", "worker_id", "payload_hash"),
        Index("updates_of_worker_by_state", "worker_id", "state", "base_version"),
        Index("updates_of_worker_by_base", "worker_id", "block", "base_version"),
        Index("updates_of_worker_by_arrival", "worker_id", "block", "revealed"),
        Index("updates_by_verdict", "verdict_sequence"),
    )


class MergeRow(Table):
    __tablename__ = "merges"
    block: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    record: Mapped[str]
    """JSON of messages.MergeRecord."""
    report: Mapped[str]
    """JSON of messages.RoundReport."""
    begun: Mapped[float | None]
    closed: Mapped[float]


class LedgerRow(Table):
    __tablename__ = "ledger"
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[float]
    kind: Mapped[str] = mapped_column(String(16))
    body: Mapped[str]
    entry_hash: Mapped[str] = mapped_column(Hex64)
    signature: Mapped[str] = mapped_column(String(128))


class NonceRow(Table):
    __tablename__ = "nonces"
    replay_key: Mapped[str] = mapped_column(String(160), primary_key=True)
    forget_after: Mapped[float] = mapped_column(index=True)


class BanRow(Table):
    __tablename__ = "bans"
    worker_id: Mapped[str] = mapped_column(Hex32, primary_key=True)
    reason: Mapped[str]
    made: Mapped[float]
    until: Mapped[float]


class InviteRow(Table):
    """An invitation that was used."""

    __tablename__ = "invites"
    invite_id: Mapped[str] = mapped_column(Hex32, primary_key=True)
    worker_id: Mapped[str] = mapped_column(Hex32)
    used: Mapped[float]


class EvaluationRow(Table):
    __tablename__ = "evaluations"
    versions: Mapped[str] = mapped_column(primary_key=True)
    """JSON list of the blocks' versions: two processes that score the same model write one row."""
    time: Mapped[float]
    consensus_ce: Mapped[float | None]
    """As in the record: a serial run asks for all of them with every update that it judges. None where the
    model was so broken that its loss was no number."""
    record: Mapped[str]
    """JSON of messages.EvaluationState."""
    __table_args__ = (Index("evaluations_by_time", "time", "consensus_ce"),)


CONNECTION = "connection"
LASTS = "lasts"
AFTER = "after"
_NOT_SYNCED = text("SET LOCAL synchronous_commit TO OFF")
CHANNEL = "blocktrain"
"""PostgreSQL channel on which a process tells the others that it has acknowledged something."""
_TELL = text(f"SELECT pg_notify('{CHANNEL}', :name)")
HEAR_SECONDS = 0.2
"""How soon a thread that hears others notices that it should end."""
Message = TypeVar("Message", bound=BaseModel)


def message_of(model: type[Message], row: Table, **others: Any) -> Message:
    """The message that shows a row: columns fill the fields of their name, `others` the rest."""
    names = [name for name in model.model_fields if name not in others and hasattr(row, name)]
    return model(**{name: getattr(row, name) for name in names}, **others)


def must_last(session: Session) -> None:
    """Let this transaction be answered only when it is on the disk."""
    session.info[LASTS] = True


def after_commit(session: Session, tell: Callable[[], None]) -> None:
    """Call `tell` when this transaction is in the database, and not if it fails."""
    session.info.setdefault(AFTER, []).append(tell)


class Prepared:
    """A statement that becomes SQL once and is run by the database's driver. SQLAlchemy takes 0.2 to 0.4 ms
    for one that takes SQLite 0.06, and an update is a hundred of them. Nothing is flushed before it."""

    def __init__(self, statement: ClauseElement) -> None:
        self.statement = statement
        self._made: dict[str, tuple[str, dict[str, Any]]] = {}
        """Dialect to the SQL, and what in it never differs."""

    def __call__(self, session: Session, **values: Any) -> list[Any]:
        # Asking the session for its connection takes it longer than SQLite takes for some statements.
        connection = session.info.get(CONNECTION)
        if connection is None:
            connection = session.info[CONNECTION] = session.connection()
        return self.run(connection, values)

    def run(self, connection: Connection, values: Mapping[str, Any]) -> list[Any]:
        dialect, driver = connection.dialect, connection.connection.driver_connection
        if (made := self._made.get(dialect.name)) is None:
            made = self._made[dialect.name] = self._make(dialect, values)
        sql, constants = made
        assert driver is not None
        assert dialect.loaded_dbapi is not None
        errors = dialect.loaded_dbapi.Error
        try:
            cursor = driver.execute(sql, {**constants, **values})
            return cursor.fetchall() if cursor.description else []
        except errors as error:
            raise DBAPIError.instance(sql, None, error, errors, dialect=dialect) from error

    def _make(self, dialect: Dialect, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        # Both drivers take values by name, which is not what SQLAlchemy uses with SQLite.
        dialect_class: Any = type(dialect)
        by_name = dialect_class(paramstyle="named" if dialect.name == "sqlite" else "pyformat")
        compiled = self.statement.compile(dialect=by_name)
        assert isinstance(compiled, SQLCompiler)
        made = compiled.construct_expanded_state(dict(values))
        constants = {name: value for name, value in made.parameters.items() if name not in values}
        return made.statement, {
            name: value.value if isinstance(value, StrEnum) else value for name, value in constants.items()
        }


_BEGIN, _BEGIN_WRITING, _COMMIT = map(Prepared, map(text, ("BEGIN", "BEGIN IMMEDIATE", "COMMIT")))


class QuickSession(Session):
    """Reads rows by their keys and writes them with prepared statements, for the tables that every request
    uses: 0.15 ms instead of 0.35 for a row that is read, nine times in an update, and 0.12 instead of 0.46
    for one that is changed, eight times."""

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        if entity not in _QUICK or self.identity_map.has_key(
            entity.__mapper__.identity_key_from_primary_key((ident,))
        ):
            return super().get(entity, ident, **options)
        if self.autoflush:
            self.flush()
        table = _QUICK[entity]
        found = (table.locking if options.get("with_for_update") else table.plain)(self, key=ident)
        if not found:
            return None
        # Not by the constructor, which takes 0.04 ms for what SQLAlchemy itself does for a row that it loads.
        row = entity.__mapper__.class_manager.new_instance()
        row.__dict__.update(zip(table.names, found[0], strict=True))
        for name in table.booleans:  # of which SQLite has none
            row.__dict__[name] = bool(row.__dict__[name])
        return self._kept(row)

    def flush(self, objects: Any = None) -> None:
        # What was changed before what is new, as SQLAlchemy does it: a refused assignment makes room in the
        # unique index for the one that is lent in its place.
        for row in self.dirty:
            if (table := _QUICK.get(type(row))) is not None:
                state: InstanceState[Any] = inspect(row)
                values = row.__dict__
                changed = {
                    name: values[name] for name, old in state.committed_state.items() if values[name] != old
                }
                if changed:
                    table.update(self, values[table.key], changed)
                state._commit_all(values, self.identity_map)  # as after SQLAlchemy's own flush
        for row in self.new:
            if (table := _QUICK.get(type(row))) is not None:
                for name, value in table.defaults.items():
                    if name not in row.__dict__:
                        setattr(row, name, value)
                table.insert(self, **_plain(row.__dict__, table.names))
                self.expunge(row)
                self._kept(row)
        super().flush(objects)

    def _kept(self, row: Table) -> Any:
        make_transient_to_detached(row)  # as if it had been loaded, and with nothing to write
        self.add(row)
        return row


class _QuickTable:
    """The statements for one row of a table that has a key of one column."""

    def __init__(self, table: type[Table]) -> None:
        assert isinstance(table.__table__, SqlTable)
        self._table = table.__table__
        [key] = self._table.primary_key
        query, columns = select(self._table).where(key == bindparam("key")), self._table.columns
        self.key, self.names = key.key, columns.keys()
        self.plain, self.locking = Prepared(query), Prepared(query.with_for_update())
        self.insert = Prepared(insert(self._table))
        self.booleans = [column.key for column in columns if isinstance(column.type, Boolean)]
        self.defaults = {column.key: getattr(column.default, "arg", None) for column in columns}
        self._updates: dict[frozenset[str], Prepared] = {}
        """By the columns that they change."""

    def update(self, session: Session, key: Any, changed: Mapping[str, Any]) -> None:
        names = frozenset(changed)
        if (statement := self._updates.get(names)) is None:
            values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in sorted(names)}
            chosen = self._table.c[self.key] == bindparam("key")
            statement = self._updates[names] = Prepared(update(self._table).where(chosen).values(values))
        statement(
            session, key=key, **{f"new_{name}": value for name, value in _plain(changed, changed).items()}
        )


def _plain(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """As drivers know them: a state is text."""
    found = ((name, values[name]) for name in names)
    return {name: value.value if isinstance(value, StrEnum) else value for name, value in found}


_QUICK = {table: _QuickTable(table) for table in (WorkerRow, AssignmentRow, UpdateRow, BlockRow)}


class SharedSync:
    """Lets threads that have written to a file wait until it is on the disk, many for one call of it."""

    def __init__(self, path: Path) -> None:
        self._path, self._calling = path, threading.Lock()
        self._next: Future[None] = Future()
        """The call of the disk that begins next."""

    def wait(self) -> None:
        # A call that has begun may have missed our bytes: only the next one will do.
        call = self._next
        with self._calling:
            if not call.done():
                self._next = Future()
                try:
                    self._sync()
                    call.set_result(None)
                except OSError as error:  # of this call, so for all that wait for it
                    call.set_exception(error)
        if (failure := call.exception()) is not None:
            raise StorageError(f"the database cannot be written: {failure}; check the disk") from failure

    def _sync(self) -> None:
        try:
            file = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            return  # SQLite has moved it all into the database file, and synced that
        try:
            os.fsync(file)
        finally:
            os.close(file)


class Store:
    """Transactions on one database."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._name = secrets.token_hex(8)
        """Of this process among those that share the database."""
        self.watchers: list[Callable[[], None]] = []
        """Called when something was acknowledged, here or by another process, in any thread: be quick."""
        # Rows stay readable after their transaction: answers are made from them outside of it.
        self._sessions = sessionmaker(self.engine, class_=QuickSession, expire_on_commit=False)
        # SQLite lets writers wait by sleeping and trying again, up to 0.1 s each time and in no order: with
        # 200 workers a heartbeat took 0.4 s in the median and 11 s at its 99th percentile. A lock wakes the
        # next one at once. PostgreSQL has locks of its own.
        self._writing: AbstractContextManager[Any] = threading.Lock() if self.is_sqlite else nullcontext()
        path = self.engine.url.database if self.is_sqlite else None
        self._later: deque[tuple[Prepared, Mapping[str, Any]]] = deque()
        # The file of commits. It has none of the locks that closing a second descriptor would drop.
        self._log = SharedSync(Path(f"{path}-wal")) if path else None

    @contextmanager
    def read(self) -> Iterator[Session]:
        with _translated(), self._begun(_BEGIN) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed at the end, rolled back on any exception. Any survives `kill -9`; one
        that must also survive a power cut says so with `must_last`, and waits for the disk."""
        with _translated():
            # A transaction that will write says so at once (IMMEDIATE): one that began by reading and then
            # finds another writer would fail at its first write instead of waiting for BUSY_SECONDS.
            # The commit lies within `_written_along`: where it fails (a full disk), what came along stays.
            with (
                self._writing,
                self._begun(_BEGIN_WRITING) as session,
                self._written_along(session.info[CONNECTION]),
            ):
                yield session
                session.flush()
                lasts = session.info.get(LASTS, False)
                if self.is_sqlite:
                    _COMMIT.run(session.info[CONNECTION], {})
                else:
                    session.execute(_TELL if lasts else _NOT_SYNCED, {"name": self._name} if lasts else {})
                    session.commit()
            # Outside the lock. With a sync of 6 ms inside it no more than 160 transactions a second were
            # possible, and 1,000 workers need more.
            if lasts and self._log is not None:
                self._log.wait()
            for tell in session.info.get(AFTER, ()):
                tell()
            if lasts:
                self.tell_watchers()

    @contextmanager
    def _begun(self, begin: Prepared) -> Iterator[Session]:
        """A transaction that is rolled back unless somebody commits it."""
        if not self.is_sqlite:
            with self._sessions() as session:
                session.info[CONNECTION] = session.connection()
                yield session
            return
        # By the driver's own statements: SQLAlchemy takes 0.17 ms for an empty transaction, this 0.10, and an
        # update takes ten. What is not committed is rolled back when the connection goes back to its pool.
        with self.engine.connect() as connection:
            begin.run(connection, {})
            with self._sessions(bind=connection, info={CONNECTION: connection}) as session:
                yield session

    def write_later(self, statement: Prepared, row: Mapping[str, Any]) -> None:
        """Write a row along with the next transaction of this process."""
        self._later.append((statement, row))

    @contextmanager
    def _written_along(self, connection: Connection) -> Iterator[None]:
        rows = [self._later.popleft() for _ in range(len(self._later))]
        try:
            for statement, row in rows:
                statement.run(connection, row)
            yield
        except BaseException:
            self._later.extend(rows)  # with the next one, as this one is rolled back
            raise

    def tell_watchers(self) -> None:
        for tell in tuple(self.watchers):
            tell()

    def hear(self, tell: Callable[[], None], stop: threading.Event) -> bool:
        """Call `tell` and the watchers whenever another process has acknowledged something, until `stop`."""
        import psycopg

        url = self.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        try:
            with psycopg.connect(url, autocommit=True, connect_timeout=BUSY_SECONDS) as connection:
                connection.execute(f"LISTEN {CHANNEL}")
                tell()  # of what was written before this one listened
                while not stop.is_set():
                    for note in connection.notifies(timeout=HEAR_SECONDS):
                        if note.payload != self._name:
                            tell()
                            self.tell_watchers()
        except psycopg.Error as error:
            raise StorageError(f"the database tells of no changes: {error}; check that it runs") from error
        return False

    @contextmanager
    def leading(self, block: int) -> Iterator[bool]:
        """Whether this process alone closes the block's rounds meanwhile. One that is killed leads no more at
        once: the lock is its connection's."""
        if self.is_sqlite:
            yield True
            return
        with _translated(), self.engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            leads = bool(connection.scalar(select(func.pg_try_advisory_lock(LEADER_LOCK, block))))
            try:
                yield leads
            finally:
                if leads:
                    connection.execute(select(func.pg_advisory_unlock(LEADER_LOCK, block)))

    def migrate(self) -> None:
        """Bring the tables to this version; safe to call from several processes at once."""
        from alembic import command
        from alembic.util import CommandError

        with _translated(), self.engine.begin() as connection:
            # SQLite needs no lock here: the lock file of the data directory has kept others out.
            if self.is_sqlite:
                # A damaged page is met whenever it is read, perhaps after days; better before anything is
                # lent. It reads the whole file, about a second for each GB.
                found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if found != "ok":
                    raise DamagedError(_damage(found))
            else:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            try:
                if inspect(connection).has_table("alembic_version"):
                    command.upgrade(migrations(connection), "head")
                else:
                    # All migrations one after another give the same tables, in 0.37 s instead of 0.07.
                    Table.metadata.create_all(connection)
                    command.stamp(migrations(connection), "head")
            except CommandError as error:
                raise UserError(
                    f"cannot bring the database to this version ({error}); if a newer blocktrain wrote it, "
                    "use that"
                ) from None

    def close(self) -> None:
        self.engine.dispose()


def migrations(connection: Connection) -> AlembicConfig:
    """What alembic needs to bring the tables behind `connection` from one version to another."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = AlembicConfig()
    # The option is a template to alembic: a percent sign in the path would be taken for a name.
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError(f"not a database URL: {url!r}; expected sqlite:///FILE or postgresql://…") from None
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "postgresql":
        return create_engine(
            parsed, pool_size=POOL_SIZE, pool_pre_ping=True, connect_args={"connect_timeout": BUSY_SECONDS}
        )
    if parsed.get_backend_name() != "sqlite":
        raise UserError(
            f"database {parsed.drivername!r} is not supported; use sqlite:///FILE or postgresql://…"
        )
    engine = create_engine(
        parsed, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False}, pool_size=POOL_SIZE
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions; `begin` does
        # NORMAL: the disk is not called at each commit but by `Store.write`, after it has let go of its lock.
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        if driver is not None and not driver.in_transaction:  # as in `Store._begun`
            connection.exec_driver_sql("BEGIN")

    return engine


@contextmanager
def _translated() -> Iterator[None]:
    """A database that is full, locked or gone is the operator's; other errors are ours and pass."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        raise StorageError(f"the database does not answer: {cause}; check disk space and URL") from error
    except DatabaseError as error:
        # Its subclasses are mistakes of ours in SQL or expected conflicts; SQLite raises itself for damage.
        if type(error) is not DatabaseError:
            raise
        raise DamagedError(_damage(error.orig)) from error


def _damage(found: object) -> str:
    return (
        f"coordinator.sqlite is damaged ({' '.join(str(found).split())}); stop the coordinator and put back "
        "a backup of the data folder (docs/host.md), or save what can be read with "
        "`sqlite3 coordinator.sqlite .recover`, then check it with `blocktrain ledger verify FOLDER`"
    )
