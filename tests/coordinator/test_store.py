"""The migrations give exactly the tables the code uses, on both databases."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from blocktrain.coordinator.storage.store import Store, Table
from blocktrain.errors import StorageError


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'x.sqlite'}"
    return str(request.getfixturevalue("postgres_url"))


def test_migrating_gives_the_tables_of_the_code(database: str) -> None:
    store = Store(database)
    store.migrate()
    store.migrate()
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    store.close()


def test_a_database_that_does_not_answer_is_the_operators(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder.sqlite'}")
    with pytest.raises(StorageError, match="does not answer"):
        store.migrate()
