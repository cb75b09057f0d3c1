"""Jobs: what goes wrong costs time, never a job, and a result made under a lost lease changes nothing."""

import asyncio
import logging
import shutil

import pytest
from sqlalchemy import select

from engine.orchestrator.finish import FinishRequest, write_results
from engine.orchestrator.jobs import LARGE_BYTES
from engine.orchestrator.loop import pause
from engine.orchestrator.outcome import GIVEN_UP
from engine.orchestrator.pipe import ChildDied, ChildFailed
from engine.orchestrator.plan import PlanRequest
from engine.orchestrator.setback import LaneBusy, NoModelYet, StoppedMeanwhile, setback
from state import jobs, shards, tables
from state.records import BatchStatus, Corrupt, Counts, LeaseLost, OutOfSpace, Unavailable
from state.settings import Settings
from tests.orchestrator.house import House, answers, input_lines, parts
from tests.support.waiting import eventually


def failing(error: Exception, *, times: int, kind: type = object):
    """A hook for `InProcess.before`: the first `times` jobs of that kind raise."""
    left = [times]

    def before(job: object) -> None:
        if isinstance(job, kind) and left[0] > 0:
            left[0] -= 1
            raise error

    return before


@pytest.mark.parametrize(
    ("error", "delay", "lost"),
    [
        (Unavailable("away"), 2.0, False),
        (OutOfSpace("full", needed=2, free=1), 5.0, False),
        (Corrupt("twice"), 60.0, False),
        (NoModelYet("none"), 1.0, False),
        (LaneBusy("busy"), 3.0, False),
        (StoppedMeanwhile("stopped"), 0.0, False),
        (ChildDied("gone"), 2.0, True),
        (ChildFailed("bug"), 2.0, True),
        (TimeoutError(), 2.0, True),
        (RecursionError("deep"), 2.0, True),
    ],
)
def test_only_an_attempt_that_took_its_process_along_counts_against_a_job(error, delay, lost):
    decided = setback(error, failures=3)
    assert (decided.delay, decided.lost) == (delay, lost)
    assert decided.reason


def test_the_large_lane_is_looked_for_more_seldom_the_longer_it_is_busy():
    assert [setback(LaneBusy("busy"), failures=n).delay for n in (1, 2, 10, 100)] == [1.0, 2.0, 10.0, 30.0]


def test_a_model_is_looked_for_every_second_and_later_every_five():
    assert setback(NoModelYet("none"), failures=60).delay == 1.0
    assert setback(NoModelYet("none"), failures=61).delay == 5.0


def test_pauses_double_up_to_half_a_minute():
    assert [pause(n) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert pause(10_000) == 30.0


async def test_a_store_that_was_away_costs_a_batch_nothing_but_time(house: House):
    house.children.before = failing(Unavailable("the store is away"), times=2)
    batch = await house.planned(3)
    assert batch.status is BatchStatus.VALIDATING
    for _ in range(2):
        house.clock.advance(1.0)
        await house.settle()
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS

    house.children.before = failing(Unavailable("the store is away"), times=5)
    await house.work()
    for _ in range(20):
        await house.settle()
        house.clock.advance(2.0)
    batch = await house.get(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert await house.content(batch.output_file_id) == answers(batch.id, range(3))


async def test_outages_do_not_count_as_lost_plans(house: House):
    house.children.before = failing(Unavailable("away"), times=10)
    batch = await house.planned(3)
    for _ in range(10):
        house.clock.advance(31.0)
        await house.settle()
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS


async def test_a_plan_that_lost_its_process_three_times_fails_its_batch(house: House):
    asked = []

    def die(job: object) -> None:
        asked.append(job)
        raise ChildDied("killed")

    house.children.before = die
    batch = await house.planned(3)
    for _ in range(5):
        house.clock.advance(31.0)
        await house.settle()
    batch = await house.get(batch)
    assert len(asked) == 3
    assert batch.status is BatchStatus.FAILED
    assert batch.faults == (GIVEN_UP,)
    assert GIVEN_UP.code == "internal_error"


async def test_a_finish_that_loses_its_process_is_tried_for_ever(house: House):
    batch = await house.planned(3)
    await house.work()
    house.children.before = failing(ChildDied("killed"), times=7)
    for _ in range(9):
        await house.settle()
        house.clock.advance(31.0)
    assert (await house.get(batch)).status is BatchStatus.COMPLETED


async def test_too_little_disk_is_waited_out_and_said(house: House, monkeypatch, caplog):
    batch = await house.planned(3)
    await house.work()
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=100))
    with caplog.at_level(logging.WARNING):
        await house.settle()
    assert (await house.get(batch)).status is BatchStatus.FINALIZING
    assert "100 are free" in caplog.text
    assert await house.keys("results/") == []

    monkeypatch.undo()
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.FINALIZING  # it looks again a little later
    house.clock.advance(5.0)
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.COMPLETED


async def test_a_damaged_segment_sends_its_shard_back_and_the_books_balance(house: House, caplog):
    batch = await house.planned(40)
    await house.work(failed=[7])
    damaged, *_ = await shards.all_segments(house.db, batch_id=batch.id)
    await house.store.put(damaged.object_key, b"x" * damaged.size)

    await house.settle()

    batch = await house.get(batch)
    assert batch.status is BatchStatus.FINALIZING  # a client never sees it go back (invariant 6)
    assert batch.counts.completed + batch.counts.failed == 40 - damaged.lines
    assert "lost segments" in caplog.text
    assert house.notices.woken[-1] == "worker"
    lease = await house.claim()
    assert lease is not None
    assert lease.number == damaged.shard_number
    await house.answer(lease, failed=[7])
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts == Counts(40, completed=39, failed=1)
    assert await house.content(batch.output_file_id) == answers(batch.id, [n for n in range(40) if n != 7])
    assert await house.content(batch.error_file_id) == answers(batch.id, [7], good=False)


async def test_a_damaged_segment_of_a_cancelled_batch_is_lines_that_never_ran(house: House):
    batch = await house.planned(10)
    await house.work()
    damaged, *_ = await shards.all_segments(house.db, batch_id=batch.id)
    await house.store.delete([damaged.object_key])
    await house.cancel(batch)
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.CANCELLED
    assert batch.counts == Counts(10, completed=10 - damaged.lines)
    assert len((await house.content(batch.output_file_id)).splitlines()) == 10 - damaged.lines  # invariant 5
    assert len((await house.content(batch.error_file_id)).splitlines()) == damaged.lines


async def test_a_cancel_that_comes_while_a_hole_is_found_ends_the_batch_at_once(house: House):
    batch = await house.planned(10)
    await house.work()
    damaged, *_ = await shards.all_segments(house.db, batch_id=batch.id)
    await house.store.delete([damaged.object_key])

    async def cancel_once(job: object) -> None:
        house.children.before = None
        await house.cancel(batch)

    house.children.before = cancel_once
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.CANCELLED


async def test_results_of_a_lost_lease_are_dropped(house: House):
    batch = await house.planned(3)
    await house.work()
    slow, _, _ = parts(
        database=house.db,
        children=house.children,
        clock=house.clock,
        settings=house.settings,
        holder="orchestrator-2",
    )
    go, begun = asyncio.Event(), asyncio.Event()

    async def wait(job: object) -> None:
        house.children.before = None
        begun.set()
        await go.wait()

    house.children.before = wait
    late = asyncio.create_task(slow.step())
    await begun.wait()
    house.clock.advance(100.0)  # its lease runs out
    await house.settle()
    done = await house.get(batch)
    assert done.status is BatchStatus.COMPLETED
    go.set()
    assert await late  # ends without an error
    assert await house.get(batch) == done
    assert await house.content(done.output_file_id) == answers(batch.id, range(3))
    assert await house.keys("results/") == [f"results/{batch.id}/e1/output", f"results/{batch.id}/e2/output"]


def quick(settings: Settings) -> Settings:
    return Settings(data=settings.data, min_free_bytes=0, lease_heartbeat=0.1)


async def test_a_lease_is_renewed_while_the_child_works(house: House, settings: Settings):
    await house.serve_model()
    await house.create(input_lines(3))
    busy, _, _ = parts(database=house.db, children=house.children, clock=house.clock, settings=quick(settings))
    go, begun = asyncio.Event(), asyncio.Event()

    async def wait(job: object) -> None:
        begun.set()
        await go.wait()

    house.children.before = wait
    work = asyncio.create_task(busy.step())
    await begun.wait()
    for _ in range(4):
        house.clock.advance(25.0)
        await eventually(lambda: renewed(house))
        assert not await house.jobs.step()  # nobody else gets it
    go.set()
    assert await work


async def renewed(house: House) -> bool:
    async with house.db.read() as conn:
        return await conn.scalar(select(tables.jobs.c.lease_until)) == house.clock.wall() + house.settings.lease_ttl


async def test_a_job_of_a_batch_that_was_stopped_is_given_up_though_its_child_hangs(house: House, settings: Settings):
    await house.serve_model()
    batch = await house.create(input_lines(3))
    busy, sweep, _ = parts(database=house.db, children=house.children, clock=house.clock, settings=quick(settings))
    begun = asyncio.Event()

    async def hang(job: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    house.children.before = hang
    work = asyncio.create_task(busy.step())
    await begun.wait()
    await house.cancel(batch)
    await sweep.step()
    assert await work
    assert (await house.get(batch)).status is BatchStatus.CANCELLED


async def test_a_role_that_stops_gives_its_job_back_at_once(house: House):
    await house.serve_model()
    batch = await house.create(input_lines(3))
    begun = asyncio.Event()

    async def hang(job: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    house.children.before = hang
    work = asyncio.create_task(house.jobs.step())
    await begun.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    house.children.before = None
    await house.settle()  # no time has passed
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS


async def test_small_jobs_pass_a_large_one_and_a_second_large_one_waits(house: House):
    await house.serve_model()
    padding = b" " * 100 + b"\n"
    large = input_lines(3) + padding * (LARGE_BYTES // len(padding) + 1)
    first, second = await house.create(large), await house.create(large)
    go = asyncio.Event()

    async def slowly(job: PlanRequest | FinishRequest) -> None:
        if job.batch_id == first.id:
            await go.wait()

    house.children.before = slowly
    assert await house.jobs.step()
    small = await house.create(input_lines(3))
    await house.settle()
    assert (await house.get(small)).status is BatchStatus.IN_PROGRESS
    assert (await house.get(second)).status is BatchStatus.VALIDATING
    go.set()
    await eventually(lambda: is_planned(house, first))
    house.clock.advance(2.0)
    await house.settle()
    await eventually(lambda: is_planned(house, second))
    await house.jobs.close()


async def is_planned(house: House, batch) -> bool:
    return (await house.get(batch)).status is BatchStatus.IN_PROGRESS


async def test_a_job_that_cannot_be_put_back_for_want_of_the_database_is_put_back_when_it_answers(
    house: House, monkeypatch
):
    house.children.before = failing(OutOfSpace("full", needed=1, free=0), times=1)
    release, refusals = jobs.release, [Unavailable("away"), Unavailable("away")]

    async def flaky(*args, **named):
        if refusals:
            raise refusals.pop()
        await release(*args, **named)

    monkeypatch.setattr(jobs, "release", flaky)
    monkeypatch.setattr("engine.orchestrator.jobs.pause", lambda failures: 0.0)
    batch = await house.planned(3)
    assert not refusals
    house.clock.advance(5.0)
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS


async def test_the_ids_of_lines_are_the_same_in_every_attempt(house: House, tmp_path):
    batch = await house.planned(5)
    await house.cancel(batch)
    seen = []

    async def twice(job: FinishRequest) -> None:
        if not seen:
            first = await write_results(house.store, request=job, spool=tmp_path)
            assert first.error is not None
            seen.append(await house.store.get(first.error.object_key))
            raise ChildDied("killed after it had written everything")

    house.children.before = twice
    await house.settle()
    house.clock.advance(1.0)
    await house.settle()
    assert [await house.content((await house.get(batch)).error_file_id)] == seen


async def test_a_lease_that_was_lost_before_the_job_began_is_no_error(house: House, monkeypatch):
    async def lost(*_, **__):
        raise LeaseLost("somebody else's")

    monkeypatch.setattr(jobs, "details", lost)
    batch = await house.planned(3)
    assert batch.status is BatchStatus.VALIDATING
