"""Requests that kill the engine, or the worker with it (invariant 10)."""

import pytest
from sqlalchemy import select

from engine.worker import desk
from engine.worker.poison import mark_of
from state import shards, tables
from tests.support.waiting import eventually
from tests.worker.farm import Farm

pytestmark = pytest.mark.asyncio

DEADLY = "[[echo:die]] deadly"


@pytest.fixture
def echo(farm: Farm) -> Farm:
    farm.tell(engine="echo", model="echo")
    return farm


async def outcome(farm: Farm, batch: str) -> dict[int, str | None]:
    return {i: (line["error"] or {}).get("code") for i, line in (await farm.lines(batch)).items()}


async def test_a_request_that_kills_the_engine_is_quarantined_and_the_others_are_answered(echo: Farm) -> None:
    batch = await echo.plan([f"q{i}" for i in range(5)] + [DEADLY] + [f"r{i}" for i in range(20)], model="echo")
    async with echo.worker():
        await eventually(lambda: echo.ended(batch))
    codes = await outcome(echo, batch)
    assert codes == {i: "engine_crash" if i == 5 else None for i in range(26)}
    record = await echo.batch(batch)
    assert (record.counts.completed, record.counts.failed) == (25, 1)


async def test_two_deadly_requests_in_two_batches_cost_only_themselves(echo: Farm) -> None:
    echo.tell(echo_latency=0.01)
    first = await echo.plan([DEADLY, *(f"a{i}" for i in range(10))], model="echo")
    second = await echo.plan([*(f"b{i}" for i in range(10)), f"{DEADLY} too"], model="echo")
    async with echo.worker():
        await eventually(lambda: echo.ended(first))
        await eventually(lambda: echo.ended(second))
    assert [i for i, code in (await outcome(echo, first)).items() if code] == [0]
    assert [i for i, code in (await outcome(echo, second)).items() if code] == [10]


async def test_an_engine_that_dies_once_costs_nobody_an_attempt(echo: Farm) -> None:
    echo.tell(max_attempts=1, echo_latency=0.01)
    batch = await echo.plan([f"q{i}" for i in range(20)] + ["[[echo:die:times=1]] once"], model="echo")
    async with echo.worker():
        await eventually(lambda: echo.ended(batch))
    assert set((await outcome(echo, batch)).values()) == {None}


async def test_a_suspect_that_gets_an_error_line_of_another_kind_is_no_suspect_any_more(
    echo: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was at the engine at both deaths, and then it is its connection that breaks: nothing may wait for it any longer."""
    monkeypatch.setattr(desk, "DEATH_NOTICE_S", 0.2)
    echo.tell(max_attempts=1, max_in_flight=2, echo_latency=0.01)
    texts = ["[[echo:drop]] broken", "[[echo:die:times=2]] twice", *(f"q{i}" for i in range(5))]
    batch = await echo.plan(texts, model="echo")
    async with echo.worker():
        await eventually(lambda: echo.ended(batch))
    assert await outcome(echo, batch) == {i: None if i else "engine_error" for i in range(7)}


async def dying_workers(farm: Farm, times: int, *, mark: int | None = None) -> None:
    """Workers claim the batch's only shard one after another and vanish, the last one having noted `mark`."""
    for i in range(times):
        lease = await farm.claim(f"ghost-{i}", "echo")
        assert lease is not None
        if mark is not None and i == times - 1:
            await shards.suspect(farm.db, lease=lease, place=mark)
        await shards.expire_leases(farm.db)


async def test_after_two_claims_in_vain_requests_run_one_at_a_time_and_are_noted_first(echo: Farm) -> None:
    echo.tell(lease_grace=0.0)
    batch = await echo.plan(["[[echo:latency=60]] slow", "never beside it"], model="echo")
    await dying_workers(echo, 2)
    async with echo.worker():

        async def noted() -> bool:
            async with echo.db.read() as conn:
                return await conn.scalar(
                    select(tables.shards.c.suspect).where(tables.shards.c.batch_id == batch)
                ) == mark_of(0)

        await eventually(noted)
    assert await echo.lines(batch) == {}


async def test_a_careful_worker_answers_everything(echo: Farm) -> None:
    echo.tell(lease_grace=0.0)
    batch = await echo.plan([f"q{i}" for i in range(20)], model="echo")
    other = await echo.plan([f"r{i}" for i in range(20)], model="echo")
    await dying_workers(echo, 2)
    async with echo.worker():
        await eventually(lambda: echo.ended(batch))
        await eventually(lambda: echo.ended(other))
    assert set((await outcome(echo, batch)).values()) == {None}


async def test_what_killed_a_worker_while_it_ran_alone_is_tried_once_more(echo: Farm) -> None:
    echo.tell(lease_grace=0.0)
    batch = await echo.plan([f"q{i}" for i in range(5)], model="echo")
    await dying_workers(echo, 3, mark=mark_of(3))
    async with echo.worker():
        await eventually(lambda: echo.ended(batch))
    assert set((await outcome(echo, batch)).values()) == {None}


async def test_what_killed_two_workers_while_it_ran_alone_is_quarantined(echo: Farm) -> None:
    echo.tell(lease_grace=0.0)
    batch = await echo.plan([f"q{i}" for i in range(5)], model="echo")
    await dying_workers(echo, 4, mark=mark_of(3, again=True))
    async with echo.worker():
        await eventually(lambda: echo.ended(batch))
    assert [i for i, code in (await outcome(echo, batch)).items() if code == "engine_crash"] == [3]
