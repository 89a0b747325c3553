"""Processes of two versions share a run while one after another is replaced: the first new one migrates the
tables, and the old ones go on with them."""

from __future__ import annotations

import ast
from pathlib import Path

from sqlalchemy import text

from blocktrain.coordinator.storage.store import MIGRATIONS, Store
from tests.coordinator.conftest import served, tiny_recipe
from tests.coordinator.test_life_of_an_update import check_ledger

TAKING_AWAY = {"drop_column", "alter_column", "drop_table", "rename_table", "create_check_constraint"}


def test_a_process_goes_on_when_a_newer_version_migrates_the_tables(
    tmp_path: Path, postgres_url: str
) -> None:
    with served(tmp_path, tiny_recipe(blocks=1), None, postgres_url) as running:
        peer = running.peer()
        peer.deliver(peer.lend(), 1)
        running.wait_for_version(0, 1)
        newer = Store(postgres_url)
        with newer.engine.begin() as connection:
            for table in ("blocks", "workers", "assignments", "updates", "merges", "ledger"):
                connection.execute(text(f"ALTER TABLE {table} ADD COLUMN later BIGINT NOT NULL DEFAULT 0"))
            connection.execute(text("CREATE INDEX later_updates ON updates (later)"))
            connection.execute(text("UPDATE alembic_version SET version_num = 'later'"))
        newer.close()
        peer.deliver(peer.lend(), 2)
        running.wait_for_version(0, 2)
        assert check_ledger(peer) == 2


def test_migrations_only_add_what_older_processes_can_live_with() -> None:
    later = sorted((MIGRATIONS / "versions").glob("*.py"))[1:]
    assert later
    for path in later:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}
        assert not names & TAKING_AWAY, path.name
        for call in calls:
            if ast.unparse(call.func) == "sa.Column" and "add_column" in names:
                given = {one.arg: ast.unparse(one.value) for one in call.keywords}
                in_new_table = "create_table" in names
                assert given["nullable"] == "True" or "server_default" in given or in_new_table, path.name
