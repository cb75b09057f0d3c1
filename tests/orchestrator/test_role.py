"""The whole role with its real processes: fast on an idle machine, and killed at the worst moments."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.orchestrator.children import Children
from engine.orchestrator.role import run
from state import jobs, shards
from state.clock import SystemClock
from state.records import BatchStatus, Counts
from state.settings import Settings
from state.wake import open_waker
from tests.orchestrator.dying import StuckObject, children_of, lives, needs_proc
from tests.orchestrator.house import House, answers, input_lines, parts
from tests.support.waiting import eventually, eventually_sync

pytestmark = [pytest.mark.processes, needs_proc]

ROLE = """
import asyncio, sys
from pathlib import Path
from engine.orchestrator.role import run
from state.settings import Settings

settings = Settings(data=Path(sys.argv[1]), min_free_bytes=0, lease_ttl=0.5, lease_heartbeat=0.1, lease_grace=0.1)
asyncio.run(run(settings, holder=sys.argv[2], stop=asyncio.Event()))
"""


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def start_role(settings: Settings) -> Iterator:
    """Starts orchestrators in processes of their own, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(holder: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", ROLE, str(settings.data), holder])
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
async def real_house(house: House, settings: Settings):
    """A house whose jobs run in child processes."""
    house.children = Children(settings)
    house.jobs, house.sweep, house.notices = parts(
        database=house.db, children=house.children, clock=house.clock, settings=settings
    )
    yield house
    await house.children.close()


async def has(house: House, batch, status: BatchStatus) -> bool:
    return (await house.get(batch)).status is status


async def until(house: House, batch, status: BatchStatus) -> None:
    await eventually(lambda: has(house, batch, status), within=20.0)


async def test_a_role_plans_and_finishes_and_stops_when_told_with_its_children(house: House, settings: Settings):
    await house.serve_model()
    others = children_of(os.getpid())  # of the test session: a stub, an engine
    stop = asyncio.Event()
    role = asyncio.create_task(run(settings, holder="orchestrator-1", stop=stop))
    waker = open_waker(settings)
    batch = await house.create(input_lines(3))
    waker.notify("orchestrator")
    await until(house, batch, BatchStatus.IN_PROGRESS)
    await house.work()
    waker.notify("orchestrator")
    await until(house, batch, BatchStatus.COMPLETED)
    assert await house.content((await house.get(batch)).output_file_id) == answers(batch.id, range(3))
    own = set(children_of(os.getpid())) - set(others)
    assert own
    stop.set()
    await role
    waker.close()
    assert not own & set(children_of(os.getpid()))  # invariant 15


async def test_a_child_killed_while_it_plans_costs_an_attempt_and_nothing_else(real_house: House):
    house = real_house
    await house.serve_model()
    batch = await house.create(input_lines(10))
    stuck = StuckObject(house.store, f"files/{batch.input_file_id}")
    await house.children.warm()
    work = asyncio.create_task(house.jobs.step())
    await eventually(stuck.has_begun)
    os.kill(house.children.pids[0], signal.SIGKILL)
    await work
    stuck.mend()
    await eventually(house.jobs.step)
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS


async def test_a_child_killed_while_it_finishes_is_replaced_and_the_files_are_whole(real_house: House):
    house = real_house
    await house.serve_model()
    batch = await house.create(input_lines(10))
    await house.settle()
    await house.work(failed=[4])
    last = (await shards.all_segments(house.db, batch_id=batch.id))[-1]
    stuck = StuckObject(house.store, last.object_key)
    work = asyncio.create_task(house.jobs.step())
    await eventually(stuck.has_begun)
    os.kill(house.children.pids[0], signal.SIGKILL)
    await work
    stuck.mend()
    await eventually(house.jobs.step)
    batch = await house.get(batch)
    assert batch.counts == Counts(10, completed=9, failed=1)
    assert await house.content(batch.output_file_id) == answers(batch.id, [n for n in range(10) if n != 4])
    assert await house.content(batch.error_file_id) == answers(batch.id, [4], good=False)


@pytest.mark.parametrize("reaped", [True, False], ids=["the supervisor tells", "nobody tells"])
async def test_an_orchestrator_killed_while_it_finishes_is_followed_by_another(house: House, start_role, reaped):
    await house.serve_model()
    first = start_role("orchestrator-1")
    batch = await house.create(input_lines(10))
    await until(house, batch, BatchStatus.IN_PROGRESS)
    lease = await house.claim()
    assert lease is not None
    lease = await house.answer(lease, close=False)
    segment, *_ = await shards.all_segments(house.db, batch_id=batch.id)
    stuck = StuckObject(house.store, segment.object_key)
    await shards.close(house.db, lease=lease, now=house.clock.wall())
    await eventually(stuck.has_begun, within=20.0)
    pids = children_of(first.pid)
    assert pids
    first.kill()
    first.wait()
    eventually_sync(lambda: not any(lives(pid) for pid in pids))  # invariant 15
    stuck.mend()
    assert (await house.get(batch)).status is BatchStatus.FINALIZING

    if reaped:
        await jobs.expire_leases(house.db, holder="orchestrator-1")
    start_role("orchestrator-2")
    await until(house, batch, BatchStatus.COMPLETED)
    assert await house.content((await house.get(batch)).output_file_id) == answers(batch.id, range(10))
