"""Run by Alembic on the connection it is handed; `gateway.tenants.database` owns the transaction around it."""

from __future__ import annotations

from alembic import context

from gateway.tenants.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
