"""Batches that stop before all their requests ran, and what is left of batches that ended. Passed on by `state.batches`.

Expiring is a compare-and-set on the batch's row, like cancelling. Then claims refuse its shards, workers hear of it when
they renew, and the sweeper calls `close_stopped` until no shard is open: so a stopped batch ends whatever its workers do
(invariant 7).
"""

from sqlalchemy import ColumnElement, Row, and_, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state.closing import book_closed, start_finalizing
from state.database import Database
from state.records import TERMINAL, BatchStatus, JobKind, StopReason, WorkState
from state.tables import batches, jobs, segments, shards

#: How many rows one transaction closes or deletes (ledger rule 7).
CHUNK = 100


async def due(db: Database, *, ledger_now: float, limit: int) -> list[str]:
    """Batches whose window is over, in ledger time, and which have not begun to end; the longest overdue first."""
    ends_here = or_(
        batches.c.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)),
        _sent_back(),
    )
    query = (
        select(batches.c.id)
        .where(batches.c.deadline <= ledger_now, ends_here)
        .order_by(batches.c.deadline)
        .limit(limit)
    )
    async with db.read() as conn:
        return list((await conn.scalars(query)).all())


async def expire(db: Database, *, batch_id: str, now: float) -> bool:
    """Stops a batch whose window is over: validating -> expired, in_progress -> finalizing (invariant 6).

    False: it was neither; it has ended, or is about to.
    """
    if await _end_unplanned(db, batch_id, BatchStatus.VALIDATING, BatchStatus.EXPIRED, now):
        return True
    async with db.write() as conn:
        if await start_finalizing(conn, batch_id=batch_id, now=now, stop_reason=StopReason.EXPIRED):
            return True
        again = (
            update(batches)
            .where(batches.c.id == batch_id, _sent_back())
            .values(stop_reason=StopReason.EXPIRED, stopped_at=now)
        )
        return (await conn.execute(again)).rowcount == 1


async def stopped(db: Database, *, limit: int) -> list[str]:
    """Batches that `close_stopped` has to do something for, now or later; the longest stopped first."""
    query = select(batches.c.id).where(_stopped()).order_by(batches.c.stopped_at, batches.c.n).limit(limit)
    async with db.read() as conn:
        return list((await conn.scalars(query)).all())


async def close_stopped(db: Database, *, batch_id: str, now: float, stop_grace: float) -> bool:
    """One step of stopping a batch. True if something changed.

    Closes, with the epoch counted up, the shards that nobody holds: never claimed, given back, or their lease run out;
    and all of them once the batch has been stopped for `stop_grace` seconds, because a worker that was told so long ago
    will not. A stop that seems to lie that far ahead was noted before the clock was set back, and counts as old: else the
    batch would wait until the clock has caught up (invariants 7 and 8). A batch that was cancelled before it was planned ends here, without files.
    """
    if await _end_unplanned(db, batch_id, BatchStatus.CANCELLING, BatchStatus.CANCELLED, now):
        return True
    changed = False
    while await _close_some(db, batch_id, now, stop_grace):
        changed = True
    return changed


async def garbage(db: Database, *, now: float, limit: int, age: float = 3600.0) -> list[str]:
    """Batches that ended more than `age` seconds ago and whose work objects are still there."""
    ended = or_(
        *(and_(batches.c.status == status, batches.c[f"{status}_at"] < int(now - age)) for status in sorted(TERMINAL))
    )
    query = select(batches.c.id).where(batches.c.cleaned.is_(False), ended).order_by(batches.c.n).limit(limit)
    async with db.read() as conn:
        return list((await conn.scalars(query)).all())


async def cleaned(db: Database, *, batch_id: str) -> None:
    """Drops the rows of an ended batch's work, once the objects are gone. The batch and its counts stay.

    Does nothing for a batch that has not ended.
    """
    async with db.read() as conn:
        status = await conn.scalar(select(batches.c.status).where(batches.c.id == batch_id))
    if status not in TERMINAL:
        return
    for number in await _shard_numbers(db, batch_id):
        async with db.write() as conn:
            await conn.execute(
                delete(segments).where(segments.c.batch_id == batch_id, segments.c.shard_number == number)
            )
            await conn.execute(delete(shards).where(shards.c.batch_id == batch_id, shards.c.number == number))
    async with db.write() as conn:
        await conn.execute(delete(jobs).where(jobs.c.batch_id == batch_id))
        await conn.execute(update(batches).where(batches.c.id == batch_id).values(cleaned=True))


def _sent_back() -> ColumnElement[bool]:
    """A batch that finishing sent back to run: its status is finalizing, but its window can still close on it."""
    return and_(
        batches.c.status == BatchStatus.FINALIZING,
        batches.c.reopened.is_(True),
        batches.c.stop_reason.is_(None),
        batches.c.open_shards > 0,
    )


def _stopped() -> ColumnElement[bool]:
    cancelling = and_(
        batches.c.status == BatchStatus.CANCELLING,
        or_(batches.c.open_shards > 0, batches.c.in_progress_at.is_(None)),
    )
    expiring = and_(
        batches.c.status == BatchStatus.FINALIZING,
        batches.c.stop_reason.is_not(None),
        batches.c.open_shards > 0,
    )
    return or_(cancelling, expiring)


async def _end_unplanned(db: Database, batch_id: str, old: BatchStatus, new: BatchStatus, now: float) -> bool:
    """Ends a batch that has no shards, without files, and closes its plan job; False if it is not in that state.

    The job comes first (ledger rule 3): a plan that is being committed at this moment holds it, and wins.
    """
    unplanned = and_(batches.c.id == batch_id, batches.c.status == old, batches.c.in_progress_at.is_(None))
    values = {"status": new, f"{new}_at": int(now)}
    if new is BatchStatus.EXPIRED:
        values |= {"stop_reason": StopReason.EXPIRED, "stopped_at": now}
    async with db.read() as conn:
        if await conn.scalar(select(batches.c.n).where(unplanned)) is None:
            return False
    async with db.write() as conn:
        await conn.execute(
            update(jobs)
            .where(jobs.c.batch_id == batch_id, jobs.c.kind == JobKind.PLAN, jobs.c.state != WorkState.CLOSED)
            .values(state=WorkState.CLOSED, epoch=jobs.c.epoch + 1)
        )
        # If not, it was planned or refused, and the job closed with that; or cancelled, and the job is to be closed anyway.
        return (await conn.execute(update(batches).where(unplanned).values(**values))).rowcount == 1


async def _close_some(db: Database, batch_id: str, now: float, stop_grace: float) -> bool:
    """Closes up to `CHUNK` shards in one transaction: their rows first, locked in order, then the batch's."""
    async with db.write() as conn:
        batch = await _stopped_batch(conn, batch_id)
        if batch is None:
            return False
        overdue = abs(now - batch.stopped_at) >= stop_grace
        free = or_(shards.c.state == WorkState.READY, shards.c.lease_until < now)
        mine = (
            select(shards.c.n)
            .where(shards.c.batch_id == batch_id, shards.c.state != WorkState.CLOSED)
            .order_by(shards.c.number)
            .limit(CHUNK)
            .with_for_update(skip_locked=True)
        )
        numbers = list((await conn.scalars(mine if overdue else mine.where(free))).all())
        if not numbers:
            return False
        await conn.execute(
            update(shards)
            .where(shards.c.n.in_(numbers))
            .values(state=WorkState.CLOSED, epoch=shards.c.epoch + 1, worker_id=None)
        )
        await book_closed(conn, batch_id=batch_id, count=len(numbers), now=now)
        return True


async def _stopped_batch(conn: AsyncConnection, batch_id: str) -> "Row[tuple[float]] | None":
    return (await conn.execute(select(batches.c.stopped_at).where(batches.c.id == batch_id, _stopped()))).one_or_none()


async def _shard_numbers(db: Database, batch_id: str) -> list[int]:
    async with db.read() as conn:
        query = select(shards.c.number).where(shards.c.batch_id == batch_id).order_by(shards.c.number)
        return list((await conn.scalars(query)).all())
