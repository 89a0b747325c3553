"""Which refusals speak against their worker, and how many of each worker's do not"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

AGAINST = "('malformed', 'not_finite', 'norm', 'duplicate', 'harmful')"
"""Of older refusals only the reason is known; the others never spoke against a worker."""


def upgrade() -> None:
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column("held_against", sa.Boolean(), nullable=False, server_default=sa.false())
        )
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("unused", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(f"UPDATE updates SET held_against = true WHERE state = 'refused' AND reason IN {AGAINST}")
    # Never below zero: the counter may know less than the table, where an operator removed a worker that
    # joined again.
    op.execute(
        "UPDATE workers SET unused = (SELECT count(*) FROM updates WHERE updates.worker_id = "
        "workers.worker_id AND updates.state = 'refused' AND NOT updates.held_against)"
    )
    op.execute("UPDATE workers SET unused = refused WHERE unused > refused")
    op.execute("UPDATE workers SET refused = refused - unused")
