"""What an orchestrator's jobs commit: the plan, the refusal, the results. Passed on by `state.batches`.

Each transaction begins with the fence on the job's row (ledger rule 1: the fence is a lock), which also closes the job;
then shards, then the batch (ledger rule 3, with the job in front).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state import batch_rows
from state.database import Database
from state.records import (
    TERMINAL,
    Batch,
    BatchStatus,
    Fault,
    FileStatus,
    JobLease,
    LeaseLost,
    NewShard,
    StopReason,
    WorkState,
    ending,
    may_move,
)
from state.tables import batches, files, jobs
from state.tables import shards as shard_rows

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Result:
    """A result file, already written: its id is the one chosen when the finish job was made."""

    file_id: str
    object_key: str
    size: int
    sha256: str
    filename: str


async def planned(
    db: Database,
    *,
    job: JobLease,
    model_root: str,
    shards: Sequence[NewShard],
    index_key: str,
    total: int,
    now: float,
    model: str | None = None,
) -> bool:
    """Commits a plan: validating -> in_progress, and the shards. `model` is the name that was asked for, if not the root.

    False: the batch was cancelled or its window closed meanwhile; the plan is discarded and the job closed.

    Raises:
        LeaseLost: the job has another owner, or is closed; nothing was changed.
    """
    if not shards or total != sum(shard.requests for shard in shards):
        raise ValueError("a plan's shards must hold all of its requests, and there must be some")

    async def send(conn: AsyncConnection) -> bool:
        await _close_job(conn, job)
        values = {
            "status": BatchStatus.IN_PROGRESS,
            "in_progress_at": int(now),
            "model": model or model_root,
            "index_key": index_key,
            "total": total,
            "open_shards": len(shards),
        }
        if not await _leave_validating(conn, job, values):
            return False
        await _insert_shards(conn, job.batch_id, model_root, shards)
        return True

    async def found(conn: AsyncConnection) -> bool | None:
        return await _outcome(conn, job, batches.c.index_key == index_key)

    return await db.settle(send, found)


async def refused(db: Database, *, job: JobLease, faults: Sequence[Fault], now: float) -> bool:
    """Commits a refusal: validating -> failed, with its faults. False as for `planned`.

    Raises:
        LeaseLost: the job has another owner, or is closed; nothing was changed.
    """
    values = {
        "status": BatchStatus.FAILED,
        "failed_at": int(now),
        "faults": batch_rows.encode_faults(faults),
    }

    async def send(conn: AsyncConnection) -> bool:
        await _close_job(conn, job)
        return await _leave_validating(conn, job, values)

    async def found(conn: AsyncConnection) -> bool | None:
        return await _outcome(conn, job, batches.c.status == BatchStatus.FAILED)

    return await db.settle(send, found)


async def finished(
    db: Database,
    *,
    job: JobLease,
    output: Result | None,
    error: Result | None,
    now: float,
    output_ttl: int = 30 * _DAY_S,
) -> Batch | None:
    """Commits the results: the files' rows, the frozen counts, the terminal status, all at once.

    A batch that is cancelling ends cancelled, whenever the cancel came; one that was stopped by its window, expired. The
    files expire after the batch's own `output_expires_after`, or else after `output_ttl` seconds. None: the batch is not
    about to end; the job is closed.

    Raises:
        LeaseLost: the job has another owner, or is closed; nothing was changed.
    """
    chosen = (output.file_id if output else None, error.file_id if error else None)

    async def send(conn: AsyncConnection) -> Batch | None:
        await _close_job(conn, job)
        row = (await conn.execute(select(batches).where(batches.c.id == job.batch_id).with_for_update())).one()
        status = BatchStatus(row.status)
        if status not in (BatchStatus.FINALIZING, BatchStatus.CANCELLING) or row.open_shards:
            return None
        lifetime = output_ttl if row.output_expires_after is None else row.output_expires_after
        for result in (output, error):
            if result is not None:
                await _insert_result(conn, row.project_id, result, now, lifetime)
        reason = None if row.stop_reason is None else StopReason(row.stop_reason)
        values = await _frozen(conn, job.batch_id, row.total)
        values |= {"output_file_id": chosen[0], "error_file_id": chosen[1]}
        await _end(conn, job.batch_id, status, ending(status, reason), values, now)
        return await batch_rows.one(conn, batches.c.id == job.batch_id)

    async def found(conn: AsyncConnection) -> Batch | None:
        if not await _outcome(conn, job, batches.c.status.in_(TERMINAL)):
            return None
        return await batch_rows.one(conn, batches.c.id == job.batch_id)

    return await db.settle(send, found)


async def _close_job(conn: AsyncConnection, job: JobLease) -> None:
    """The fence: the first statement of the transaction, and a lock on the job's row."""
    change = (
        update(jobs)
        .where(jobs.c.id == job.id, jobs.c.epoch == job.epoch, jobs.c.state == WorkState.LEASED)
        .values(state=WorkState.CLOSED)
    )
    if (await conn.execute(change)).rowcount != 1:
        raise LeaseLost(f"{job.id} is no longer held under epoch {job.epoch}")


async def _leave_validating(conn: AsyncConnection, job: JobLease, values: dict[str, object]) -> bool:
    change = (
        update(batches).where(batches.c.id == job.batch_id, batches.c.status == BatchStatus.VALIDATING).values(**values)
    )
    return (await conn.execute(change)).rowcount == 1


async def _insert_shards(conn: AsyncConnection, batch_id: str, model: str, cut: Sequence[NewShard]) -> None:
    rows = [
        {
            "batch_id": batch_id,
            "number": shard.number,
            "state": WorkState.READY,
            "model": model,
            "requests": shard.requests,
            "size": shard.size,
            "object_key": shard.object_key,
        }
        for shard in cut
    ]
    await conn.execute(shard_rows.insert(), rows)


async def _insert_result(conn: AsyncConnection, project_id: str, result: Result, now: float, lifetime: int) -> None:
    row = {
        "id": result.file_id,
        "project_id": project_id,
        "purpose": "batch_output",
        "filename": result.filename,
        "status": FileStatus.PROCESSED,
        "object_key": result.object_key,
        "bytes": result.size,
        "sha256": result.sha256,
        "created_at": int(now),
        "expires_at": int(now) + lifetime,
    }
    await conn.execute(files.insert().values(row))


async def _frozen(conn: AsyncConnection, batch_id: str, total: int) -> dict[str, object]:
    """The sums over the shards as they go into the batch's own row (ledger rule 2)."""
    live = (await batch_rows.sums(conn, [batch_id])).get(batch_id, (0,) * len(batch_rows.SUMS))
    return {"total": total, **dict(zip(batch_rows.SUMS, live, strict=True))}


async def _end(
    conn: AsyncConnection, batch_id: str, old: BatchStatus, new: BatchStatus, values: dict[str, object], now: float
) -> None:
    """Terminal is final, and each time is set once (invariant 6)."""
    assert may_move(old, new)
    change = (
        update(batches)
        .where(batches.c.id == batch_id, batches.c.status == old)
        .values(**values, **{"status": new, f"{new}_at": int(now)})
    )
    assert (await conn.execute(change)).rowcount == 1, "the row is locked, so its status cannot have changed"


async def _outcome(conn: AsyncConnection, job: JobLease, condition: ColumnElement[bool]) -> bool | None:
    """Whether the batch fits, if it was this lease that closed the job; None if it was not (ledger rule 4)."""
    query = (
        select(condition)
        .select_from(jobs.join(batches, batches.c.id == jobs.c.batch_id))
        .where(jobs.c.id == job.id, jobs.c.epoch == job.epoch, jobs.c.state == WorkState.CLOSED)
    )
    row = (await conn.execute(query)).one_or_none()
    return None if row is None else bool(row[0])
