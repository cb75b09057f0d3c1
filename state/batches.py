"""Batches: made, read, listed, cancelled. Their planning and their end are in the modules whose names are passed on below.

Every change of status is a compare-and-set on the row (invariant 6). Cancelling and expiring touch nothing else; the
sweeper closes the shards afterwards (ledger rule 3).
"""

from collections.abc import Mapping

import orjson
from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state import batch_rows
from state.batch_ends import Result, finished, planned, refused
from state.batch_stops import cleaned, close_stopped, due, expire, garbage, stopped
from state.database import Database
from state.ids import new_job_id
from state.records import (
    TERMINAL,
    Batch,
    BatchNotCancellable,
    BatchNotFound,
    BatchStatus,
    JobKind,
    Page,
    StopReason,
    WorkState,
    may_move,
)
from state.tables import batches, jobs

__all__ = [
    "Result",
    "cancel",
    "cleaned",
    "close_stopped",
    "create",
    "due",
    "expire",
    "finished",
    "garbage",
    "get",
    "open_counts",
    "page",
    "planned",
    "refused",
    "stopped",
]

_CANCELLABLE = [status for status in BatchStatus if may_move(status, BatchStatus.CANCELLING)]
_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


async def create(
    db: Database,
    *,
    batch_id: str,
    project_id: str,
    endpoint: str,
    input_file_id: str,
    completion_window: str,
    window_s: float,
    metadata: Mapping[str, str] | None,
    output_expires_after: int | None,
    now: float,
) -> Batch:
    """Inserts a batch and its plan job, as one.

    Whether the input file exists is not looked at: planning says so in the batch's errors. The deadline is stamped by the
    orchestrator's next tick of the ledger clock, because only there is it known what time the ledger has; until then the
    record shows where it will be, near enough.
    """
    batch = {
        "id": batch_id,
        "project_id": project_id,
        "endpoint": endpoint,
        "input_file_id": input_file_id,
        "completion_window": completion_window,
        "window_s": window_s,
        "metadata": None if metadata is None else orjson.dumps(dict(metadata)).decode(),
        "output_expires_after": output_expires_after,
        "status": BatchStatus.VALIDATING,
        "created_at": int(now),
        "expires_at": int(now + window_s),
    }
    job = {
        "id": new_job_id(),
        "kind": JobKind.PLAN,
        "batch_id": batch_id,
        "project_id": project_id,
        "state": WorkState.READY,
        "created_at": int(now),
    }

    async def send(conn: AsyncConnection) -> Batch:
        await conn.execute(batches.insert().values(batch))
        await conn.execute(jobs.insert().values(job))
        made = await found(conn)
        assert made is not None
        return made

    async def found(conn: AsyncConnection) -> Batch | None:
        return await batch_rows.one(conn, batches.c.id == batch_id, batches.c.project_id == project_id)

    return await db.settle(send, found)


async def get(db: Database, *, project_id: str, batch_id: str) -> Batch:
    """A batch as it stands now.

    Raises:
        BatchNotFound: unknown, or of another project.
    """
    async with db.read() as conn:
        batch = await batch_rows.one(conn, *_mine(project_id, batch_id))
    if batch is None:
        raise BatchNotFound(batch_id)
    return batch


async def page(db: Database, *, project_id: str, limit: int, after: str | None) -> Page[Batch]:
    """Batches, newest first; within a second, those made later first.

    Raises:
        BatchNotFound: `after` is no batch of this project.
    """
    at, n = batches.c.created_at, batches.c.n
    query = select(batches).where(batches.c.project_id == project_id).order_by(at.desc(), n.desc()).limit(limit + 1)
    async with db.read() as conn:
        if after is not None:
            cursor = (await conn.execute(select(at, n).where(*_mine(project_id, after)))).one_or_none()
            if cursor is None:
                raise BatchNotFound(after)
            older = or_(at < cursor.created_at, and_(at == cursor.created_at, n < cursor.n))
            query = query.where(older)
        rows = (await conn.execute(query)).all()
        items = await batch_rows.records(conn, rows[:limit])
    return Page(tuple(items), has_more=len(rows) > limit > 0)


async def cancel(db: Database, *, project_id: str, batch_id: str, now: float) -> Batch:
    """Moves a batch to cancelling. One that is cancelling or cancelled is returned as it is.

    A batch whose window is over keeps that as the reason its requests did not run.

    Raises:
        BatchNotFound: unknown, or of another project.
        BatchNotCancellable: it has ended otherwise.
    """
    change = (
        update(batches)
        .where(*_mine(project_id, batch_id), batches.c.status.in_(_CANCELLABLE))
        .values(
            status=BatchStatus.CANCELLING,
            cancelling_at=int(now),
            stop_reason=func.coalesce(batches.c.stop_reason, StopReason.CANCELLED.value),
            stopped_at=func.coalesce(batches.c.stopped_at, now),
        )
    )

    async def send(conn: AsyncConnection) -> Batch:
        await conn.execute(change)
        batch = await batch_rows.one(conn, *_mine(project_id, batch_id))
        if batch is None:
            raise BatchNotFound(batch_id)
        if batch.status not in _CANCELLED:
            raise BatchNotCancellable(batch.status)
        return batch

    async def found(conn: AsyncConnection) -> Batch | None:
        batch = await batch_rows.one(conn, *_mine(project_id, batch_id))
        return batch if batch is not None and batch.status in _CANCELLED else None

    return await db.settle(send, found)


async def open_counts(db: Database) -> dict[BatchStatus, int]:
    """How many batches of all projects are in each status that is not the end; zero is left out."""
    query = (
        select(batches.c.status, func.count())
        .where(batches.c.status.in_([status for status in BatchStatus if status not in TERMINAL]))
        .group_by(batches.c.status)
    )
    async with db.read() as conn:
        return {BatchStatus(status): count for status, count in await conn.execute(query)}


def _mine(project_id: str, batch_id: str) -> tuple[ColumnElement[bool], ...]:
    return (batches.c.id == batch_id, batches.c.project_id == project_id)
