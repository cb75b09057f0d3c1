"""Jobs: leased like shards, with lost attempts counted."""

import pytest

from state import jobs, leasing
from state.database import Database
from state.records import JobKind, LeaseLost
from tests.state.making import NOW, TTL, claim_job, create


async def test_jobs_are_taken_in_the_order_they_were_made_in(db: Database) -> None:
    made = [await create(db) for _ in range(3)]
    taken = [await claim_job(db, JobKind.PLAN) for _ in range(3)]
    assert [job.batch_id for job in taken] == [batch.id for batch in made]
    assert await jobs.claim(db, holder="o", now=NOW, ttl=TTL) is None


async def test_a_job_lost_with_its_holder_is_taken_up_again_and_counted(db: Database) -> None:
    await create(db)
    for attempt in (1, 2, 3):
        job = await claim_job(db, JobKind.PLAN)
        assert (job.attempts, job.epoch) == (attempt, attempt)
        await jobs.expire_leases(db, holder="orchestrator-1")


async def test_a_job_given_back_is_not_counted_as_lost(db: Database) -> None:
    await create(db)
    for epoch in (1, 2, 3):
        job = await claim_job(db, JobKind.PLAN)
        assert (job.attempts, job.epoch) == (1, epoch)
        await jobs.release(db, job=job, now=NOW, delay=0.0, error="no model yet")


async def test_a_job_put_off_waits_and_does_not_hold_up_others(db: Database) -> None:
    first, second = await create(db), await create(db)
    job = await claim_job(db, JobKind.PLAN)
    assert job.batch_id == first.id
    await jobs.release(db, job=job, now=NOW, delay=5.0)
    assert (await claim_job(db, JobKind.PLAN)).batch_id == second.id
    assert await jobs.claim(db, holder="o", now=NOW + 4.9, ttl=TTL) is None
    assert (await claim_job(db, JobKind.PLAN, now=NOW + 5)).batch_id == first.id


async def test_no_job_is_put_off_for_more_than_ten_minutes(db: Database) -> None:
    await create(db)
    await jobs.release(db, job=await claim_job(db, JobKind.PLAN), now=NOW, delay=1e9)
    await claim_job(db, JobKind.PLAN, now=NOW + leasing.LONGEST_DELAY_S)


async def test_a_renewal_succeeds_even_late_until_somebody_took_over(db: Database) -> None:
    await create(db)
    old = await claim_job(db, JobKind.PLAN)
    assert await jobs.renew(db, job=old, now=NOW + TTL + 9, ttl=TTL)
    assert await jobs.claim(db, holder="o", now=NOW + TTL + 9, ttl=TTL) is None
    await claim_job(db, JobKind.PLAN, now=NOW + 1e4)
    assert not await jobs.renew(db, job=old, now=NOW + 1e4, ttl=TTL)
    with pytest.raises(LeaseLost):
        await jobs.release(db, job=old, now=NOW, delay=0.0)


async def test_a_grace_can_be_given_after_the_end_of_a_lease(db: Database) -> None:
    await create(db)
    await claim_job(db, JobKind.PLAN)
    assert await jobs.claim(db, holder="o", now=NOW + TTL + 1, ttl=TTL, grace=5.0) is None
    assert await jobs.claim(db, holder="o", now=NOW + TTL + 6, ttl=TTL, grace=5.0) is not None


async def test_leases_end_with_the_holder_that_is_named_only(db: Database) -> None:
    await create(db)
    await create(db)
    await claim_job(db, JobKind.PLAN, holder="dead")
    await claim_job(db, JobKind.PLAN, holder="alive")
    await jobs.expire_leases(db, holder="dead")
    assert (await claim_job(db, JobKind.PLAN)).attempts == 2
    assert await jobs.claim(db, holder="o", now=NOW, ttl=TTL) is None
    await jobs.expire_leases(db)
    assert await jobs.claim(db, holder="o", now=NOW, ttl=TTL) is not None


async def test_releasing_again_after_a_lost_answer_is_once(db: Database) -> None:
    await create(db)
    job = await claim_job(db, JobKind.PLAN)
    for _ in range(2):
        await jobs.release(db, job=job, now=NOW, delay=0.0)
    assert (await claim_job(db, JobKind.PLAN)).attempts == 1
