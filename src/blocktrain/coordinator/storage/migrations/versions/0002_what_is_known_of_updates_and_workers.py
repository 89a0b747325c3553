"""What is known of updates and workers: evidence, standing, bans, used invitations"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "bans",
        sa.Column("worker_id", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("made", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id"),
    )
    op.create_table(
        "invites",
        sa.Column("invite_id", sa.String(length=32), nullable=False),
        sa.Column("worker_id", sa.String(length=32), nullable=False),
        sa.Column("used", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("invite_id"),
    )
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.add_column(sa.Column("reveal_sequence", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("sketch", sa.LargeBinary(), nullable=True))
        batch_op.add_column(sa.Column("evidence", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("score", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("gain", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("judge", sa.String(length=32), nullable=True))
        batch_op.add_column(sa.Column("judge_until", sa.Double(), nullable=True))
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("address", sa.String(length=32), nullable=True))
        batch_op.add_column(sa.Column("standing", sa.Text(), nullable=False, server_default="{}"))
        batch_op.add_column(sa.Column("established", sa.Boolean(), nullable=False, server_default=sa.false()))
        batch_op.create_index(batch_op.f("ix_workers_address"), ["address"], unique=False)
