"""The loss of each evaluation beside its record, so that nobody has to read all records for it"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    with op.batch_alter_table("evaluations", schema=None) as batch_op:
        batch_op.add_column(sa.Column("consensus_ce", sa.Double(), nullable=True))
    connection = op.get_bind()
    for versions, record in connection.execute(sa.text("SELECT versions, record FROM evaluations")).all():
        connection.execute(
            sa.text("UPDATE evaluations SET consensus_ce = :loss WHERE versions = :versions"),
            {"loss": json.loads(record)["consensus_ce"], "versions": versions},
        )
    op.drop_index("ix_evaluations_time", "evaluations")
    op.create_index("evaluations_by_time", "evaluations", ["time", "consensus_ce"])
