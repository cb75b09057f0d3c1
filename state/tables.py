"""The tables. A row per shard and per segment, never one per request.

Columns `*_at` are whole seconds of wall time; `lease_until`, `not_before`, `stopped_at`, `seen_at` are wall time with its
fraction; `batches.deadline` is in ledger time (`state.ledger_clock`). JSON is kept as text that we encode ourselves.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
)

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

#: Numbers rows in the order of their insertion. SQLite numbers only columns whose type is literally INTEGER.
_Serial = BigInteger().with_variant(Integer(), "sqlite")


def _serial() -> Column[int]:
    return Column("n", _Serial, primary_key=True, autoincrement=True)


def _sums() -> list[Column[int]]:
    names = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    return [Column(name, BigInteger, nullable=False, default=0) for name in names]


files = Table(
    "files",
    metadata,
    _serial(),
    Column("id", Text, nullable=False, unique=True),
    Column("project_id", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("object_key", Text, nullable=False, unique=True),
    Column("bytes", BigInteger, nullable=False, default=0),
    Column("sha256", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Index("ix_files_list", "project_id", "created_at", "n"),
    Index("ix_files_sweep", "status", "expires_at"),
    sqlite_autoincrement=True,
)

batches = Table(
    "batches",
    metadata,
    _serial(),
    Column("id", Text, nullable=False, unique=True),
    Column("project_id", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("window_s", Float, nullable=False),
    Column("metadata", Text),
    Column("output_expires_after", BigInteger),
    Column("status", Text, nullable=False),
    Column("stop_reason", Text),
    Column("stopped_at", Float),
    Column("reopened", Boolean, nullable=False, default=False, server_default=false()),
    Column("model", Text),  # as requested
    Column("reply_model", Text),  # as the first committed reply names it
    Column("index_key", Text),
    Column("open_shards", Integer, nullable=False, default=0),
    Column("total", BigInteger, nullable=False, default=0),
    *_sums(),  # zero until the batch ends; till then they are on its shards (ledger rule 2)
    Column("faults", Text),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("deadline", Float),  # null until an orchestrator stamped it
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Column("cleaned", Boolean, nullable=False, default=False, server_default=false()),
    CheckConstraint("open_shards >= 0", name="open_shards"),
    CheckConstraint("completed + failed <= total", name="counts"),  # invariant 5
    Index("ix_batches_list", "project_id", "created_at", "n"),
    Index("ix_batches_due", "status", "deadline"),
    Index("ix_batches_input", "input_file_id", "status"),
    sqlite_autoincrement=True,
)

shards = Table(
    "shards",
    metadata,
    _serial(),
    Column("batch_id", Text, ForeignKey("batches.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("object_key", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, default=0),
    Column("worker_id", Text),
    Column("lease_until", Float, nullable=False, default=0.0),
    Column("not_before", Float, nullable=False, default=0.0),
    Column("next_seq", BigInteger, nullable=False, default=0),
    *_sums(),
    Column("claims_since_progress", Integer, nullable=False, default=0),
    Column("suspect", BigInteger),
    Column("last_error", Text),
    UniqueConstraint("batch_id", "number"),
    CheckConstraint("completed + failed <= requests", name="counts"),  # invariant 5
    Index("ix_shards_claim", "model", "state", "not_before", "lease_until"),
    Index("ix_shards_worker", "worker_id", "state"),
    sqlite_autoincrement=True,
)

segments = Table(
    "segments",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("shard_number", Integer, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("object_key", Text, nullable=False, unique=True),  # invariant 4
    Column("sha256", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("lines", BigInteger, nullable=False),
    Column("places", LargeBinary, nullable=False),
    ForeignKeyConstraint(["batch_id", "shard_number"], ["shards.batch_id", "shards.number"]),
)

jobs = Table(
    "jobs",
    metadata,
    _serial(),
    Column("id", Text, nullable=False, unique=True),
    Column("kind", Text, nullable=False),
    Column("batch_id", Text, ForeignKey("batches.id"), nullable=False),
    Column("project_id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, default=0),
    Column("holder", Text),
    Column("lease_until", Float, nullable=False, default=0.0),
    Column("not_before", Float, nullable=False, default=0.0),
    Column("attempts", Integer, nullable=False, default=0),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("last_error", Text),
    Column("created_at", BigInteger, nullable=False),
    UniqueConstraint("batch_id", "kind"),  # one plan and one finish per batch, however often they are taken up
    Index("ix_jobs_claim", "state", "not_before", "n"),
    sqlite_autoincrement=True,
)

models = Table(
    "models",
    metadata,
    Column("name", Text, primary_key=True),
    Column("root", Text, nullable=False),
    Column("owned_by", Text, nullable=False),
    Column("endpoints", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("last_seen", Float, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("engine", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("cause", Text),
    Column("models", Text, nullable=False),
    Column("seen_at", Float, nullable=False),
)

clock = Table(
    "clock",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # always 1
    Column("version", BigInteger, nullable=False),
    Column("ledger", Float, nullable=False),
    Column("boot", Text, nullable=False),
    Column("monotonic", Float, nullable=False),
)
