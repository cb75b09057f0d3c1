"""The orchestrator's composition root: opens what its loops need, runs them, and ends them in time."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from engine.orchestrator.children import Children
from engine.orchestrator.janitor import Janitor
from engine.orchestrator.jobs import Jobs
from engine.orchestrator.loop import Bell, keep
from engine.orchestrator.outcome import Outcomes
from engine.orchestrator.sweep import Sweep
from state.clock import Clock, SystemClock
from state.database import Database
from state.objects import ObjectStore
from state.objects.open import open_store
from state.settings import Settings
from state.wake import POLL_S, Waker, open_waker

log = logging.getLogger(__name__)

#: Seconds between the sweeper's rounds and between the janitor's.
SWEEP_S, JANITOR_S = 1.0, 60.0


async def run(settings: Settings, *, holder: str, stop: asyncio.Event, clock: Clock | None = None) -> None:
    """Plans, finishes, sweeps and cleans until `stop` is set, then gives its jobs back and ends its children.

    `holder` names this process in leases and is new at every start. Returns within 5 s of the stop.
    """
    async with _opened(settings, clock=clock or SystemClock()) as parts:
        await _run_until(stop, parts, holder)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the loops share."""

    settings: Settings
    clock: Clock
    database: Database
    store: ObjectStore
    waker: Waker
    children: Children


@contextlib.asynccontextmanager
async def _opened(settings: Settings, *, clock: Clock) -> AsyncIterator[_Parts]:
    async with contextlib.AsyncExitStack() as stack:
        database = Database.open(settings.database)
        stack.push_async_callback(database.close)
        store = open_store(settings)
        stack.push_async_callback(store.close)
        waker = open_waker(settings, "orchestrator")
        stack.callback(waker.close)
        children = Children(settings)
        stack.push_async_callback(children.close)
        yield _Parts(settings, clock, database, store, waker, children)


async def _run_until(stop: asyncio.Event, parts: _Parts, holder: str) -> None:
    database, store, clock, waker, settings = parts.database, parts.store, parts.clock, parts.waker, parts.settings
    outcomes = Outcomes(database=database, clock=clock, waker=waker, settings=settings)
    jobs = Jobs(
        database=database, children=parts.children, outcomes=outcomes, clock=clock, holder=holder, settings=settings
    )
    sweep = Sweep(database=database, clock=clock, waker=waker, settings=settings)
    janitor = Janitor(database=database, store=store, clock=clock, settings=settings)
    job_bell, sweep_bell = Bell(), Bell()
    warm = asyncio.create_task(_warm(parts.children))
    loops = [
        asyncio.create_task(stop.wait()),
        asyncio.create_task(_listen(waker, job_bell, sweep_bell)),
        asyncio.create_task(keep(jobs.step, name="the job loop", every=POLL_S, bell=job_bell)),
        asyncio.create_task(keep(sweep.step, name="the sweeper", every=SWEEP_S, bell=sweep_bell)),
        asyncio.create_task(keep(janitor.step, name="the janitor", every=JANITOR_S, bell=Bell())),
    ]
    try:
        ended, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        for loop in ended:
            loop.result()  # none but the stop ever ends, unless by an error of ours: then the process ends with it
    finally:
        for task in (warm, *loops):
            task.cancel()
        await asyncio.gather(warm, *loops, return_exceptions=True)
        await jobs.close()


async def _listen(waker: Waker, *bells: Bell) -> None:
    """Passes each wake-up on to the loops."""
    while True:
        if await waker.wait(POLL_S):
            for bell in bells:
                bell.ring()


async def _warm(children: Children) -> None:
    """Pays a child's start-up before the first job. A failure shows again, with consequences, at that job."""
    try:
        await children.warm()
    except Exception as error:
        log.warning("the child process does not start: %s", error)
