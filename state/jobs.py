"""Jobs: a batch's plan and its finish, leased to orchestrators as shards are to workers, with the same fence."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Row, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state import batch_rows, files, leasing, shards
from state.database import Database
from state.records import Batch, File, FileStatus, JobKind, JobLease, LeaseLost, Segment, WorkState
from state.shards import ShardInfo
from state.tables import batches, jobs
from state.tables import files as file_rows
from state.workers import count_recent

#: How often a job may lose its process before its batch is given up.
MOST_LOST = 3


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What planning needs. `file` is None when the input is not there: unknown, of another project, or deleted."""

    batch: Batch
    file: File | None
    workers: int
    """How many workers are about; at least 1."""


@dataclass(frozen=True, slots=True)
class FinishInput:
    """What finishing needs: all of it closed, so that nothing here changes any more."""

    batch: Batch
    index_key: str
    shards: tuple[ShardInfo, ...]
    segments: tuple[Segment, ...]
    total: int


async def claim(db: Database, *, holder: str, now: float, ttl: float, grace: float = 0.0) -> JobLease | None:
    """Takes one job, if there is one: those that were never put off first, in the order they were made in.

    `attempts` of the lease counts this claim and those before it that were lost with their holders.
    """
    first = (
        select(jobs.c.n)
        .where(leasing.claimable(jobs, now=now, grace=grace))
        .order_by(jobs.c.not_before, jobs.c.n)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    take = (
        update(jobs)
        .where(jobs.c.n == first.scalar_subquery())
        .values(
            state=WorkState.LEASED,
            epoch=jobs.c.epoch + 1,
            attempts=jobs.c.attempts + 1,
            holder=holder,
            lease_until=leasing.lease_until(now, ttl),
        )
        .returning(jobs)
    )
    async with db.write() as conn:
        row = (await conn.execute(take)).one_or_none()
    return None if row is None else _lease(row)


async def renew(db: Database, *, job: JobLease, now: float, ttl: float) -> bool:
    """Renews the lease, even late; False when it has another owner or is closed (ledger rule 6)."""
    change = update(jobs).where(*_held(job)).values(lease_until=leasing.lease_until(now, ttl))
    async with db.write() as conn:
        return (await conn.execute(change)).rowcount == 1


async def release(
    db: Database, *, job: JobLease, now: float, delay: float, error: str | None = None, lost: bool = False
) -> None:
    """Gives the job back for `delay` seconds (at most ten minutes).

    `lost` says that the process doing it died though its holder lives: the attempt counts, as if the holder had died too.

    Raises:
        LeaseLost: the job has another owner, or is closed.
    """
    values = {
        "state": WorkState.READY,
        "holder": None,
        "attempts": jobs.c.attempts if lost else jobs.c.attempts - 1,
        "not_before": leasing.put_off_until(now, now + delay) if delay > 0 else 0.0,
        "last_error": error,
    }

    async def send(conn: AsyncConnection) -> bool:
        if (await conn.execute(update(jobs).where(*_held(job)).values(**values))).rowcount != 1:
            raise LeaseLost(f"{job.id} is no longer held under epoch {job.epoch}")
        return True

    async def found(conn: AsyncConnection) -> bool | None:
        same = (jobs.c.id == job.id, jobs.c.epoch == job.epoch, jobs.c.state == WorkState.READY)
        return (await conn.scalar(select(jobs.c.n).where(*same))) is not None or None

    await db.settle(send, found)


async def expire_leases(db: Database, *, holder: str | None = None) -> None:
    """Ends the leases of an orchestrator that is certainly dead, or all of them when every one is."""
    async with db.write() as conn:
        await conn.execute(leasing.ended_by_death(jobs, column="holder", holder=holder))


async def details(db: Database, *, job: JobLease) -> PlanInput | FinishInput:
    """What a job needs to be done."""
    async with db.read() as conn:
        batch = await batch_rows.one(conn, batches.c.id == job.batch_id)
        assert batch is not None
        if job.kind is JobKind.PLAN:
            return PlanInput(batch, await _input_file(conn, batch), max(1, await count_recent(conn)))
        index_key = await conn.scalar(select(batches.c.index_key).where(batches.c.id == job.batch_id))
    assert index_key is not None
    return FinishInput(
        batch=batch,
        index_key=index_key,
        shards=tuple(await shards.shard_list(db, batch_id=batch.id)),
        segments=tuple(await shards.all_segments(db, batch_id=batch.id)),
        total=batch.counts.total,
    )


def _held(job: JobLease) -> tuple[ColumnElement[bool], ...]:
    return (jobs.c.id == job.id, jobs.c.epoch == job.epoch, jobs.c.state == WorkState.LEASED)


async def _input_file(conn: AsyncConnection, batch: Batch) -> File | None:
    query = select(*files.COLUMNS).where(
        file_rows.c.id == batch.input_file_id,
        file_rows.c.project_id == batch.project_id,
        file_rows.c.status == FileStatus.PROCESSED,
    )
    row = (await conn.execute(query)).one_or_none()
    return None if row is None else files.record(row)


def _lease(row: "Row[tuple[object, ...]]") -> JobLease:
    names = ["id", "batch_id", "project_id", "epoch", "holder", "attempts", "output_file_id", "error_file_id"]
    return JobLease(kind=JobKind(row.kind), **{name: getattr(row, name) for name in names})
