"""Writing off lost segments: fenced by the finish job, and harmless when done twice."""

import pytest

from state import jobs, losses, shards
from state.losses import Loss
from state.records import JobLease, LeaseLost
from tests.orchestrator.house import House


@pytest.fixture
async def job(house: House) -> JobLease:
    """The lease of a batch's finish, all of whose 10 requests were answered in two segments."""
    await house.planned(10)
    await house.work(segment_lines=5)
    lease = await jobs.claim(house.db, holder="orchestrator-1", now=house.clock.wall(), ttl=30.0)
    assert lease is not None
    return lease


async def test_a_lost_segments_row_goes_and_the_counts_are_those_of_the_rest(house: House, job: JobLease):
    for _ in range(2):
        await losses.write_off(house.db, job=job, losses=[Loss(0, (0,), completed=5, failed=0)])
        left = await shards.all_segments(house.db, batch_id=job.batch_id)
        assert [segment.seq for segment in left] == [1]
    details = await jobs.details(house.db, job=job)  # still ours
    assert details.batch.counts.completed == 5


async def test_nothing_is_written_off_under_a_lost_lease(house: House, job: JobLease):
    house.clock.advance(60.0)
    assert await jobs.claim(house.db, holder="orchestrator-2", now=house.clock.wall(), ttl=30.0)
    with pytest.raises(LeaseLost):
        await losses.write_off(house.db, job=job, losses=[Loss(0, (0,), completed=5, failed=0)])
    assert len(await shards.all_segments(house.db, batch_id=job.batch_id)) == 2
