"""How shards find their workers, and how finishing sends some back. Passed on by `state.shards`."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state import batch_rows, leasing
from state.database import Database
from state.records import BatchStatus, JobKind, JobLease, LeaseLost, ShardLease, WorkState
from state.tables import batches, jobs, shards


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch with shards that a worker may claim now. `deadline` is ledger time, `created_at` wall time."""

    batch_id: str
    project_id: str
    deadline: float
    created_at: int
    ready_shards: int


async def candidates(db: Database, *, models: Sequence[str], now: float, grace: float) -> list[Candidate]:
    """The batches with shards for these models (by root name) that may be claimed now, oldest first."""
    query = (
        select(
            batches.c.id,
            batches.c.project_id,
            batch_rows.DEADLINE.label("deadline"),
            batches.c.created_at,
            func.count().label("ready"),
        )
        .join_from(shards, batches, batches.c.id == shards.c.batch_id)
        .where(*_claimable(models, now, grace))
        .group_by(
            batches.c.id,
            batches.c.project_id,
            batches.c.deadline,
            batches.c.created_at,
            batches.c.window_s,
            batches.c.n,
        )
        .order_by(batches.c.n)
    )
    async with db.read() as conn:
        return [
            Candidate(row.id, row.project_id, row.deadline, row.created_at, row.ready)
            for row in await conn.execute(query)
        ]


async def claim(
    db: Database,
    *,
    worker_id: str,
    models: Sequence[str],
    now: float,
    ttl: float,
    grace: float,
    batch_id: str | None = None,
    exclude_batches: Sequence[str] = (),
) -> ShardLease | None:
    """Takes one shard for these models (by root name), if there is one: the oldest batch's first.

    The epoch counts up, so that the owner before can commit nothing from here on (invariant 4). `claims_since_progress`
    of the lease counts this claim: 1 at the first. `suspect` is what a careful worker noted before it died.
    """
    first = (
        select(shards.c.n)
        .join_from(shards, batches, batches.c.id == shards.c.batch_id)
        .where(*_claimable(models, now, grace))
        .order_by(batches.c.n, shards.c.number)
        .limit(1)
        .with_for_update(skip_locked=True, of=shards)
    )
    if batch_id is not None:
        first = first.where(shards.c.batch_id == batch_id)
    if exclude_batches:
        first = first.where(shards.c.batch_id.not_in(list(exclude_batches)))
    take = (
        update(shards)
        .where(shards.c.n == first.scalar_subquery())
        .values(
            state=WorkState.LEASED,
            epoch=shards.c.epoch + 1,
            worker_id=worker_id,
            lease_until=leasing.lease_until(now, ttl),
            claims_since_progress=shards.c.claims_since_progress + 1,
        )
        .returning(shards.c.n)
    )
    async with db.write() as conn:
        n = await conn.scalar(take)
        return None if n is None else await _lease(conn, n)


async def reopen(
    db: Database, *, batch_id: str, numbers: Sequence[int], now: float, job: JobLease | None = None
) -> bool:
    """Sends shards back to run, because finishing found lines without a result in them (invariant 1).

    The batch stays finalizing, as a client never sees it go back (invariant 6); it is marked, so that claims accept it,
    and its finish job is closed until the last shard closes again. False: the batch was stopped meanwhile, so that
    lines that never ran are in order, and nothing was changed.

    Raises:
        LeaseLost: `job` has another owner, or is closed.
    """

    async def send(conn: AsyncConnection) -> bool:
        await _close_finish_job(conn, batch_id, job)
        back = (
            update(shards)
            .where(
                shards.c.batch_id == batch_id,
                shards.c.number.in_(list(numbers)),
                shards.c.state == WorkState.CLOSED,
            )
            .values(state=WorkState.READY, not_before=0.0, claims_since_progress=0, suspect=None)
        )
        count = (await conn.execute(back)).rowcount
        change = (
            update(batches)
            .where(
                batches.c.id == batch_id,
                batches.c.status == BatchStatus.FINALIZING,
                batches.c.stop_reason.is_(None),
            )
            .values(open_shards=batches.c.open_shards + count, reopened=True)
        )
        if count == 0 or (await conn.execute(change)).rowcount != 1:
            raise _NotReopened
        return True

    try:
        async with db.write() as conn:
            return await send(conn)
    except _NotReopened:
        return False


class _NotReopened(Exception):
    """Rolls the transaction back."""


async def _close_finish_job(conn: AsyncConnection, batch_id: str, job: JobLease | None) -> None:
    """The fence of `reopen`: from here on nobody finishes the batch until the job is made ready again."""
    change = update(jobs).where(
        jobs.c.batch_id == batch_id, jobs.c.kind == JobKind.FINISH, jobs.c.state != WorkState.CLOSED
    )
    if job is not None:
        change = change.where(jobs.c.id == job.id, jobs.c.epoch == job.epoch, jobs.c.state == WorkState.LEASED)
    if (await conn.execute(change.values(state=WorkState.CLOSED))).rowcount != 1:
        raise LeaseLost(f"the finish job of {batch_id} has another owner, or is closed")


def _claimable(models: Sequence[str], now: float, grace: float) -> tuple[ColumnElement[bool], ...]:
    return (
        shards.c.model.in_(list(models)),
        leasing.claimable(shards, now=now, grace=grace),
        batch_rows.workable(),
    )


async def _lease(conn: AsyncConnection, n: int) -> ShardLease:
    names = [
        "batch_id",
        "number",
        "epoch",
        "worker_id",
        "model",
        "object_key",
        "requests",
        "size",
        "next_seq",
        "claims_since_progress",
        "suspect",
    ]
    query = (
        select(
            *(shards.c[name] for name in names),
            batches.c.project_id,
            batches.c.endpoint,
            batch_rows.DEADLINE.label("deadline"),
            batches.c.created_at.label("batch_created_at"),
        )
        .join_from(shards, batches, batches.c.id == shards.c.batch_id)
        .where(shards.c.n == n)
    )
    return ShardLease(**(await conn.execute(query)).one()._asdict())
