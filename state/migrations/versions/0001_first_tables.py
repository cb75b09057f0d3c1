"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    create_files()
    create_batches()
    create_shards()
    create_segments()
    create_jobs()
    create_engines()
    create_clock()


def serial() -> "sa.Column[int]":
    return sa.Column("n", SERIAL, primary_key=True, autoincrement=True)


def sums() -> "list[sa.Column[int]]":
    names = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]


def create_files() -> None:
    op.create_table(
        "files",
        serial(),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("object_key", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.UniqueConstraint("id", name="uq_files_id"),
        sa.UniqueConstraint("object_key", name="uq_files_object_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_files_list", "files", ["project_id", "created_at", "n"])
    op.create_index("ix_files_sweep", "files", ["status", "expires_at"])


def create_batches() -> None:
    op.create_table(
        "batches",
        serial(),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("completion_window", sa.Text, nullable=False),
        sa.Column("window_s", sa.Float, nullable=False),
        sa.Column("metadata", sa.Text),
        sa.Column("output_expires_after", sa.BigInteger),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("stop_reason", sa.Text),
        sa.Column("stopped_at", sa.Float),
        sa.Column("reopened", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("model", sa.Text),
        sa.Column("reply_model", sa.Text),
        sa.Column("index_key", sa.Text),
        sa.Column("open_shards", sa.Integer, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        *sums(),
        sa.Column("faults", sa.Text),
        sa.Column("output_file_id", sa.Text),
        sa.Column("error_file_id", sa.Text),
        sa.Column("deadline", sa.Float),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.Column("in_progress_at", sa.BigInteger),
        sa.Column("finalizing_at", sa.BigInteger),
        sa.Column("completed_at", sa.BigInteger),
        sa.Column("failed_at", sa.BigInteger),
        sa.Column("expired_at", sa.BigInteger),
        sa.Column("cancelling_at", sa.BigInteger),
        sa.Column("cancelled_at", sa.BigInteger),
        sa.Column("cleaned", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.UniqueConstraint("id", name="uq_batches_id"),
        sa.CheckConstraint("open_shards >= 0", name=op.f("ck_batches_open_shards")),
        sa.CheckConstraint("completed + failed <= total", name=op.f("ck_batches_counts")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_batches_list", "batches", ["project_id", "created_at", "n"])
    op.create_index("ix_batches_due", "batches", ["status", "deadline"])
    op.create_index("ix_batches_input", "batches", ["input_file_id", "status"])


def create_shards() -> None:
    op.create_table(
        "shards",
        serial(),
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("object_key", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("worker_id", sa.Text),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("not_before", sa.Float, nullable=False),
        sa.Column("next_seq", sa.BigInteger, nullable=False),
        *sums(),
        sa.Column("claims_since_progress", sa.Integer, nullable=False),
        sa.Column("suspect", sa.BigInteger),
        sa.Column("last_error", sa.Text),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_shards_batches"),
        sa.UniqueConstraint("batch_id", "number", name="uq_shards_batch_id_number"),
        sa.CheckConstraint("completed + failed <= requests", name=op.f("ck_shards_counts")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_shards_claim", "shards", ["model", "state", "not_before", "lease_until"])
    op.create_index("ix_shards_worker", "shards", ["worker_id", "state"])


def create_segments() -> None:
    op.create_table(
        "segments",
        sa.Column("batch_id", sa.Text, primary_key=True),
        sa.Column("shard_number", sa.Integer, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("object_key", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("lines", sa.BigInteger, nullable=False),
        sa.Column("places", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["batch_id", "shard_number"], ["shards.batch_id", "shards.number"], name="fk_segments_shards"
        ),
        sa.UniqueConstraint("object_key", name="uq_segments_object_key"),
    )


def create_jobs() -> None:
    op.create_table(
        "jobs",
        serial(),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("not_before", sa.Float, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("output_file_id", sa.Text),
        sa.Column("error_file_id", sa.Text),
        sa.Column("last_error", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_jobs_batches"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("batch_id", "kind", name="uq_jobs_batch_id_kind"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_claim", "jobs", ["state", "not_before", "n"])


def create_engines() -> None:
    op.create_table(
        "models",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("owned_by", sa.Text, nullable=False),
        sa.Column("endpoints", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("last_seen", sa.Float, nullable=False),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("cause", sa.Text),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("seen_at", sa.Float, nullable=False),
    )


def create_clock() -> None:
    op.create_table(
        "clock",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("ledger", sa.Float, nullable=False),
        sa.Column("boot", sa.Text, nullable=False),
        sa.Column("monotonic", sa.Float, nullable=False),
    )


def downgrade() -> None:
    for name in ("clock", "workers", "models", "jobs", "segments", "shards", "batches", "files"):
        op.drop_table(name)
