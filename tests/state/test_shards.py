"""The ledger of shards: claims, the fence, renewal, giving back, sending back."""

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncTransaction

from state import batches, closing, jobs, leasing, shards
from state import database as database_module
from state.database import Database
from state.records import BatchStatus, Counts, JobKind, LeaseLost, Segment, ShardLease, Tally, Usage, WorkState
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
    finish,
    look,
    run_out,
    running,
    segment,
)


async def try_claim(db: Database, *, now: float = NOW, **changes: object) -> ShardLease | None:
    values: dict[str, object] = {"worker_id": "worker-2", "models": [MODEL], "now": now, "ttl": TTL, "grace": GRACE}
    return await shards.claim(db, **(values | changes))  # type: ignore[arg-type]


# Claims


async def test_a_claim_says_all_that_a_worker_needs(db: Database) -> None:
    batch = await running(db, 3)
    assert await claim(db) == ShardLease(
        batch_id=batch.id,
        number=0,
        epoch=1,
        worker_id="worker-1",
        project_id=PROJECT,
        model=MODEL,
        endpoint=batch.endpoint,
        object_key=f"batches/{batch.id}/e1/shard-0",
        requests=3,
        size=300,
        next_seq=0,
        deadline=batch.deadline,
        batch_created_at=batch.created_at,
        claims_since_progress=1,
        suspect=None,
    )


async def test_claims_go_through_the_oldest_batch_first_in_order(db: Database) -> None:
    first, second = await running(db, 1, 1), await running(db, 1)
    taken = [await claim(db) for _ in range(3)]
    assert [(lease.batch_id, lease.number) for lease in taken] == [(first.id, 0), (first.id, 1), (second.id, 0)]
    assert await try_claim(db) is None


async def test_a_claim_may_name_a_batch_or_leave_some_out(db: Database) -> None:
    first, second = await running(db, 1), await running(db, 1)
    assert await try_claim(db, exclude_batches=[first.id, second.id]) is None
    lease = await try_claim(db, batch_id=second.id)
    assert lease is not None
    assert lease.batch_id == second.id
    lease = await try_claim(db, exclude_batches=[second.id])
    assert lease is not None
    assert lease.batch_id == first.id


async def test_only_shards_of_the_workers_models_are_claimed(db: Database) -> None:
    await running(db, 1)
    assert await try_claim(db, models=[]) is None
    assert await try_claim(db, models=["other"]) is None
    assert await try_claim(db, models=["other", MODEL]) is not None


async def test_a_lease_can_be_taken_over_only_after_its_end_and_the_grace(db: Database) -> None:
    await running(db, 1)
    old = await claim(db)
    assert await try_claim(db, now=NOW + TTL + GRACE) is None
    new = await try_claim(db, now=NOW + TTL + GRACE + 0.1)
    assert new is not None
    assert (new.epoch, new.claims_since_progress) == (old.epoch + 1, 2)


async def test_shards_of_batches_that_do_not_run_are_not_claimed(db: Database) -> None:
    cancelled, expired = await running(db, 1), await running(db, 1)
    await create(db)
    await batches.cancel(db, project_id=PROJECT, batch_id=cancelled.id, now=NOW)
    await batches.expire(db, batch_id=expired.id, now=NOW)
    assert await try_claim(db, now=NOW + 1e6) is None
    assert await shards.candidates(db, models=[MODEL], now=NOW, grace=GRACE) == []


async def test_candidates_are_the_batches_with_claimable_shards(db: Database) -> None:
    first, second = await running(db, 1, 1), await running(db, 1)
    await claim(db)
    found = await shards.candidates(db, models=[MODEL], now=NOW, grace=GRACE)
    assert [(c.batch_id, c.ready_shards) for c in found] == [(first.id, 1), (second.id, 1)]
    assert (found[0].project_id, found[0].created_at) == (PROJECT, first.created_at)
    assert found[0].deadline == first.deadline
    later = await shards.candidates(db, models=[MODEL], now=NOW + TTL + GRACE + 1, grace=GRACE)
    assert [c.ready_shards for c in later] == [2, 1]
    assert await shards.candidates(db, models=["other"], now=NOW, grace=GRACE) == []


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_a_jump_of_the_clock_may_cost_a_lease_but_leaves_no_shard_behind(db: Database, jump: float) -> None:
    """Invariants 8 and 9: a lease that ends tomorrow, by a clock set back today, was not written by a right clock."""
    await running(db, 1)
    old = await claim(db)
    new = await try_claim(db, now=NOW + jump)
    assert new is not None
    await run_out(db, new)
    with pytest.raises(LeaseLost):
        await append(db, old, 0)


async def test_a_delay_survives_no_jump_backward(db: Database) -> None:
    await running(db, 1)
    await shards.release(db, lease=await claim(db), now=NOW, not_before=NOW + 60)
    assert await try_claim(db, now=NOW + 59) is None
    assert await try_claim(db, now=NOW - 86_400) is not None


# The fence


async def test_a_segment_is_committed_with_its_counts(db: Database) -> None:
    batch = await running(db, 3)
    lease = await claim(db)
    made = segment(lease, 0, 2)
    tally = Tally(completed=1, failed=1, usage=Usage(5, 4, 3, 2))
    kept = await shards.append(db, lease=lease, segment=made, tally=tally, now=NOW)
    assert kept == replace(lease, next_seq=1, claims_since_progress=0)
    assert await shards.segments(db, batch_id=batch.id, number=0) == [made]
    seen = await look(db, batch)
    assert (seen.counts, seen.usage) == (Counts(3, 1, 1), Usage(5, 4, 3, 2))


async def test_an_old_epoch_commits_nothing_after_a_takeover(db: Database) -> None:
    """Invariant 4."""
    batch = await running(db, 2)
    old = await claim(db)
    await append(db, old, 0)
    new = await claim(db, worker="worker-2", now=NOW + TTL + GRACE + 1)
    zombie = replace(old, next_seq=1)
    for attempt in (
        append(db, zombie, 1),
        append(db, zombie, 1, close=True),
        shards.close(db, lease=zombie, now=NOW),
        shards.release(db, lease=zombie, now=NOW),
        shards.suspect(db, lease=zombie, place=1),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    renewal = await shards.renew(
        db, worker_id="worker-1", leases=[(batch.id, 0, old.epoch)], now=NOW + TTL + GRACE + 1, ttl=TTL
    )
    assert (renewal.held, renewal.lost) == (frozenset(), {(batch.id, 0)})
    assert (await look(db, batch)).counts == Counts(2, 1, 0)
    assert [s.seq for s in await shards.segments(db, batch_id=batch.id, number=0)] == [0]
    await append(db, new, 1, close=True)
    assert (await look(db, batch)).counts == Counts(2, 2, 0)


async def test_a_suspended_owner_commits_as_long_as_nobody_took_over(db: Database) -> None:
    await running(db, 1)
    lease = await claim(db)
    await append(db, lease, 0, now=NOW + 1e6)


async def test_the_same_segment_sent_again_is_committed_once(db: Database) -> None:
    """Ledger rule 4: after an unknown outcome the worker sends the same again."""
    batch = await running(db, 2)
    lease = await claim(db)
    made, tally = segment(lease, 0), Tally(completed=1)
    kept = [await shards.append(db, lease=lease, segment=made, tally=tally, now=NOW) for _ in range(2)]
    assert kept[0] == kept[1]
    assert (await look(db, batch)).counts == Counts(2, 1, 0)
    closing_one = segment(kept[0], 1)
    for _ in range(2):
        await shards.append(db, lease=kept[0], segment=closing_one, tally=tally, close=True, now=NOW)
    assert (await look(db, batch)).counts == Counts(2, 2, 0)
    assert (await look(db, batch)).status is BatchStatus.FINALIZING


async def test_another_segment_in_the_same_place_is_refused(db: Database) -> None:
    await running(db, 2)
    lease = await claim(db)
    await append(db, lease, 0)
    with pytest.raises(LeaseLost):
        await append(db, lease, 1)


async def test_a_segment_must_follow_on_its_lease(db: Database) -> None:
    await running(db, 2)
    lease = await claim(db)
    wrong: list[Segment] = [replace(segment(lease, 0), seq=1), replace(segment(lease, 0), shard_number=1)]
    for made in wrong:
        with pytest.raises(ValueError, match="does not follow"):
            await shards.append(db, lease=lease, segment=made, tally=Tally(), now=NOW)


async def test_no_object_key_is_committed_twice(db: Database) -> None:
    """Invariant 4."""
    await running(db, 1, 1)
    first, second = await claim(db), await claim(db)
    made = segment(first, 0)
    await shards.append(db, lease=first, segment=made, tally=Tally(completed=1), now=NOW)
    same_key = replace(segment(second, 0), object_key=made.object_key)
    with pytest.raises(IntegrityError):
        await shards.append(db, lease=second, segment=same_key, tally=Tally(completed=1), now=NOW)


async def test_a_shard_never_counts_more_answers_than_it_has_requests(db: Database) -> None:
    """Invariant 5, held by the database itself."""
    batch = await running(db, 2)
    lease = await append(db, await claim(db), 0, 1)
    with pytest.raises(IntegrityError):
        await append(db, lease, 1)
    assert (await look(db, batch)).counts == Counts(2, 2, 0)
    assert len(await shards.segments(db, batch_id=batch.id, number=0)) == 1


async def test_a_crash_between_two_statements_leaves_nothing(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard is fenced and the segment inserted, then the batch cannot be booked: none of it happened."""
    batch = await running(db, 1)
    lease = await claim(db)

    async def crash(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(shards, "book_closed", crash)
    with pytest.raises(ZeroDivisionError):
        await append(db, lease, 0, close=True)
    with pytest.raises(ZeroDivisionError):
        await shards.close(db, lease=lease, now=NOW)
    assert (await look(db, batch)).counts == Counts(1, 0, 0)
    assert await shards.segments(db, batch_id=batch.id, number=0) == []
    monkeypatch.setattr(shards, "book_closed", closing.book_closed)
    await run_out(db, lease)
    assert (await look(db, batch)).counts == Counts(1, 1, 0)


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "not committed"])
@pytest.mark.parametrize("close", [True, False], ids=["closing", "going on"])
async def test_a_segment_whose_commit_got_no_answer_is_committed_once(
    db: Database, monkeypatch: pytest.MonkeyPatch, committed: bool, close: bool
) -> None:
    """Ledger rule 4."""
    batch = await running(db, 2)
    lease = await claim(db)
    commit = Database._commit
    answers = iter([committed])

    async def once(self: Database, transaction: AsyncTransaction) -> None:
        first = next(answers, None)
        if first is None:
            return await commit(self, transaction)
        await (commit(self, transaction) if first else transaction.rollback())
        raise OperationalError("COMMIT", None, Exception("gone"))

    monkeypatch.setattr(Database, "_commit", once)
    monkeypatch.setattr(database_module, "PAUSE_S", 0.0)
    await append(db, lease, 0, 1, close=close)
    assert (await look(db, batch)).counts == Counts(2, 2, 0)
    assert len(await shards.segments(db, batch_id=batch.id, number=0)) == 1
    wanted = BatchStatus.FINALIZING if close else BatchStatus.IN_PROGRESS
    assert (await look(db, batch)).status is wanted


# Closing


async def test_the_last_shard_to_close_makes_the_one_finish_job(db: Database) -> None:
    batch = await running(db, 1, 1)
    await run_out(db, await claim(db))
    assert await jobs.claim(db, holder="o", now=NOW, ttl=TTL) is None
    await run_out(db, await claim(db), now=NOW + 1)
    seen = await look(db, batch)
    assert (seen.status, seen.finalizing_at) == (BatchStatus.FINALIZING, int(NOW) + 1)
    await claim_job(db, JobKind.FINISH)
    assert await jobs.claim(db, holder="o", now=NOW, ttl=TTL) is None


async def test_a_shard_may_close_without_another_segment_and_closing_again_is_once(db: Database) -> None:
    batch = await running(db, 1, 1)
    lease = await append(db, await claim(db), 0)
    for _ in range(2):
        await shards.close(db, lease=lease, now=NOW)
    assert (await look(db, batch)).status is BatchStatus.IN_PROGRESS
    with pytest.raises(LeaseLost):
        await append(db, lease, 0)


# Renewal


async def test_renewal_tells_held_lost_and_stopped_apart(db: Database) -> None:
    mine, closed, stopped = await running(db, 1), await running(db, 1), await running(db, 1)
    leases = [await claim(db) for _ in range(3)]
    await run_out(db, leases[1])
    await batches.cancel(db, project_id=PROJECT, batch_id=stopped.id, now=NOW)
    renewal = await shards.renew(
        db, worker_id="worker-1", leases=[(x.batch_id, x.number, x.epoch) for x in leases], now=NOW, ttl=TTL
    )
    assert renewal.held == {(mine.id, 0), (stopped.id, 0)}
    assert renewal.lost == {(closed.id, 0)}
    assert renewal.stopped == {(stopped.id, 0)}


async def test_a_late_renewal_succeeds_while_nobody_took_over(db: Database) -> None:
    """Ledger rule 6."""
    batch = await running(db, 1)
    lease = await claim(db)
    late = NOW + 1e6
    renewal = await shards.renew(db, worker_id="worker-1", leases=[(batch.id, 0, lease.epoch)], now=late, ttl=TTL)
    assert renewal.held == {(batch.id, 0)}
    assert await try_claim(db, now=late + TTL) is None


async def test_renewing_nothing_asks_for_nothing(db: Database) -> None:
    renewal = await shards.renew(db, worker_id="w", leases=[], now=NOW, ttl=TTL)
    assert renewal == shards.Renewal(frozenset(), frozenset(), frozenset())


async def test_leases_of_the_dead_end_at_once(db: Database) -> None:
    await running(db, 1, 1)
    await claim(db, worker="dead")
    alive = await claim(db, worker="alive")
    await shards.expire_leases(db, holder="dead")
    taken = await try_claim(db)
    assert taken is not None
    assert (taken.number, taken.epoch) == (0, 2)
    assert await try_claim(db) is None
    await shards.expire_leases(db)
    renewal = await shards.renew(db, worker_id="alive", leases=[(alive.batch_id, 1, alive.epoch)], now=NOW, ttl=TTL)
    assert renewal.held == {(alive.batch_id, 1)}, "whoever was not dead after all goes on"


# Giving back, and poison


async def test_a_shard_given_back_keeps_its_epoch_until_it_is_claimed_again(db: Database) -> None:
    batch = await running(db, 1)
    lease = await claim(db)
    await shards.release(db, lease=lease, now=NOW, error="the engine is down")
    await shards.release(db, lease=lease, now=NOW, error="the engine is down")
    (info,) = await shards.shard_list(db, batch_id=batch.id)
    assert (info.state, info.epoch) == (WorkState.READY, 1)
    again = await try_claim(db)
    assert again is not None
    assert (again.epoch, again.claims_since_progress) == (2, 1)
    with pytest.raises(LeaseLost):
        await shards.release(db, lease=lease, now=NOW)


async def test_a_delay_is_no_longer_than_ten_minutes(db: Database) -> None:
    await running(db, 1)
    await shards.release(db, lease=await claim(db), now=NOW, not_before=NOW + 1e6)
    assert await try_claim(db, now=NOW + leasing.LONGEST_DELAY_S - 1) is None
    assert await try_claim(db, now=NOW + leasing.LONGEST_DELAY_S) is not None


async def test_claims_without_progress_are_counted_and_progress_clears_them(db: Database) -> None:
    """Invariant 10: the third claimer is careful, and finds what was tried."""
    await running(db, 3)
    for claims in (1, 2, 3):
        lease = await claim(db)
        assert lease.claims_since_progress == claims
        await shards.suspect(db, lease=lease, place=claims)
        await shards.expire_leases(db)
    lease = await claim(db)
    assert (lease.claims_since_progress, lease.suspect) == (4, 3)
    await append(db, lease, 0)
    await shards.expire_leases(db)
    lease = await claim(db)
    assert (lease.claims_since_progress, lease.suspect) == (1, None)


async def test_a_suspicion_can_be_taken_back(db: Database) -> None:
    await running(db, 1)
    lease = await claim(db)
    await shards.suspect(db, lease=lease, place=0)
    await shards.suspect(db, lease=lease, place=None)
    await shards.expire_leases(db)
    assert (await claim(db)).suspect is None


# Sending back


async def test_a_hole_sends_its_shard_back_and_the_batch_stays_finalizing(db: Database) -> None:
    """Invariants 1 and 6."""
    batch = await running(db, 2, 1, now=NOW)
    await append(db, await claim(db), 0, close=True)
    await run_out(db, await claim(db), now=NOW + 1)
    job = await claim_job(db, JobKind.FINISH)
    assert await shards.reopen(db, batch_id=batch.id, numbers=[0], now=NOW + 2, job=job)
    with pytest.raises(LeaseLost):
        await batches.finished(db, job=job, output=None, error=None, now=NOW + 2)
    seen = await look(db, batch)
    assert (seen.status, seen.finalizing_at) == (BatchStatus.FINALIZING, int(NOW) + 1)
    lease = await claim(db)
    assert (lease.number, lease.epoch, lease.next_seq) == (0, 2, 1)
    renewal = await shards.renew(db, worker_id="worker-1", leases=[(batch.id, 0, 2)], now=NOW, ttl=TTL)
    assert renewal.stopped == frozenset()
    await append(db, lease, 1, close=True, now=NOW + 3)
    again = await claim_job(db, JobKind.FINISH)
    assert again.id == job.id
    assert again.epoch == job.epoch + 1, "so that its files get keys of their own (invariant 4)"
    assert again.output_file_id == job.output_file_id
    await jobs.release(db, job=again, now=NOW, delay=0.0)
    done = await finish(db)
    assert done is not None
    assert (done.status, done.finalizing_at, done.counts) == (
        BatchStatus.COMPLETED,
        int(NOW) + 1,
        Counts(3, 3, 0),
    )


async def test_a_batch_with_several_holes_ends_when_the_last_is_filled(db: Database) -> None:
    batch = await running(db, 1, 1, 1)
    for _ in range(3):
        await shards.close(db, lease=await claim(db), now=NOW)
    assert await shards.reopen(db, batch_id=batch.id, numbers=[0, 1, 2], now=NOW)
    for _ in range(2):
        await run_out(db, await claim(db))
        assert await jobs.claim(db, holder="o", now=NOW, ttl=TTL) is None
    await run_out(db, await claim(db))
    done = await finish(db)
    assert done is not None
    assert (done.status, done.counts) == (BatchStatus.COMPLETED, Counts(3, 3, 0))


async def test_a_stopped_batch_is_not_sent_back(db: Database) -> None:
    batch = await running(db, 2)
    await append(db, await claim(db), 0, close=True)
    job = await claim_job(db, JobKind.FINISH)
    await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    assert not await shards.reopen(db, batch_id=batch.id, numbers=[0], now=NOW, job=job)
    done = await batches.finished(db, job=job, output=None, error=None, now=NOW)
    assert done is not None
    assert done.status is BatchStatus.CANCELLED


async def test_only_the_holder_of_the_finish_job_sends_shards_back(db: Database) -> None:
    batch = await running(db, 1)
    await run_out(db, await claim(db))
    old = await claim_job(db, JobKind.FINISH)
    await claim_job(db, JobKind.FINISH, now=NOW + TTL + 1)
    with pytest.raises(LeaseLost):
        await shards.reopen(db, batch_id=batch.id, numbers=[0], now=NOW, job=old)
    assert await shards.reopen(db, batch_id=batch.id, numbers=[0], now=NOW)
    with pytest.raises(LeaseLost):
        await shards.reopen(db, batch_id=batch.id, numbers=[0], now=NOW)


# Cost


async def test_the_claim_uses_its_index(db: Database) -> None:
    """The hottest query must not read every shard there ever was."""
    seen: list[tuple[str, object]] = []
    event.listen(db._engine.sync_engine, "before_cursor_execute", lambda *args: seen.append((args[2], args[3])))
    await try_claim(db)
    statement, parameters = next((s, p) for s, p in seen if s.startswith("UPDATE shards"))
    async with db.read() as conn:
        plan = await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)  # type: ignore[arg-type]
        steps = " ".join(row[3] for row in plan)
    assert "SEARCH shards USING INDEX ix_shards_claim (model=? AND state=?)" in steps


async def test_a_heartbeat_gets_through_beside_a_busy_writer(db: Database, other_db: Database) -> None:
    """A heartbeat has a `Database` of its own, so it does not queue behind its own process's writers."""
    batch = await running(db, 1)
    lease = await claim(db)
    stop = asyncio.Event()

    async def write_on() -> None:
        while not stop.is_set():
            async with db.write() as conn:
                await conn.execute(text("UPDATE shards SET last_error = 'x'"))

    writers = [asyncio.create_task(write_on()) for _ in range(4)]
    for _ in range(5):
        renewal = await shards.renew(
            other_db, worker_id="worker-1", leases=[(batch.id, 0, lease.epoch)], now=NOW, ttl=TTL
        )
        assert renewal.held
    stop.set()
    await asyncio.gather(*writers)
