"""Tenants, API keys, epochs, wrapped secrets and pending fences."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _key_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64)),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("pepper_version", sa.BigInteger(), nullable=False),
        sa.Column("last4", sa.String(4), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
    ]


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("account", sa.LargeBinary(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
        sa.UniqueConstraint("account", name="uq_tenants_account"),
    )
    op.create_table(
        "api_keys",
        *_key_columns(),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table("admin_keys", *_key_columns(), sa.PrimaryKeyConstraint("id", name="pk_admin_keys"))
    op.create_table(
        "epochs",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("dropped_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("tenant_id", "epoch", name="pk_epochs"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_epochs_tenant_id_tenants", ondelete="CASCADE"),
    )
    op.create_table(
        "wrapped_secrets",
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("kek_id", sa.String(16), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("purpose", "tenant_id", "epoch", name="pk_wrapped_secrets"),
    )
    op.create_table(
        "pending_fences",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account", sa.LargeBinary(), nullable=False),
        sa.Column("epoch", sa.BigInteger()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pending_fences"),
    )
    op.create_index("ix_pending_fences_account", "pending_fences", ["account"])


def downgrade() -> None:
    for table in ("pending_fences", "wrapped_secrets", "epochs", "admin_keys", "api_keys", "tenants"):
        op.drop_table(table)
