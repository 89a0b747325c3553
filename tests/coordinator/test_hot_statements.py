"""What every heartbeat, assignment and commit asks for takes no longer in a long run of many workers."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from blocktrain.coordinator import assignments, reports, reputation_rows, updates
from blocktrain.coordinator.storage import open_rounds, queries
from blocktrain.coordinator.storage.store import Prepared, Store

VALUES = {
    "made": 0.0,
    **{"worker": "w", "assignment": "a", "hash": "h", "update": "u"},
    **{"block": 1, "round": 3, "version": 3, "base_version": 3, "since": 1.0},
}
STATEMENTS = {
    f"{module.__name__}.{name}": prepared.statement
    for module in (assignments, updates, open_rounds, queries, reports, reputation_rows)
    for name, prepared in vars(module).items()
    if isinstance(prepared, Prepared) and isinstance(prepared.statement, Select)
}


def test_no_hot_statement_reads_a_table_that_grows(tmp_path: Path) -> None:
    """SQLite's own plans: every table but that of the blocks is searched by an index, never scanned."""
    store = Store(f"sqlite:///{tmp_path / 'x.sqlite'}")
    store.migrate()
    literal = {"literal_binds": True}
    with store.engine.connect() as connection:
        plans = {
            name: [
                str(row[3])
                for row in connection.exec_driver_sql(
                    "EXPLAIN QUERY PLAN "
                    f"{statement.params(VALUES).compile(dialect=sqlite.dialect(), compile_kwargs=literal)}"
                )
            ]
            for name, statement in STATEMENTS.items()
        }
    store.close()
    assert len(plans) > 20
    assert all(plans.values())
    scans = {
        name: step
        for name, plan in plans.items()
        for step in plan
        if step.startswith("SCAN") and "SCAN blocks" not in step
    }
    assert scans == {}
