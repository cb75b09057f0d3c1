"""The last one out: how a closed shard is booked on its batch, and how the last one makes the finish job.

Ledger rule 2. The batch's row counts its open shards; whoever brings it to zero, and nobody else, makes the finish job in
the same transaction. Counting open shards by looking at them would let two that close at once each see the other's as
open. The caller holds the shard's row; the batch's row is locked here, after it (ledger rule 3).
"""

from sqlalchemy import func, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state.ids import new_file_id, new_job_id
from state.records import BatchStatus, JobKind, WorkState
from state.tables import batches, jobs


async def book_closed(conn: AsyncConnection, *, batch_id: str, count: int, now: float) -> None:
    """Books `count` shards that this transaction closed. The last one moves a running batch to finalizing."""
    left = (
        await conn.execute(
            update(batches)
            .where(batches.c.id == batch_id)
            .values(open_shards=batches.c.open_shards - count)
            .returning(batches.c.open_shards, batches.c.project_id)
        )
    ).one()
    if left.open_shards == 0:
        await start_finalizing(conn, batch_id=batch_id, now=now)  # one that is cancelling stays so
        await _make_finish_job(conn, batch_id, left.project_id, now)


async def start_finalizing(conn: AsyncConnection, *, batch_id: str, now: float, stop_reason: str | None = None) -> bool:
    """in_progress -> finalizing, if that is where the batch is (invariant 6)."""
    values: dict[str, object] = {
        "status": BatchStatus.FINALIZING,
        "finalizing_at": func.coalesce(batches.c.finalizing_at, int(now)),
    }
    if stop_reason is not None:
        values |= {"stop_reason": stop_reason, "stopped_at": now}
    change = (
        update(batches).where(batches.c.id == batch_id, batches.c.status == BatchStatus.IN_PROGRESS).values(**values)
    )
    return (await conn.execute(change)).rowcount == 1


async def _make_finish_job(conn: AsyncConnection, batch_id: str, project_id: str, now: float) -> None:
    """Makes the finish job, or makes the one of a batch that was sent back ready again.

    It is the same row then, so that its epoch goes on growing and no key under it is written twice (invariant 4). The ids
    of the result files are chosen here, once, whatever becomes of the attempts (ledger rule 4).
    """
    again = (
        update(jobs)
        .where(jobs.c.batch_id == batch_id, jobs.c.kind == JobKind.FINISH, jobs.c.state == WorkState.CLOSED)
        .values(state=WorkState.READY, not_before=0.0, attempts=0, holder=None)
    )
    if (await conn.execute(again)).rowcount == 0:
        row = {
            "id": new_job_id(),
            "kind": JobKind.FINISH,
            "batch_id": batch_id,
            "project_id": project_id,
            "state": WorkState.READY,
            "output_file_id": new_file_id(),
            "error_file_id": new_file_id(),
            "created_at": int(now),
        }
        await conn.execute(jobs.insert().values(row))
