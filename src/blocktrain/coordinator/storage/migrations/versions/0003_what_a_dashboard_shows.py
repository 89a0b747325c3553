"""What a dashboard shows: names of workers, the latest verdicts"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("workers", schema=None) as batch_op:
        batch_op.add_column(sa.Column("label", sa.String(length=64), nullable=False, server_default=""))
    with op.batch_alter_table("updates", schema=None) as batch_op:
        batch_op.create_index("updates_by_verdict", ["verdict_sequence"], unique=False)
