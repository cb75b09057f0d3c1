"""From rows of `batches` to records: the one reading of a batch, whatever part of it somebody asked for."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Row, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from state.records import TERMINAL, Batch, BatchStatus, Counts, Fault, StopReason, Usage
from state.tables import batches, shards

#: The sums that a shard's row carries, and a batch's at its end (ledger rule 2).
SUMS = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")

#: The deadline in ledger time. Before an orchestrator has stamped it, the wall time it will be near; see `ledger_clock`.
DEADLINE: ColumnElement[float] = func.coalesce(batches.c.deadline, batches.c.created_at + batches.c.window_s)

_PLAIN = [
    "id",
    "project_id",
    "endpoint",
    "input_file_id",
    "completion_window",
    "output_file_id",
    "error_file_id",
    "output_expires_after",
    "created_at",
    "expires_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
]


def workable() -> ColumnElement[bool]:
    """Whether a batch's shards may be claimed: it is running, or finishing found a hole and sent it back to run."""
    reopened = and_(
        batches.c.status == BatchStatus.FINALIZING, batches.c.reopened.is_(True), batches.c.stop_reason.is_(None)
    )
    return or_(batches.c.status == BatchStatus.IN_PROGRESS, reopened)


async def sums(conn: AsyncConnection, batch_ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """What the shards of these batches add up to, in the order of `SUMS`; batches without shards are left out."""
    if not batch_ids:
        return {}
    query = (
        select(shards.c.batch_id, *(func.sum(shards.c[name]) for name in SUMS))
        .where(shards.c.batch_id.in_(batch_ids))
        .group_by(shards.c.batch_id)
    )
    return {row[0]: tuple(int(value) for value in row[1:]) for row in await conn.execute(query)}


async def records(conn: AsyncConnection, rows: Iterable["Row[Any]"]) -> list[Batch]:
    """The records of whole rows of `batches`, with the counts of those that run taken from their shards."""
    found = list(rows)
    running = [row.id for row in found if row.status not in TERMINAL and row.in_progress_at is not None]
    live = await sums(conn, running)
    return [_record(row, live.get(row.id)) for row in found]


async def one(conn: AsyncConnection, *conditions: ColumnElement[bool]) -> Batch | None:
    """The batch that fits, if any."""
    rows = (await conn.execute(select(batches).where(*conditions))).all()
    return (await records(conn, rows))[0] if rows else None


def _record(row: "Row[Any]", live: tuple[int, ...] | None) -> Batch:
    completed, failed, *tokens = live or tuple(getattr(row, name) for name in SUMS)
    return Batch(
        **{name: getattr(row, name) for name in _PLAIN},
        status=BatchStatus(row.status),
        stop_reason=None if row.stop_reason is None else StopReason(row.stop_reason),
        model=row.reply_model or row.model,
        metadata=None if row.metadata is None else orjson.loads(row.metadata),
        faults=decode_faults(row.faults),
        deadline=row.created_at + row.window_s if row.deadline is None else row.deadline,
        counts=Counts(row.total, completed, failed),
        usage=Usage(*tokens),
    )


def encode_faults(faults: Iterable[Fault]) -> str:
    """Faults as the text of a column."""
    return orjson.dumps([[fault.code, fault.message, fault.param, fault.line] for fault in faults]).decode()


def decode_faults(text: str | None) -> tuple[Fault, ...]:
    """The reverse; none for null."""
    return tuple(Fault(*fields) for fields in orjson.loads(text)) if text else ()
