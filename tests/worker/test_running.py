"""A worker, a real database, a real store, and a stub of an engine: batches run to their end."""

import pytest

from tests.support.stub import Stub, answer_of, chat
from tests.support.waiting import eventually
from tests.worker.farm import Farm

pytestmark = pytest.mark.asyncio


async def test_every_request_is_answered_once_and_the_last_shard_makes_the_finish_job(farm: Farm, stub: Stub) -> None:
    texts = [f"question {i}" for i in range(50)]
    batch = await farm.plan(texts, per_shard=20)
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    lines = await farm.lines(batch)
    assert sorted(lines) == list(range(50))
    assert stub.calls == 50
    for i, text in enumerate(texts):
        assert lines[i]["custom_id"] == f"id-{i}"
        assert lines[i]["response"]["body"]["choices"][0]["message"]["content"] == answer_of(chat(text))
    record = await farm.batch(batch)
    assert record.counts.completed == 50
    assert record.counts.failed == 0
    assert record.usage.input_tokens == 100
    assert record.model == "stub-model"


async def test_a_small_batch_takes_one_commit(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["a", "b", "c"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert len(await farm.segments(batch)) == 1


async def test_the_orchestrator_is_woken_when_a_batch_has_run(farm: Farm, stub: Stub) -> None:
    waker = farm.listening()
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.worker_state())
        await farm.plan(["a"])
        assert await waker.wait(5.0)
    waker.close()


async def test_many_small_batches_run(farm: Farm, stub: Stub) -> None:
    async with farm.worker(upstream=stub.url):
        ids = [await farm.plan([f"batch {i} a", f"batch {i} b"]) for i in range(20)]
        for batch in ids:
            await eventually(lambda batch=batch: farm.ended(batch))
    assert stub.calls == 40


async def test_requests_in_flight_stay_within_the_limit(farm: Farm, stub: Stub) -> None:
    stub.latency = 0.01
    batch = await farm.plan([f"q{i}" for i in range(100)], per_shard=16)
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert stub.max_in_flight == farm.settings.max_in_flight


async def test_results_are_committed_while_a_batch_runs(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["fast", "[[stub latency=60]] slow"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.segments(batch))
        assert (await farm.batch(batch)).counts.completed == 1


async def test_a_worker_without_work_says_that_it_is_ready_and_goes_in_order(farm: Farm, stub: Stub) -> None:
    async with farm.worker(upstream=stub.url):

        async def ready() -> bool:
            return await farm.worker_state() == "ready"

        await eventually(ready)
    assert await farm.worker_state() is None
