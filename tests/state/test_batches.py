"""Batches: created with their plan job, planned or refused, finished; every move along the graph and durable."""

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import IntegrityError

from state import batches, files, jobs, shards
from state.database import Database
from state.ids import new_batch_id
from state.jobs import FinishInput, PlanInput
from state.records import (
    BatchNotCancellable,
    BatchNotFound,
    BatchStatus,
    Counts,
    Fault,
    FileStatus,
    JobKind,
    LeaseLost,
    StopReason,
    Tally,
    Usage,
    WorkState,
)
from state.tables import jobs as job_rows
from tests.state.making import (
    MODEL,
    NOW,
    PROJECT,
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
    segment,
)


async def test_a_batch_and_its_plan_job_are_created_as_one(db: Database) -> None:
    batch = await create(db, metadata={"night": "1"}, output_expires_after=3600, completion_window="24h")
    assert batch.status is BatchStatus.VALIDATING
    assert (batch.created_at, batch.expires_at) == (int(NOW), int(NOW) + 86_400)
    assert (batch.metadata, batch.output_expires_after, batch.completion_window) == ({"night": "1"}, 3600, "24h")
    assert (batch.counts, batch.usage, batch.model, batch.faults) == (Counts(), Usage(), None, ())
    assert await look(db, batch) == batch
    job = await claim_job(db, JobKind.PLAN)
    assert (job.batch_id, job.epoch, job.attempts) == (batch.id, 1, 1)


async def test_creating_again_is_the_same_batch_with_one_job(db: Database) -> None:
    """Ledger rule 4."""
    batch_id = new_batch_id(NOW)
    assert await create(db, batch_id=batch_id) == await create(db, batch_id=batch_id)
    async with db.read() as conn:
        assert await conn.scalar(select(func.count()).select_from(job_rows)) == 1


async def test_an_id_of_another_project_is_not_taken_for_ones_own(db: Database) -> None:
    batch = await create(db)
    with pytest.raises(IntegrityError):
        await create(db, batch_id=batch.id, project_id="other")
    for after in (batch.id, "batch_unknown"):
        with pytest.raises(BatchNotFound):
            await batches.get(db, project_id="other", batch_id=after)
        with pytest.raises(BatchNotFound):
            await batches.cancel(db, project_id="other", batch_id=after, now=NOW)
        with pytest.raises(BatchNotFound):
            await batches.page(db, project_id="other", limit=1, after=after)


async def test_a_plan_puts_the_batch_in_progress(db: Database) -> None:
    batch = await running(db, 3, 2)
    assert (batch.status, batch.in_progress_at) == (BatchStatus.IN_PROGRESS, int(NOW))
    assert batch.counts == Counts(total=5)
    assert batch.model == MODEL
    infos = await shards.shard_list(db, batch_id=batch.id)
    assert [(info.number, info.requests, info.epoch, info.state) for info in infos] == [
        (0, 3, 0, WorkState.READY),
        (1, 2, 0, WorkState.READY),
    ]


async def test_a_plan_must_account_for_every_request(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    for sizes, total in (((3, 2), 4), ((), 0)):
        with pytest.raises(ValueError, match="all of its requests"):
            await batches.planned(
                db, job=job, model_root=MODEL, shards=cut(batch.id, sizes), index_key="i", total=total, now=NOW
            )


async def test_a_plan_for_a_batch_cancelled_meanwhile_is_discarded_and_its_job_closed(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    planned = await batches.planned(
        db, job=job, model_root=MODEL, shards=cut(batch.id, [1]), index_key="i", total=1, now=NOW
    )
    assert planned is False
    assert await shards.shard_list(db, batch_id=batch.id) == []
    assert await jobs.claim(db, holder="o", now=NOW + 1e6, ttl=30) is None


async def test_a_plan_whose_lease_was_lost_commits_nothing(db: Database) -> None:
    """Invariant 4 holds for jobs as well."""
    batch = await create(db)
    old = await claim_job(db, JobKind.PLAN)
    new = await claim_job(db, JobKind.PLAN, now=NOW + 60)
    assert new.epoch == old.epoch + 1
    for commit in (
        batches.planned(db, job=old, model_root=MODEL, shards=cut(batch.id, [1]), index_key="i", total=1, now=NOW),
        batches.refused(db, job=old, faults=[], now=NOW),
    ):
        with pytest.raises(LeaseLost):
            await commit
    assert (await look(db, batch)).status is BatchStatus.VALIDATING


async def test_sending_the_same_plan_again_commits_it_once(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    for _ in range(2):
        assert await batches.planned(
            db, job=job, model_root=MODEL, shards=cut(batch.id, [1]), index_key="i", total=1, now=NOW
        )
    assert len(await shards.shard_list(db, batch_id=batch.id)) == 1


async def test_a_refused_batch_fails_with_its_faults(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    faults = (Fault("invalid_json_line", "not JSON: \u2028", "line", 3), Fault("empty_file", "nothing in it"))
    assert await batches.refused(db, job=job, faults=faults, now=NOW + 1)
    failed = await look(db, batch)
    assert (failed.status, failed.failed_at, failed.faults) == (BatchStatus.FAILED, int(NOW) + 1, faults)
    assert await jobs.claim(db, holder="o", now=NOW + 1e6, ttl=30) is None


async def test_a_refusal_after_a_cancel_is_discarded(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    assert await batches.refused(db, job=job, faults=[Fault("empty_file", "nothing")], now=NOW) is False
    assert (await look(db, batch)).faults == ()


async def test_counts_and_usage_of_a_running_batch_are_the_sums_of_its_shards(db: Database) -> None:
    """Ledger rule 2."""
    batch = await running(db, 3, 2)
    await append(db, await claim(db), 0, 2, failed=1)
    await append(db, await claim(db), 1)
    seen = await look(db, batch)
    assert seen.counts == Counts(total=5, completed=2, failed=1)
    assert seen.usage == Usage(30, 2, 10, 4)


async def test_the_model_is_what_the_first_committed_reply_names(db: Database) -> None:
    batch = await running(db, 2, 1)
    first, second = await claim(db), await claim(db)
    await append(db, second, 0)
    assert (await look(db, batch)).model == "smol-v1"
    tally = Tally(completed=1, model="another-name")
    await shards.append(db, lease=first, segment=segment(first, 0), tally=tally, now=NOW)
    assert (await look(db, batch)).model == "smol-v1"


async def test_a_finished_batch_has_its_files_and_frozen_counts_at_once(db: Database) -> None:
    batch = await running(db, 2, 1)
    await append(db, await claim(db), 0, 1, failed=1, close=True)
    await run_out(db, await claim(db), now=NOW + 1)
    closing = await look(db, batch)
    assert (closing.status, closing.finalizing_at) == (BatchStatus.FINALIZING, int(NOW) + 1)
    job = await claim_job(db, JobKind.FINISH)
    done = await batches.finished(
        db, job=job, output=result(job, "output"), error=result(job, "error", 7), output_ttl=60, now=NOW + 2
    )
    assert done is not None
    assert (done.status, done.completed_at) == (BatchStatus.COMPLETED, int(NOW) + 2)
    assert (done.counts, done.usage) == (Counts(3, 2, 1), Usage(30, 2, 10, 4))
    assert (done.output_file_id, done.error_file_id) == (job.output_file_id, job.error_file_id)
    assert await look(db, batch) == done
    error = await files.get(db, project_id=PROJECT, file_id=job.error_file_id or "")
    assert (error.purpose, error.filename, error.bytes) == ("batch_output", f"{batch.id}_error.jsonl", 7)
    assert (error.status, error.created_at, error.expires_at) == (
        FileStatus.PROCESSED,
        int(NOW) + 2,
        int(NOW) + 62,
    )


async def test_result_files_expire_as_the_batch_says(db: Database) -> None:
    await running(db, 1, output_expires_after=3600)
    await run_out(db, await claim(db))
    done = await finish(db)
    assert done is not None
    assert done.error_file_id is None
    assert done.output_file_id is not None
    assert (await files.get(db, project_id=PROJECT, file_id=done.output_file_id)).expires_at == int(NOW) + 3600


async def test_the_ids_of_the_result_files_are_the_same_at_every_attempt(db: Database) -> None:
    """Chosen once, when the job is made, so that no other process ever announces ids that never come to be."""
    await running(db, 1)
    await run_out(db, await claim(db))
    first = await claim_job(db, JobKind.FINISH)
    second = await claim_job(db, JobKind.FINISH, now=NOW + 60)
    assert second.epoch == first.epoch + 1
    assert (first.output_file_id, first.error_file_id) == (second.output_file_id, second.error_file_id)
    with pytest.raises(LeaseLost):
        await batches.finished(db, job=first, output=result(first, "output"), error=None, now=NOW)


async def test_sending_the_same_results_again_commits_them_once(db: Database) -> None:
    await running(db, 1)
    await run_out(db, await claim(db))
    job = await claim_job(db, JobKind.FINISH)
    done = [await batches.finished(db, job=job, output=result(job, "output"), error=None, now=NOW) for _ in range(2)]
    assert done[0] == done[1]


async def test_a_cancel_while_finalizing_ends_in_cancelled_with_full_files(db: Database) -> None:
    batch = await running(db, 1)
    await run_out(db, await claim(db))
    cancelling = await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW + 1)
    assert cancelling.status is BatchStatus.CANCELLING
    done = await finish(db, now=NOW + 2)
    assert done is not None
    assert (done.status, done.cancelled_at, done.completed_at) == (BatchStatus.CANCELLED, int(NOW) + 2, None)
    assert done.output_file_id is not None
    assert done.counts == Counts(1, 1, 0)


async def test_cancelling_twice_is_once_and_terminal_is_final(db: Database) -> None:
    batch = await running(db, 1)
    first = await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    assert (first.status, first.stop_reason) == (BatchStatus.CANCELLING, StopReason.CANCELLED)
    assert await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW + 9) == first


async def test_what_has_ended_cannot_be_cancelled_or_expired(db: Database) -> None:
    batch = await running(db, 1)
    await run_out(db, await claim(db))
    done = await finish(db)
    with pytest.raises(BatchNotCancellable) as caught:
        await batches.cancel(db, project_id=PROJECT, batch_id=batch.id, now=NOW)
    assert caught.value.status is BatchStatus.COMPLETED
    assert not await batches.expire(db, batch_id=batch.id, now=NOW)
    assert await look(db, batch) == done


async def test_details_of_a_plan_are_the_batch_and_its_input(db: Database) -> None:
    batch = await create(db)
    job = await claim_job(db, JobKind.PLAN)
    assert await jobs.details(db, job=job) == PlanInput(batch, None, workers=1)
    await files.reserve(
        db,
        file_id="file-in",
        project_id=PROJECT,
        purpose="batch",
        filename="f",
        object_key="k",
        now=NOW,
        expires_at=None,
    )
    assert await jobs.details(db, job=job) == PlanInput(batch, None, workers=1)
    file = await files.publish(db, file_id="file-in", size=1, sha256="00")
    assert await jobs.details(db, job=job) == PlanInput(batch, file, workers=1)


async def test_details_of_a_finish_are_all_that_was_committed(db: Database) -> None:
    batch = await running(db, 2, 1)
    lease = await append(db, await claim(db), 0)
    await append(db, lease, 1, close=True)
    await run_out(db, await claim(db))
    found = await jobs.details(db, job=await claim_job(db, JobKind.FINISH))
    assert isinstance(found, FinishInput)
    assert (found.batch.id, found.total) == (batch.id, 3)
    assert found.index_key.startswith(f"batches/{batch.id}/")
    assert [(s.shard_number, s.seq, s.lines) for s in found.segments] == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    assert [s.number for s in found.shards] == [0, 1]


# Lists


async def test_a_list_is_newest_first_and_ties_are_in_order_of_creation(db: Database) -> None:
    made = [await create(db, now=NOW + offset) for offset in (0.0, 0.5, 1.0, 1.2, 0.7)]
    order = [made[i].id for i in (3, 2, 4, 1, 0)]
    for size in (1, 2, 4, 5, 6):
        seen: list[str] = []
        more = True
        while more:
            page = await batches.page(db, project_id=PROJECT, limit=size, after=seen[-1] if seen else None)
            seen += [batch.id for batch in page.items]
            more = page.has_more
        assert seen == order
    empty = await batches.page(db, project_id=PROJECT, limit=0, after=None)
    assert (empty.items, empty.has_more) == ((), False)


async def test_a_page_costs_the_same_number_of_queries_however_long_it_is(db: Database) -> None:
    for _ in range(5):
        await running(db, 1, 1)
    statements: list[str] = []
    event.listen(db._engine.sync_engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    counts = []
    for limit in (1, 5):
        statements.clear()
        page = await batches.page(db, project_id=PROJECT, limit=limit, after=None)
        assert all(batch.counts.total == 2 for batch in page.items)
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 3


async def test_open_batches_are_counted_by_status(db: Database) -> None:
    await running(db, 1)
    await run_out(db, await claim(db))
    await finish(db)
    await create(db)
    await create(db)
    assert await batches.open_counts(db) == {BatchStatus.VALIDATING: 2}
