"""The janitor removes exactly what no row names any more, and nothing else."""

import pytest

from engine.orchestrator.child import SPOOL_PREFIX, spool_folder
from engine.orchestrator.janitor import UPLOAD_AGE_S, WORK_AGE_S
from state import batches, files
from state.records import BatchStatus, FileNotFound, Unavailable
from tests.orchestrator.house import PROJECT, House, answers, input_lines


async def finished(house: House, *, lines: int = 10, failed: tuple[int, ...] = (1,)):
    batch = await house.planned(lines)
    await house.work(failed=failed)
    await house.settle()
    return await house.get(batch)


async def delete(house: House, file_id: str | None) -> None:
    assert file_id is not None
    await files.delete(house.db, project_id=PROJECT, file_id=file_id, now=house.clock.wall())


async def test_nothing_of_a_batch_that_runs_or_has_just_ended_is_touched(house: House):
    ended = await finished(house)
    running = await house.planned(10)
    lease = await house.claim()
    assert lease is not None
    await house.answer(lease, most=3, close=False)
    before = await house.keys("")
    house.clock.advance(WORK_AGE_S)
    await house.janitor.round()
    assert await house.keys("") == before
    assert (await house.get(ended)).status is BatchStatus.COMPLETED
    assert (await house.get(running)).status is BatchStatus.IN_PROGRESS


async def test_an_hour_after_its_end_a_batchs_segments_go_and_its_plan_and_results_stay(house: House):
    batch = await finished(house)
    plan = await house.keys(f"batches/{batch.id}/e")
    results = await house.keys("results/")
    segments = await house.keys(f"batches/{batch.id}/s")
    assert plan
    assert segments
    house.clock.advance(WORK_AGE_S + 1)
    await house.janitor.round()
    assert await house.keys("batches/") == plan
    assert await house.keys("results/") == results
    assert await house.content((await house.get(batch)).error_file_id) == answers(batch.id, [1], good=False)
    assert await batches.garbage(house.db, now=house.clock.wall(), age=WORK_AGE_S, limit=10) == []


async def test_objects_of_attempts_that_were_never_committed_go_with_the_segments(house: House):
    batch = await finished(house)
    results = await house.keys("results/")
    for key in (f"results/{batch.id}/e9/output", f"batches/{batch.id}/e9/shard-0", f"batches/{batch.id}/s0/e9/seg-0"):
        await house.store.put(key, b"of a lost attempt")
    house.clock.advance(WORK_AGE_S + 1)
    await house.janitor.round()
    assert await house.keys("results/") == results
    assert {key.split("/")[2] for key in await house.keys("batches/")} == {"e1"}


async def test_the_plan_goes_with_the_last_result_file(house: House):
    batch = await finished(house)
    house.clock.advance(WORK_AGE_S + 1)
    await house.janitor.round()
    plan = await house.keys("batches/")
    await delete(house, batch.output_file_id)
    await house.janitor.round()
    assert await house.keys("batches/") == plan
    assert len(await house.keys("results/")) == 1
    await delete(house, batch.error_file_id)
    await house.janitor.round()
    assert await house.keys("batches/") + await house.keys("results/") == []


async def test_results_deleted_within_the_hour_take_the_plan_along_after_it(house: House):
    batch = await finished(house)
    for file_id in (batch.output_file_id, batch.error_file_id):
        await delete(house, file_id)
    await house.janitor.round()
    assert await house.keys("batches/") != []
    house.clock.advance(WORK_AGE_S + 1)
    await house.janitor.round()
    assert await house.keys("batches/") == []


async def test_a_batch_that_never_ran_leaves_nothing(house: House):
    await house.serve_model()
    batch = await house.create(b"nonsense\n")
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.FAILED
    await house.store.put(f"batches/{batch.id}/e1/shard-0", b"of a lost plan")
    house.clock.advance(WORK_AGE_S + 1)
    await house.janitor.round()
    assert await house.keys("batches/") == []
    assert len(await house.keys("files/")) == 1


async def test_files_expire_and_their_bytes_go(house: House):
    batch = await finished(house)
    house.clock.advance(house.settings.output_ttl + 1)
    await house.janitor.round()
    with pytest.raises(FileNotFound):
        await house.content(batch.output_file_id)
    assert await house.keys("results/") == []
    assert len(await house.keys("files/")) == 1  # the input was given no end


async def test_deleted_files_lose_their_bytes_and_others_keep_them(house: House):
    kept, gone = await house.upload(b"kept\n"), await house.upload(b"gone\n")
    await delete(house, gone)
    await house.janitor.round()
    assert await house.keys("files/") == [f"files/{kept}"]
    assert await files.garbage(house.db) == []


async def test_an_upload_that_never_ended_is_given_up_after_a_day(house: House):
    await files.reserve(
        house.db,
        file_id="file-slow",
        project_id=PROJECT,
        purpose="batch",
        filename="slow.jsonl",
        object_key="files/file-slow",
        now=house.clock.wall(),
        expires_at=None,
    )
    await house.store.put("files/file-slow", b"its bytes were written, its row never published")
    house.clock.advance(UPLOAD_AGE_S)
    await house.janitor.round()
    assert await house.keys("files/") == ["files/file-slow"]
    house.clock.advance(1)
    await house.janitor.round()
    assert await house.keys("files/") == []


async def test_bytes_go_before_the_row_that_would_find_them_again(house: House, monkeypatch):
    gone = await house.upload(b"gone\n")
    await delete(house, gone)

    async def away(keys):
        raise Unavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(house.store, "delete", away)
        with pytest.raises(Unavailable):
            await house.janitor.round()
    await house.janitor.round()
    assert await house.keys("files/") == []


async def test_a_chore_that_fails_does_not_keep_the_others_from_their_turn(house: House, monkeypatch):
    gone = await house.upload(b"gone\n")
    await delete(house, gone)

    async def away(*_, **__):
        raise Unavailable("the database is away")

    monkeypatch.setattr(files, "expire", away)
    failures = 0
    for _ in house.janitor.chores:
        try:
            await house.janitor.step()
        except Unavailable:
            failures += 1
    assert failures == 1
    assert await house.keys("files/") == []


async def test_a_round_of_steps_ends_when_nothing_is_left(house: House):
    for _ in range(3):
        await delete(house, await house.upload(b"x\n"))
    steps = 1
    while await house.janitor.step():
        steps += 1
    assert steps == len(house.janitor.chores)


async def test_spool_folders_of_dead_processes_are_cleared(house: House):
    dead = house.settings.spool_folder / f"{SPOOL_PREFIX}dead"
    dead.mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "plan-x").mkdir()
    other = house.settings.spool_folder / "of something else"
    other.touch()
    with spool_folder(house.settings.spool_folder) as alive:
        await house.janitor.round()
        assert sorted(house.settings.spool_folder.iterdir()) == sorted([alive, other])


async def test_inputs_outlive_their_batch(house: House):
    await finished(house)
    house.clock.advance(WORK_AGE_S + 1)
    await house.janitor.round()
    (key,) = await house.keys("files/")
    assert await house.store.get(key) == input_lines(10)


async def test_a_clock_that_jumps_a_year_ahead_removes_nothing(house: House):
    """Invariant 8: what is removed is gone for good."""
    batch = await finished(house)
    before = await house.keys("")
    house.clock.jump(365 * 86_400.0)
    await house.janitor.round()
    assert await house.keys("") == before
    assert (await house.get(batch)).output_file_id
    house.clock.advance(31 * 86_400.0)  # time that really passes
    await house.janitor.round()
    assert await house.keys("results/") == []
