"""Runs the migrations in the transaction of the connection that `state.migrations.run` hands over."""

from alembic import context

from state.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
