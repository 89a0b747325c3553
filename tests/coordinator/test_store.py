"""The migrations give exactly the tables the code uses, on both databases."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import bindparam, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from blocktrain.coordinator.states import UpdateState
from blocktrain.coordinator.storage.store import (
    MIGRATIONS,
    BanRow,
    BlockRow,
    NonceRow,
    Prepared,
    Store,
    Table,
    UpdateRow,
    after_commit,
    migrations,
)
from blocktrain.errors import DamagedError, StorageError


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'x.sqlite'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.mark.parametrize("begun", ["as new", "by the first version"])
def test_migrating_gives_the_tables_of_the_code(database: str, begun: str) -> None:
    store = Store(database)
    if begun == "by the first version":
        with store.engine.begin() as connection:
            command.upgrade(migrations(connection), "0001")
    store.migrate()
    store.migrate()
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Table.metadata) == []
        assert context.get_current_revision() == ScriptDirectory(str(MIGRATIONS)).get_current_head()
    store.close()


def test_a_database_that_does_not_answer_is_the_operators(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder.sqlite'}")
    with pytest.raises(StorageError, match="does not answer"):
        store.migrate()


@pytest.mark.parametrize("damage", ["header", "page"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "coordinator.sqlite"
    store = Store(f"sqlite:///{path}")
    store.migrate()
    store.close()
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:16] = b"not a database.."
    else:
        content[4096:8192] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"coordinator.sqlite is damaged .*put back a backup"):
        Store(f"sqlite:///{path}").migrate()


def test_damage_met_while_reading_is_named_too(tmp_path: Path) -> None:
    """As `ledger verify` does, which migrates nothing."""
    path = tmp_path / "coordinator.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 8192)
    with pytest.raises(DamagedError, match="damaged"), Store(f"sqlite:///{path}").read() as session:
        session.connection()


def test_a_prepared_statement_says_what_the_session_says(database: str) -> None:
    store = Store(database)
    store.migrate()
    ban = Prepared(insert(BanRow))
    # A state among the values that never differ: the drivers must see a plain word.
    found = select(BanRow.worker_id, BanRow.until).where(
        BanRow.reason.in_((UpdateState.REFUSED, "late")), BanRow.until > bindparam("since")
    )
    with store.write() as session:
        for number, reason in enumerate(("refused", "late", "other")):
            ban(session, worker_id=f"w{number}", reason=reason, made=0.0, until=float(number))
    prepared = Prepared(found)
    with store.read() as session:
        for since in (-1.0, 0.0):
            rows = [tuple(row) for row in session.execute(found, {"since": since})]
            assert sorted(prepared(session, since=since)) == sorted(rows)
            assert len(rows) == (2 if since < 0 else 1)
    with pytest.raises(IntegrityError), store.write() as session:
        ban(session, worker_id="w0", reason="", made=0.0, until=0.0)
    store.close()


def test_what_follows_a_transaction_is_told_only_if_it_holds(tmp_path: Path) -> None:
    store, told = Store(f"sqlite:///{tmp_path / 'x.sqlite'}"), list[str]()
    store.migrate()
    with store.write() as session:
        after_commit(session, lambda: told.append("held"))
    with contextlib.suppress(KeyError), store.write() as session:
        after_commit(session, lambda: told.append("failed"))
        raise KeyError
    store.close()
    assert told == ["held"]


def test_rows_are_written_as_sqlalchemy_writes_them(database: str) -> None:
    """New rows with defaults, changed ones, a state, a boolean, bytes, and what is rolled back."""
    store = Store(database)
    store.migrate()

    def work(session: Session, number: int) -> None:
        block = BlockRow(block=number, version=1, head_hash="0" * 64)
        update = UpdateRow(
            **{"update_id": f"{number:064}", "assignment_id": f"{number:032}", "worker_id": "1" * 32},
            **{"block": 0, "round": 1, "base_version": 1, "base_hash": "0" * 64, "payload_hash": "2" * 64},
            **{"payload_bytes": 7, "committed": 1.5, "commit_sequence": 3, "state": UpdateState.COMMITTED},
        )
        session.add_all([block, update])
        session.flush()
        assert (block.revision, update.weight, update.held_against) == (0, 0.0, False)
        found = session.get(UpdateRow, update.update_id)
        assert found is update
        update.state, update.sketch, update.held_against, update.norm = UpdateState.JUDGING, b"\0x", True, 0.1
        block.revision += 1
        block.begun = None
        session.flush()
        assert not session.dirty

    with store.write() as session:
        work(session, 1)
    with Session(store.engine) as ordinary, ordinary.begin():
        work(ordinary, 2)
    with contextlib.suppress(ZeroDivisionError), store.write() as session:
        work(session, 3)
        raise ZeroDivisionError
    own = {"update_id", "assignment_id"}
    names = [column.name for column in UpdateRow.__table__.columns if column.name not in own]
    with Session(store.engine) as session:
        first, second = session.scalars(select(UpdateRow).order_by(UpdateRow.update_id)).all()
        assert [getattr(first, name) for name in names] == [getattr(second, name) for name in names]
        assert (first.state, first.sketch, first.held_against) == ("judging", b"\0x", True)
        assert [row.revision for row in session.scalars(select(BlockRow))] == [1, 1]
    store.close()


def test_rows_that_came_along_are_not_lost_when_a_transaction_cannot_end(database: str) -> None:
    store = Store(database)
    store.migrate()
    with store.write() as session:
        session.execute(text("CREATE TABLE parents (id INTEGER PRIMARY KEY)"))
        session.execute(
            text(
                "CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)"
            )
        )
    store.write_later(Prepared(insert(NonceRow)), {"replay_key": "n", "forget_after": 9.0})
    with pytest.raises((IntegrityError, StorageError)), store.write() as session:
        session.execute(text("INSERT INTO children VALUES (1)"))  # found out by COMMIT alone
    with store.write():
        pass
    with store.read() as session:
        assert session.scalars(select(NonceRow.replay_key)).all() == ["n"]
    store.close()
