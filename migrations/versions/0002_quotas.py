"""Quotas, reservations and usage; when a key was last used, and its secret before a rotation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_KEY_COLUMNS = (
    sa.Column("last_used_at", sa.DateTime(timezone=True)),
    sa.Column("previous_digest", sa.LargeBinary()),
    sa.Column("previous_pepper_version", sa.BigInteger()),
    sa.Column("previous_until", sa.DateTime(timezone=True)),
)


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _id(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.String(32), nullable=False)


def _create_scope_table(table: str, *columns: sa.Column[object]) -> None:
    op.create_table(
        table,
        _id("scope"),
        _id("tenant_id"),
        sa.Column("key_id", sa.String(32)),
        *columns,
        sa.PrimaryKeyConstraint("scope", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=f"fk_{table}_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=f"fk_{table}_key_id_api_keys", ondelete="CASCADE"),
    )
    op.create_index(f"ix_{table}_tenant_id", table, ["tenant_id"])
    op.create_index(f"ix_{table}_key_id", table, ["key_id"])


def upgrade() -> None:
    for column in _KEY_COLUMNS:
        op.add_column("api_keys", column)
    _create_scope_table(
        "quotas",
        _number("requests_per_minute", nullable=True),
        _number("tokens_per_minute", nullable=True),
        _number("concurrent_requests", nullable=True),
        _number("tokens_per_day", nullable=True),
        _number("tokens_per_month", nullable=True),
        sa.Column("time_zone", sa.String(64), nullable=False),
        _number("max_context_tokens", nullable=True),
        _number("max_output_tokens", nullable=True),
        sa.Column("models", sa.JSON()),
        _number("cached_token_weight"),
    )
    counters = ("requests_level", "tokens_level", "at_ms", "tokens_charged", "day", "day_used", "month", "month_used")
    _create_scope_table("quota_states", *map(_number, counters))
    op.execute(
        f"INSERT INTO quota_states (scope, tenant_id, {', '.join(counters)}) "
        f"SELECT id, id, {', '.join('0' * len(counters))} FROM tenants"
    )
    op.create_table("gateways", _id("id"), _number("beats"), sa.PrimaryKeyConstraint("id", name="pk_gateways"))
    op.create_table(
        "reservations",
        _id("id"),
        _id("gateway_id"),
        _id("tenant_id"),
        _id("key_id"),
        _number("prompt_tokens"),
        _number("amount"),
        _number("tenant_mark", nullable=True),
        _number("key_mark", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_reservations"),
        sa.ForeignKeyConstraint(["gateway_id"], ["gateways.id"], name="fk_reservations_gateway_id_gateways"),
    )
    op.create_index("ix_reservations_gateway_id", "reservations", ["gateway_id"])
    op.create_index("ix_reservations_tenant_id", "reservations", ["tenant_id", "amount"])
    op.create_index("ix_reservations_key_id", "reservations", ["key_id", "amount"])
    counts = ("input_tokens", "cached_tokens", "output_tokens", "cost")
    op.create_table(
        "usage",
        _id("id"),
        _id("tenant_id"),
        _id("key_id"),
        _number("at_ms"),
        sa.Column("outcome", sa.String(16), nullable=False),
        *map(_number, counts),
        sa.PrimaryKeyConstraint("id", name="pk_usage"),
    )
    op.create_table(
        "usage_hours",
        _id("tenant_id"),
        _number("hour_ms"),
        _number("requests"),
        *map(_number, counts),
        sa.PrimaryKeyConstraint("tenant_id", "hour_ms", name="pk_usage_hours"),
    )


def downgrade() -> None:
    for table in ("usage_hours", "usage", "reservations", "gateways", "quota_states", "quotas"):
        op.drop_table(table)
    for column in _KEY_COLUMNS:
        op.drop_column("api_keys", column.name)
