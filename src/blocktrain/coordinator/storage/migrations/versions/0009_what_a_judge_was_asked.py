"""What an update's judge was asked: how far to go along it, from which head"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.add_column(sa.Column("judge_step", sa.Double(), nullable=True))
        batch_op.add_column(sa.Column("judge_parts", sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("judge_late", sa.Boolean(), nullable=True))
        batch_op.add_column(sa.Column("judge_head", sa.String(64), nullable=True))
