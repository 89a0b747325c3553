"""Which snapshots of other blocks an assignment needs"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("assignments", schema=None) as batch_op:
        batch_op.add_column(sa.Column("frozen", sa.Text(), nullable=False, server_default="[]"))
