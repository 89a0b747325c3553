"""What thousands of workers ask for, without a look at all of them"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("blocks", schema=None) as batch_op:
        batch_op.add_column(sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"))
    for name, table in (
        ("ix_workers_last_seen", "workers"),
        ("ix_workers_block", "workers"),
        ("ix_assignments_worker_id", "assignments"),
        ("updates_of_block", "updates"),
    ):
        op.drop_index(name, table)
    for name, table, columns in (
        ("workers_by_sight", "workers", ["last_seen", "block"]),
        ("workers_of_block", "workers", ["block", "last_seen"]),
        ("assignments_of_worker", "assignments", ["worker_id", "state", "round"]),
        ("assignments_of_worker_by_time", "assignments", ["worker_id", "made"]),
        ("updates_of_block", "updates", ["block", "state", "base_version"]),
        ("updates_by_arrival", "updates", ["block", "revealed"]),
        ("updates_of_worker_by_state", "updates", ["worker_id", "state", "base_version"]),
        ("updates_of_worker_by_base", "updates", ["worker_id", "block", "base_version"]),
        ("updates_of_worker_by_arrival", "updates", ["worker_id", "block", "revealed"]),
    ):
        op.create_index(name, table, columns)
