"""Two processes at once on the same rows: each with connections of its own, both under way at the same time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from sqlalchemy import func, select

from state import batches, jobs, shards
from state.database import Database
from state.records import BatchNotCancellable, BatchStatus, Counts, JobKind, LeaseLost
from state.tables import jobs as job_rows
from tests.state.making import (
    GRACE,
    MODEL,
    NOW,
    PROJECT,
    TTL,
    append,
    claim,
    claim_job,
    create,
    cut,
    finish,
    look,
    result,
    run_out,
    running,
)

ROUNDS = range(8)


async def race(*sides: Coroutine[Any, Any, Any]) -> list[Any]:
    return await asyncio.gather(*sides, return_exceptions=True)


async def finish_jobs(db: Database) -> int:
    async with db.read() as conn:
        query = select(func.count()).where(job_rows.c.kind == JobKind.FINISH)
        return await conn.scalar(query) or 0


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_two_workers_that_close_the_last_two_shards_at_once_make_one_finish_job(
    db: Database, other_db: Database, attempt: int
) -> None:
    """Ledger rule 2: by looking for open shards, both would see the other's."""
    batch = await running(db, 1, 1)
    first, second = await claim(db), await claim(db)
    await race(run_out(db, first), run_out(other_db, second))
    assert await finish_jobs(db) == 1
    assert (await look(db, batch)).status is BatchStatus.FINALIZING


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_two_workers_never_claim_the_same_shard(db: Database, other_db: Database, attempt: int) -> None:
    await running(db, 1, 1, 1)
    taken = await race(*(claim(one) for one in (db, other_db, db)))
    assert sorted(lease.number for lease in taken) == [0, 1, 2]


async def test_a_takeover_and_the_old_owners_segment_at_once_leave_one_truth(db: Database, other_db: Database) -> None:
    """Whatever came first: the new owner reads what was committed, and the rest is refused (invariants 3 and 4)."""
    for _ in ROUNDS:
        batch = await running(db, 1)
        old = await claim(db)
        late = NOW + TTL + GRACE + 1
        kept, new = await race(append(db, old, 0, now=late), claim(other_db, worker="worker-2", now=late))
        seen = await shards.segments(other_db, batch_id=batch.id, number=0)
        assert isinstance(kept, LeaseLost) == (seen == [])
        assert new.next_seq == len(seen)
        await (shards.close(db, lease=new, now=late) if seen else append(db, new, 0, close=True, now=late))
        assert (await look(db, batch)).counts == Counts(1, 1, 0)
        await finish(db, now=late)


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_a_cancel_at_the_moment_of_the_last_close(db: Database, other_db: Database, attempt: int) -> None:
    batch = await running(db, 1)
    lease = await claim(db)
    await race(run_out(db, lease), batches.cancel(other_db, project_id=PROJECT, batch_id=batch.id, now=NOW))
    assert (await look(db, batch)).status is BatchStatus.CANCELLING
    assert await finish_jobs(db) == 1
    done = await finish(db)
    assert done is not None
    assert (done.status, done.counts) == (BatchStatus.CANCELLED, Counts(1, 1, 0))


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_a_cancel_at_the_moment_of_the_plan(db: Database, other_db: Database, attempt: int) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    planned, _ = await race(
        batches.planned(db, job=job, model_root=MODEL, shards=cut(batch.id, [1]), index_key="i", total=1, now=NOW),
        batches.cancel(other_db, project_id=PROJECT, batch_id=batch.id, now=NOW),
    )
    await batches.close_stopped(db, batch_id=batch.id, now=NOW, stop_grace=0.0)
    if planned:
        await finish(db)
    done = await look(db, batch)
    assert done.status is BatchStatus.CANCELLED
    assert (done.in_progress_at is not None) == planned


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_a_cancel_at_the_moment_of_the_end(db: Database, other_db: Database, attempt: int) -> None:
    """Either the cancel came first and the batch ends cancelled, or the cancel is told that it came too late."""
    batch = await running(db, 1)
    await run_out(db, await claim(db))
    job = await claim_job(db, JobKind.FINISH)
    done, cancelled = await race(
        batches.finished(db, job=job, output=result(job, "output"), error=None, now=NOW),
        batches.cancel(other_db, project_id=PROJECT, batch_id=batch.id, now=NOW),
    )
    too_late = isinstance(cancelled, BatchNotCancellable)
    assert done.status is (BatchStatus.COMPLETED if too_late else BatchStatus.CANCELLED)
    assert await look(db, batch) == done


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_a_window_that_closes_at_the_moment_of_the_last_close(
    db: Database, other_db: Database, attempt: int
) -> None:
    batch = await running(db, 1)
    lease = await claim(db)
    _, expired = await race(run_out(db, lease), batches.expire(other_db, batch_id=batch.id, now=NOW))
    assert await finish_jobs(db) == 1
    done = await finish(db)
    assert done is not None
    assert done.status is (BatchStatus.EXPIRED if expired else BatchStatus.COMPLETED)


@pytest.mark.parametrize("attempt", ROUNDS)
async def test_the_sweeper_and_the_worker_close_a_stopped_shard_once(
    db: Database, other_db: Database, attempt: int
) -> None:
    batch = await running(db, 1, 1)
    lease = await claim(db)
    await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    await race(run_out(db, lease), batches.close_stopped(other_db, batch_id=batch.id, now=NOW + 100, stop_grace=1.0))
    assert await finish_jobs(db) == 1
    assert await batches.stopped(db, limit=10) == []


async def test_two_sweepers_at_once_do_no_harm(db: Database, other_db: Database) -> None:
    batch = await running(db, *([1] * 150))
    await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    await race(*(batches.close_stopped(one, batch_id=batch.id, now=NOW, stop_grace=1.0) for one in (db, other_db)))
    assert await finish_jobs(db) == 1
    done = await finish(db)
    assert done is not None


async def test_two_orchestrators_never_hold_the_same_job(db: Database, other_db: Database) -> None:
    for _ in ROUNDS:
        await create(db)
        taken = await race(*(jobs.claim(one, holder="o", now=NOW, ttl=TTL) for one in (db, other_db)))
        assert sum(job is not None for job in taken) == 1
