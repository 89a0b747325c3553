"""Alembic's entry point: migrates the connection that `store.Store.migrate` hands over."""

from alembic import context

from blocktrain.coordinator.storage.store import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
