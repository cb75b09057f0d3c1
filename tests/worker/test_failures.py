"""Engines that fail, requests that fail, and what that costs whom."""

import asyncio

import pytest

from engine.backends.echo import EchoEngine
from engine.backends.protocol import EngineMisconfigured
from engine.worker import retry, role
from tests.support.stub import Stub, chat
from tests.support.waiting import eventually
from tests.worker.farm import Farm

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and probes come a hundred times sooner."""
    monkeypatch.setattr(retry, "FIRST", 0.005)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 0.2)


async def test_a_request_that_fails_twice_is_retried_and_answered(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["fine", "[[stub status=500 times=2]] shaky", *(f"fine {i}" for i in range(5))])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert (await farm.batch(batch)).counts.completed == 7
    assert stub.calls_of(chat("[[stub status=500 times=2]] shaky")) == 3


async def test_a_request_that_always_fails_becomes_an_error_line_and_blocks_nobody(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan([f"fine {i}" for i in range(30)] + ["[[stub status=500]] broken"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    lines = await farm.lines(batch)
    assert lines[30]["file"] == "error"
    assert lines[30]["response"]["status_code"] == 500
    record = await farm.batch(batch)
    assert (record.counts.completed, record.counts.failed) == (30, 1)


async def test_a_reply_whose_model_is_no_text_that_can_be_kept_is_committed_all_the_same(
    farm: Farm, stub: Stub
) -> None:
    batch = await farm.plan(["[[stub body=surrogate]] odd", "fine"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert (await farm.batch(batch)).counts.completed == 2
    assert stub.calls_of(chat("[[stub body=surrogate]] odd")) == 1


async def test_a_bad_request_is_final_at_once(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["[[stub status=400]] bad", "good"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert stub.calls == 2
    assert (await farm.lines(batch))[0]["response"]["status_code"] == 400


@pytest.mark.parametrize("mode", ["down", "unauthorized", "status:503", "missing"])
async def test_an_engine_that_fails_for_a_while_costs_no_line_and_no_attempt(farm: Farm, stub: Stub, mode: str) -> None:
    farm.tell(max_attempts=1)
    first = await farm.plan([f"early {i}" for i in range(10)])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(first))
        await stub.set_mode(mode)
        later = await farm.plan([f"later {i}" for i in range(30)])

        async def failing() -> bool:
            return await farm.worker_state() == "failing"

        await eventually(failing)
        await stub.set_mode("ok")
        await eventually(lambda: farm.ended(later))
        await eventually(lambda: farm.worker_state())
    record = await farm.batch(later)
    assert (record.counts.completed, record.counts.failed) == (30, 0)


async def test_an_engine_that_is_down_at_the_start_is_waited_for(farm: Farm, stub: Stub) -> None:
    await stub.set_mode("down")
    batch = await farm.plan(["a"])
    async with farm.worker(upstream=stub.url):

        async def failing() -> bool:
            return await farm.worker_state() == "failing"

        await eventually(failing)
        await stub.set_mode("ok")
        await eventually(lambda: farm.ended(batch))


async def test_a_worker_whose_engine_never_answered_ends_when_told(farm: Farm, stub: Stub) -> None:
    await stub.set_mode("down")
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.worker_state())
    assert await farm.worker_state() is None


async def test_an_engine_that_is_misconfigured_ends_the_worker(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: EchoEngine) -> None:
        raise EngineMisconfigured("no such model", ("the last line",))

    monkeypatch.setattr(EchoEngine, "start", start)
    farm.tell(engine="echo")
    with pytest.raises(EngineMisconfigured, match="no such model"):
        await role.run(farm.settings, worker_id="worker-1", upstream=None, stop=asyncio.Event())


async def test_a_rate_limit_is_obeyed_and_costs_nothing(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["[[stub status=429 retry-after=0.2 times=1]] limited", *(f"q{i}" for i in range(20))])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert (await farm.batch(batch)).counts.completed == 21


async def test_a_connection_that_breaks_is_a_failure_of_its_request_alone(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["[[stub drop times=1]] dropped", *(f"q{i}" for i in range(20))])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert (await farm.batch(batch)).counts.completed == 21


async def test_an_alias_is_sent_by_the_name_the_engine_knows(farm: Farm, stub: Stub) -> None:
    """The name may have been registered by another worker: this one has never heard of it."""
    batch = await farm.plan(["hello"], asked="gpt-4o-mini")
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert (await farm.batch(batch)).counts.completed == 1
