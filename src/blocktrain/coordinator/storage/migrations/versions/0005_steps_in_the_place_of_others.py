"""What a lone worker does for replicas that are away"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    with op.batch_alter_table("assignments", schema=None) as batch_op:
        batch_op.add_column(sa.Column("stand_in_shard", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("stand_in_steps", sa.BigInteger(), nullable=False, server_default="0"))
