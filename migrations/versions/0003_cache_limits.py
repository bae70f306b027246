"""What a tenant may have of a store's cache, how long its requests wait, and the size of the store last seen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_LIMITS = (
    sa.Column("device_reserved_tokens", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("device_max_tokens", sa.BigInteger()),
    sa.Column("weight", sa.Double(), nullable=False, server_default="1"),
    sa.Column("strict", sa.Boolean(), nullable=False, server_default=sa.false()),
    sa.Column("queue_wait_seconds", sa.BigInteger(), nullable=False, server_default="30"),
    sa.Column("revision", sa.BigInteger(), nullable=False, server_default="0"),
)
# All that there were before this version: who had them all was made to do everything.
_ALL_SCOPES = {
    *(f"{resource}:{verb}" for resource in ("tenants", "keys", "salts", "quotas") for verb in ("read", "write")),
    "usage:read",
}
_NEW_SCOPES = {"cache:read", "cache:write"}
_ADMIN_KEYS = sa.table("admin_keys", sa.column("id", sa.String()), sa.column("scopes", sa.JSON()))


def upgrade() -> None:
    for column in _LIMITS:
        op.add_column("quotas", column)
    op.create_table(
        "stores",
        sa.Column("id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("block_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_stores"),
    )
    connection = op.get_bind()
    for key_id, scopes in connection.execute(sa.select(_ADMIN_KEYS.c.id, _ADMIN_KEYS.c.scopes)).all():
        if set(scopes) >= _ALL_SCOPES:
            more = sorted({*scopes, *_NEW_SCOPES})
            connection.execute(sa.update(_ADMIN_KEYS).where(_ADMIN_KEYS.c.id == key_id).values(scopes=more))


def downgrade() -> None:
    op.drop_table("stores")
    for column in _LIMITS:
        op.drop_column("quotas", column.name)
