"""Opening a run: made once, then only reopened; another recipe, text, key or process is refused in words."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from blocktrain.config import ObjectiveConfig, TrainingConfig
from blocktrain.coordinator.operator_notes import KEY_FILE
from blocktrain.coordinator.service import DATABASE_FILE, opened
from blocktrain.coordinator.storage.store import RunRow
from blocktrain.data.corpora import Corpus
from blocktrain.errors import RecipeError, UserError
from blocktrain.ids import CorpusHash
from tests.coordinator.conftest import CORPUS, Place, tiny_recipe


def test_a_run_of_an_earlier_version_is_opened_with_the_defaults_of_what_it_did_not_know(
    local: Place,
) -> None:
    with local.serve(tiny_recipe()) as running, running.coordinator.resources.store.write() as session:
        row = session.scalars(select(RunRow)).one()
        stored = json.loads(row.recipe)
        del stored["swarm"]["stand_in"], stored["training"]["frozen_host_bytes"]
        row.recipe, run_id = json.dumps(stored), row.run_id
    with local.serve(tiny_recipe()) as running:
        assert running.coordinator.resources.run.run_id == run_id


def test_a_database_of_a_later_version_is_refused_in_words(local: Place) -> None:
    with (
        local.serve(tiny_recipe()) as running,
        running.coordinator.resources.store.engine.begin() as connection,
    ):
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UserError, match="newer blocktrain"), local.serve(tiny_recipe()):
        pass


def test_another_recipe_is_refused_and_the_difference_named(place: Place) -> None:
    options: dict[str, Any] = {
        "database_url": place.database_url,
        "blobs_url": place.blobs_url,
        "scoring": False,
    }
    with opened(tiny_recipe(), CORPUS, place.data_dir, **options):
        pass
    with (
        pytest.raises(UserError, match=r"swarm\.outer_lr was 1\.0 and is 0\.5 \(workers that have joined"),
        opened(tiny_recipe(outer_lr=0.5), CORPUS, place.data_dir, **options),
    ):
        pass


def test_a_new_data_folder_is_private(tmp_path: Path) -> None:
    with opened(tiny_recipe(), CORPUS, tmp_path / "new", scoring=False):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_other_text_is_refused(tmp_path: Path) -> None:
    with opened(tiny_recipe(), CORPUS, tmp_path, scoring=False):
        pass
    other = Corpus(CORPUS.train, CORPUS.pool, CORPUS.valid, CorpusHash("cd" * 32))
    with pytest.raises(UserError, match="bring the text back"), opened(tiny_recipe(), other, tmp_path):
        pass


def test_a_second_process_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        opened(tiny_recipe(), CORPUS, tmp_path, scoring=False),
        pytest.raises(UserError, match="another coordinator is using"),
        opened(tiny_recipe(), CORPUS, tmp_path),
    ):
        pass


def test_a_database_of_another_coordinator_key_is_refused(tmp_path: Path, postgres_url: str) -> None:
    def open_in(folder: str) -> AbstractContextManager[Any]:
        places: dict[str, Any] = {"database_url": postgres_url, "blobs_url": str(tmp_path / "shared")}
        return opened(tiny_recipe(), CORPUS, tmp_path / folder, **places, scoring=False)

    with open_in("one"):
        pass
    with pytest.raises(UserError, match=r"copy coordinator\.key"), open_in("two"):
        pass
    shutil.copy(tmp_path / "one" / KEY_FILE, tmp_path / "two" / KEY_FILE)
    with open_in("two"):
        pass


def test_a_folder_with_a_run_on_sqlite_does_not_begin_another_in_a_database(
    tmp_path: Path, postgres_url: str
) -> None:
    with opened(tiny_recipe(), CORPUS, tmp_path, scoring=False):
        pass
    with (
        pytest.raises(UserError, match=r"has a run on SQLite.*--from"),
        opened(tiny_recipe(), CORPUS, tmp_path, database_url=postgres_url, scoring=False),
    ):
        pass


def test_a_run_is_not_served_from_a_store_that_is_not_its_own(tmp_path: Path) -> None:
    with opened(tiny_recipe(), CORPUS, tmp_path, scoring=False):
        pass
    other = str(tmp_path / "other")
    with (
        pytest.raises(UserError, match=r"newest snapshot of block 0 is not in .*other.*--blobs"),
        opened(tiny_recipe(), CORPUS, tmp_path, blobs_url=other, scoring=False),
    ):
        pass


def test_blocks_that_hear_others_have_a_schema_of_their_own(tmp_path: Path) -> None:
    chained = replace(tiny_recipe(blocks=3), objective=ObjectiveConfig(kind="chain"))
    with opened(chained, CORPUS, tmp_path, scoring=False) as coordinator:
        first, second, third = coordinator.resources.run.schemas
    assert "upstream.weight" in dict(second.tensors)
    assert second == third != first


def test_a_learned_codebook_is_refused(tmp_path: Path) -> None:
    learned = replace(
        tiny_recipe(), objective=ObjectiveConfig(codebook="learned"), training=TrainingConfig(order="turns")
    )
    with pytest.raises(RecipeError, match='codebook = "fixed"'), opened(learned, CORPUS, tmp_path):
        pass


@pytest.mark.parametrize("url", ["mysql://x/y", "nonsense", "sqlite"])
def test_a_database_that_is_not_supported_is_refused(tmp_path: Path, url: str) -> None:
    with (
        pytest.raises(UserError, match="sqlite:///FILE"),
        opened(tiny_recipe(), CORPUS, tmp_path, database_url=url),
    ):
        pass


def test_blobs_at_an_unknown_scheme_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="s3://"),
        opened(tiny_recipe(), CORPUS, tmp_path, blobs_url="ftp://x"),
    ):
        pass


INDEXES_OF_0005 = (
    ("ix_workers_last_seen", "workers", "last_seen"),
    ("ix_workers_block", "workers", "block"),
    ("ix_assignments_worker_id", "assignments", "worker_id"),
    ("updates_of_block", "updates", "block, state"),
)
INDEXES_OF_0007 = (
    *("workers_by_sight", "workers_of_block", "assignments_of_worker", "assignments_of_worker_by_time"),
    *("updates_by_arrival", "updates_of_worker_by_state", "updates_of_worker_by_base"),
    "updates_of_worker_by_arrival",
)


def test_an_older_folder_that_is_refused_stays_as_it_was(local: Place) -> None:
    def version(database: sqlite3.Connection) -> str:
        return str(database.execute("SELECT version_num FROM alembic_version").fetchone()[0])

    with local.serve(tiny_recipe()):
        pass
    with closing(sqlite3.connect(local.data_dir / DATABASE_FILE)) as old, old:
        newest = version(old)
        # Without what came after 0005: two columns by 0006, a column and indexes by 0007, the same by 0008.
        old.execute("ALTER TABLE updates DROP COLUMN held_against")
        old.execute("ALTER TABLE workers DROP COLUMN unused")
        old.execute("ALTER TABLE blocks DROP COLUMN revision")
        for index, table, columns in INDEXES_OF_0005:
            old.execute(f"DROP INDEX IF EXISTS {index}")
            old.execute(f"CREATE INDEX {index} ON {table} ({columns})")
        for index in INDEXES_OF_0007:
            old.execute(f"DROP INDEX {index}")
        old.execute("DROP INDEX evaluations_by_time")
        old.execute("ALTER TABLE evaluations DROP COLUMN consensus_ce")
        old.execute("CREATE INDEX ix_evaluations_time ON evaluations (time)")
        old.execute("UPDATE alembic_version SET version_num = '0005'")
    with pytest.raises(UserError, match="of another recipe"), local.serve(tiny_recipe(outer_lr=0.5)):
        pass
    with closing(sqlite3.connect(local.data_dir / DATABASE_FILE)) as old:
        assert version(old) == "0005"
    with local.serve(tiny_recipe()):
        pass
    with closing(sqlite3.connect(local.data_dir / DATABASE_FILE)) as old:
        assert version(old) == newest
