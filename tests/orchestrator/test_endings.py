"""A batch from its creation to each of its endings: status, files and books."""

import json

import pytest

from state import workers
from state.records import Batch, BatchStatus, Counts, Fault
from tests.orchestrator.house import House, answers, input_lines

NEVER_RAN = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
}


async def test_a_batch_is_planned_run_and_finished_in_input_order(house: House):
    batch = await house.planned(40)
    assert batch.status is BatchStatus.IN_PROGRESS
    assert batch.counts == Counts(total=40)
    assert batch.model == "m"

    await house.work()
    assert (await house.get(batch)).status is BatchStatus.FINALIZING
    await house.settle()

    batch = await house.get(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts == Counts(40, completed=40)
    assert batch.usage.input_tokens == 40
    assert batch.model == "m-2026"
    assert await house.content(batch.output_file_id) == answers(batch.id, range(40))
    assert batch.error_file_id is None


async def test_the_files_are_named_after_the_batch(house: House):
    batch = await house.planned(2)
    await house.work(failed=[1])
    await house.settle()
    batch = await house.get(batch)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    names = [(await house.file(i)).filename for i in (batch.output_file_id, batch.error_file_id)]
    assert names == [f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"]
    assert (await house.file(batch.output_file_id)).purpose == "batch_output"


async def test_failed_requests_are_in_the_error_file(house: House):
    batch = await house.planned(20)
    await house.work(failed=[3, 19])
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts == Counts(20, completed=18, failed=2)
    assert await house.content(batch.error_file_id) == answers(batch.id, [3, 19], good=False)


async def test_a_batch_whose_requests_all_failed_completes_without_an_output_file(house: House):
    batch = await house.planned(3)
    await house.work(failed=range(3))
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert batch.output_file_id is None
    assert await house.content(batch.error_file_id) == answers(batch.id, range(3), good=False)


async def never_ran(house: House, file_id: str | None) -> list[tuple[str, str, str]]:
    """(custom_id, code, message) of the error file's lines."""
    lines = [json.loads(line) for line in (await house.content(file_id)).splitlines()]
    assert all(line["response"] is None for line in lines)
    return [(line["custom_id"], line["error"]["code"], line["error"]["message"]) for line in lines]


async def half_run(house: House, window_s: float = 86_400.0) -> Batch:
    """A batch of 40 of which one shard ran to its end and one is being worked on."""
    batch = await house.planned(40, window_s=window_s)
    first = await house.claim()
    assert first is not None
    await house.answer(first)
    second = await house.claim()
    assert second is not None
    await house.answer(second, most=4, close=False)
    return batch


@pytest.mark.parametrize(("how", "code"), [("cancel", "batch_cancelled"), ("expire", "batch_expired")])
async def test_a_batch_that_is_stopped_midway_keeps_its_answers_and_names_the_rest(house: House, how, code):
    batch = await half_run(house, window_s=100.0)
    if how == "cancel":
        await house.cancel(batch)
    else:
        house.clock.advance(101.0)
    await house.settle()
    house.clock.advance(house.settings.stop_grace + 1)  # the worker does not answer: it is overruled (invariant 7)
    await house.settle()

    batch = await house.get(batch)
    assert batch.status is (BatchStatus.CANCELLED if how == "cancel" else BatchStatus.EXPIRED)
    ran = batch.counts.completed
    assert batch.counts == Counts(40, completed=ran, failed=0)
    output = (await house.content(batch.output_file_id)).splitlines()
    rest = await never_ran(house, batch.error_file_id)
    assert 4 < ran == len(output) < 40
    assert {(c, m) for _, c, m in rest} == {(code, NEVER_RAN[code])}
    done = [int(json.loads(line)["custom_id"][2:]) for line in output]
    left = [int(name[2:]) for name, _, _ in rest]
    assert done == sorted(done)
    assert left == sorted(left)
    assert sorted(done + left) == list(range(40))  # invariant 1


async def test_a_batch_that_is_cancelled_before_anything_ran_has_an_error_file_only(house: House):
    batch = await house.planned(3)
    await house.cancel(batch)
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.CANCELLED
    assert batch.output_file_id is None
    assert len(await never_ran(house, batch.error_file_id)) == 3


async def test_a_batch_that_is_cancelled_while_finalizing_ends_cancelled_with_full_files(house: House):
    batch = await house.planned(3)
    await house.work()
    await house.cancel(batch)
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.CANCELLED
    assert await house.content(batch.output_file_id) == answers(batch.id, range(3))
    assert batch.error_file_id is None


@pytest.mark.parametrize(("how", "end"), [("cancel", BatchStatus.CANCELLED), ("expire", BatchStatus.EXPIRED)])
async def test_a_batch_that_is_stopped_while_validating_ends_without_files(house: House, how, end):
    batch = await house.create(input_lines(3), window_s=60.0)
    await house.settle()  # no model is known yet, so it waits
    assert (await house.get(batch)).status is BatchStatus.VALIDATING
    if how == "cancel":
        await house.cancel(batch)
    else:
        house.clock.advance(61.0)
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is end
    assert (batch.output_file_id, batch.error_file_id, batch.counts) == (None, None, Counts())

    await house.serve_model()
    house.clock.advance(60.0)
    await house.settle()
    assert (await house.get(batch)).status is end  # its plan is not made any more


async def test_a_cancel_that_comes_while_the_plan_is_made_wins(house: House):
    await house.serve_model()
    batch = await house.create(input_lines(3))
    house.children.before = lambda job: house.cancel(batch)
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.CANCELLED
    assert batch.in_progress_at is None


async def test_a_cancel_that_comes_while_the_files_are_written_ends_in_cancelled(house: House):
    batch = await house.planned(3)
    await house.work()
    house.children.before = lambda job: house.cancel(batch)
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.CANCELLED
    assert await house.content(batch.output_file_id) == answers(batch.id, range(3))


@pytest.mark.parametrize(
    ("state", "served", "told"),
    [("ready", ["other"], True), ("ready", ["other", "m"], False), ("starting", [], False), (None, [], False)],
)
async def test_it_is_told_when_no_engine_that_runs_serves_a_batchs_model(
    house: House, caplog: pytest.LogCaptureFixture, state: str | None, served: list[str], told: bool
):
    if state is not None:
        now = house.clock.wall()
        await workers.seen(house.db, worker_id="w", engine="e", state=state, cause=None, models=served, now=now)
    batch = await house.planned(3)
    assert (f"{batch.id} waits: no engine that runs serves m" in caplog.text) is told


async def test_a_bad_file_fails_its_batch_with_every_bad_line_and_runs_nothing(house: House):
    await house.serve_model()
    batch = await house.create(input_lines(2) + b"nonsense\n" + input_lines(1, model="other"))
    await house.settle()
    batch = await house.get(batch)
    assert batch.status is BatchStatus.FAILED
    assert next((fault.line, fault.code) for fault in batch.faults) == (3, "invalid_json_line")
    assert batch.counts == Counts()
    assert await house.claim() is None


async def test_a_missing_input_file_is_the_batchs_fault(house: House):
    await house.serve_model()
    batch = await house.create(b"", file_id="file-none")
    await house.settle()
    batch = await house.get(batch)
    message = "Cannot find file file-none, or organization default does not have access to it."
    assert batch.faults == (Fault("invalid_request", message, "file_id", None),)


async def test_a_batch_waits_for_the_first_model_and_is_planned_a_second_after_it_came(house: House):
    batch = await house.create(input_lines(3))
    await house.settle()
    await house.serve_model()
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.VALIDATING
    house.clock.advance(1.0)
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS


async def test_a_batch_stopped_for_workers_that_do_not_answer_ends_within_a_minute(house: House):
    batch = await half_run(house)
    await house.cancel(batch)
    start = house.clock.wall()
    while (await house.get(batch)).status is not BatchStatus.CANCELLED:
        house.clock.advance(1.0)
        await house.settle()
    assert house.clock.wall() - start <= 60.0  # invariant 7
