"""How far along an update its judge was asked to go"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.add_column(sa.Column("judge_step", sa.Double(), nullable=True))
