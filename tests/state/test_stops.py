"""Stopping: a cancelled or expired batch ends in time whatever its workers do (invariant 7), and leaves nothing behind."""

import pytest
from sqlalchemy import func, select

from state import batches, jobs, shards
from state import tables as rows
from state.database import Database
from state.records import Batch, BatchStatus, Counts, JobKind, LeaseLost, StopReason, WorkState
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
    plan,
    run_out,
    running,
)

STOP_GRACE = 20.0


async def stamp(db: Database, batch: Batch, deadline: float) -> None:
    async with db.write() as conn:
        await conn.execute(rows.batches.update().where(rows.batches.c.id == batch.id).values(deadline=deadline))


async def cancel(db: Database, batch: Batch, *, now: float = NOW) -> Batch:
    return await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=now)


async def sweep(db: Database, batch: Batch, *, now: float = NOW) -> bool:
    return await batches.close_stopped(db, batch_id=batch.id, now=now, stop_grace=STOP_GRACE)


async def states(db: Database, batch: Batch) -> list[WorkState]:
    return [info.state for info in await shards.shard_list(db, batch_id=batch.id)]


async def test_batches_are_due_when_their_deadline_has_passed_in_ledger_time(db: Database) -> None:
    late, later, stopped, unstamped = [await create(db) for _ in range(4)]
    await stamp(db, later, 50.0)
    await stamp(db, late, 100.0)
    await stamp(db, stopped, 1.0)
    await cancel(db, stopped)
    assert await batches.due(db, ledger_now=49.9, limit=10) == []
    assert await batches.due(db, ledger_now=100.0, limit=10) == [later.id, late.id]
    assert await batches.due(db, ledger_now=100.0, limit=1) == [later.id]
    assert unstamped.id not in await batches.due(db, ledger_now=1e12, limit=10)


async def test_a_window_that_closes_before_the_plan_ends_the_batch_without_files(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    assert await batches.expire(db, batch_id=batch.id, now=NOW + 5)
    assert not await batches.expire(db, batch_id=batch.id, now=NOW + 6)
    done = await look(db, batch)
    assert (done.status, done.expired_at, done.output_file_id) == (BatchStatus.EXPIRED, int(NOW) + 5, None)
    with pytest.raises(LeaseLost):
        await batches.planned(db, job=job, model_root=MODEL, shards=cut(batch.id, [1]), index_key="i", total=1, now=NOW)
    assert await jobs.claim(db, holder="o", now=NOW + 1e6, ttl=TTL) is None


async def test_a_window_that_closes_on_a_running_batch_goes_through_finalizing(db: Database) -> None:
    batch = await running(db, 2, 1)
    lease = await claim(db)
    assert await batches.expire(db, batch_id=batch.id, now=NOW + 5)
    seen = await look(db, batch)
    assert (seen.status, seen.stop_reason, seen.finalizing_at) == (
        BatchStatus.FINALIZING,
        StopReason.EXPIRED,
        int(NOW) + 5,
    )
    await append(db, lease, 0, close=True, now=NOW + 6)
    assert await sweep(db, batch, now=NOW + 6)
    done = await finish(db, now=NOW + 7)
    assert done is not None
    assert (done.status, done.expired_at, done.finalizing_at) == (
        BatchStatus.EXPIRED,
        int(NOW) + 7,
        int(NOW) + 5,
    )
    assert done.counts == Counts(3, 1, 0)
    assert done.output_file_id is not None


async def test_a_batch_that_is_finalizing_by_itself_does_not_expire(db: Database) -> None:
    batch = await running(db, 1)
    await run_out(db, await claim(db))
    await stamp(db, batch, 1.0)
    assert await batches.due(db, ledger_now=1e12, limit=10) == []
    assert not await batches.expire(db, batch_id=batch.id, now=NOW)
    done = await finish(db)
    assert done is not None
    assert done.status is BatchStatus.COMPLETED


async def test_a_window_can_close_on_a_batch_that_was_sent_back(db: Database) -> None:
    batch = await running(db, 2)
    await append(db, await claim(db), 0, close=True)
    await stamp(db, batch, 1.0)
    await shards.reopen(db, batch_id=batch.id, numbers=[0], now=NOW)
    assert await batches.due(db, ledger_now=1.0, limit=10) == [batch.id]
    assert await batches.expire(db, batch_id=batch.id, now=NOW)
    assert await batches.stopped(db, limit=10) == [batch.id]
    assert await sweep(db, batch)
    done = await finish(db)
    assert done is not None
    assert (done.status, done.counts) == (BatchStatus.EXPIRED, Counts(2, 1, 0))


async def test_a_batch_cancelled_before_its_plan_ends_without_files(db: Database) -> None:
    batch = await create(db)
    await cancel(db, batch)
    assert await batches.stopped(db, limit=10) == [batch.id]
    assert await sweep(db, batch, now=NOW + 1)
    done = await look(db, batch)
    assert (done.status, done.cancelled_at, done.output_file_id) == (BatchStatus.CANCELLED, int(NOW) + 1, None)
    assert await batches.stopped(db, limit=10) == []
    assert await jobs.claim(db, holder="o", now=NOW + 1e6, ttl=TTL) is None
    assert not await sweep(db, batch)
    assert await cancel(db, batch) == done


async def test_shards_that_nobody_holds_are_closed_at_once(db: Database) -> None:
    batch = await running(db, *([1] * 250))
    await cancel(db, batch)
    assert await sweep(db, batch)
    assert set(await states(db, batch)) == {WorkState.CLOSED}
    assert await batches.stopped(db, limit=10) == []
    done = await finish(db)
    assert done is not None
    assert (done.status, done.counts) == (BatchStatus.CANCELLED, Counts(250, 0, 0))


async def test_a_worker_gets_the_stop_grace_to_close_its_shard(db: Database) -> None:
    batch = await running(db, 1, 1)
    await claim(db)
    await cancel(db, batch)
    assert await sweep(db, batch, now=NOW + 1)
    assert await states(db, batch) == [WorkState.LEASED, WorkState.CLOSED]
    assert not await sweep(db, batch, now=NOW + STOP_GRACE - 0.1)
    assert await batches.stopped(db, limit=10) == [batch.id]
    assert (await look(db, batch)).status is BatchStatus.CANCELLING


async def test_a_worker_that_overruns_the_stop_grace_is_overruled(db: Database) -> None:
    """Even if it goes on renewing; and what it then sends is refused (invariant 4)."""
    batch = await running(db, 1)
    lease = await claim(db)
    await cancel(db, batch)
    await shards.renew(db, worker_id="worker-1", leases=[(batch.id, 0, lease.epoch)], now=NOW + STOP_GRACE, ttl=TTL)
    assert await sweep(db, batch, now=NOW + STOP_GRACE)
    with pytest.raises(LeaseLost):
        await append(db, lease, 0, close=True)
    done = await finish(db)
    assert done is not None
    assert (done.status, done.counts) == (BatchStatus.CANCELLED, Counts(1, 0, 0))


async def test_a_shard_of_a_dead_worker_is_closed_when_its_lease_ends(db: Database) -> None:
    batch = await running(db, 1)
    await claim(db)
    await cancel(db, batch, now=NOW + TTL - 1)
    assert not await sweep(db, batch, now=NOW + TTL - 0.1)
    assert await sweep(db, batch, now=NOW + TTL + 0.1)
    assert await states(db, batch) == [WorkState.CLOSED]


async def test_a_worker_that_closes_in_time_keeps_what_it_finished(db: Database) -> None:
    batch = await running(db, 2)
    lease = await claim(db)
    await cancel(db, batch)
    await append(db, lease, 1, close=True)
    assert not await sweep(db, batch)
    done = await finish(db)
    assert done is not None
    assert (done.status, done.counts) == (BatchStatus.CANCELLED, Counts(2, 1, 0))


async def test_the_sweeper_leaves_running_batches_alone(db: Database) -> None:
    batch = await running(db, 1, 1)
    await claim(db)
    assert not await sweep(db, batch, now=NOW + 1e6)
    assert await states(db, batch) == [WorkState.LEASED, WorkState.READY]


async def test_a_cancel_after_the_window_closed_ends_cancelled_and_remembers_the_window(db: Database) -> None:
    batch = await running(db, 1)
    await batches.expire(db, batch_id=batch.id, now=NOW)
    seen = await cancel(db, batch, now=NOW + 1)
    assert (seen.status, seen.stop_reason) == (BatchStatus.CANCELLING, StopReason.EXPIRED)
    assert await sweep(db, batch)
    done = await finish(db)
    assert done is not None
    assert done.status is BatchStatus.CANCELLED


async def test_a_clock_that_is_set_back_does_not_hold_up_a_stop(db: Database) -> None:
    """Invariants 7 and 8: a worker that is gone, and a stop that seems to lie a day ahead."""
    batch = await running(db, 1)
    await claim(db)
    await cancel(db, batch)
    assert not await sweep(db, batch, now=NOW - STOP_GRACE + 1), "a clock a little behind takes nothing from a worker"
    assert await sweep(db, batch, now=NOW - 86_400)
    assert await states(db, batch) == [WorkState.CLOSED]


# What is left behind


async def test_the_work_of_a_batch_is_garbage_an_hour_after_its_end(db: Database) -> None:
    batch = await running(db, 1)
    await run_out(db, await claim(db))
    assert await batches.garbage(db, now=NOW + 1e6, limit=10) == []
    done = await finish(db)
    assert await batches.garbage(db, now=NOW + 3600, limit=10) == []
    assert await batches.garbage(db, now=NOW + 3602, limit=10) == [batch.id]
    await batches.cleaned(db, batch_id=batch.id)
    assert await batches.garbage(db, now=NOW + 1e6, limit=10) == []
    assert await look(db, batch) == done, "the batch and its counts stay"
    async with db.read() as conn:
        for table in (rows.shards, rows.segments, rows.jobs):
            assert await conn.scalar(select(func.count()).select_from(table)) == 0


async def test_the_work_of_a_batch_that_goes_on_is_never_dropped(db: Database) -> None:
    batch = await running(db, 1)
    await append(db, await claim(db), 0)
    await batches.cleaned(db, batch_id=batch.id)
    await batches.cleaned(db, batch_id="batch_unknown")
    assert len(await shards.segments(db, batch_id=batch.id, number=0)) == 1


async def test_every_way_to_end_leaves_garbage_to_be_found(db: Database) -> None:
    refused, cancelled, expired = [await create(db) for _ in range(3)]
    await batches.refused(db, job=await claim_job(db, JobKind.PLAN), faults=[], now=NOW)
    await cancel(db, cancelled)
    await sweep(db, cancelled)
    await batches.expire(db, batch_id=expired.id, now=NOW)
    assert await batches.garbage(db, now=NOW + 3602, limit=10) == [refused.id, cancelled.id, expired.id]


async def test_a_zombie_finisher_of_a_cleaned_batch_commits_nothing(db: Database) -> None:
    batch = await create(db)
    await plan(db, batch, 1)
    await run_out(db, await claim(db))
    zombie = await claim_job(db, JobKind.FINISH)
    await finish(db, now=NOW + TTL + GRACE)
    await batches.cleaned(db, batch_id=batch.id)
    with pytest.raises(LeaseLost):
        await batches.finished(db, job=zombie, output=None, error=None, now=NOW)
