"""The worker's process: one engine, from opening what it needs to giving everything back.

The composition root of this role. Three loops run beside the requests: one claims, one tends the open shards, one looks
after the engine; the heartbeat has its own thread.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.backends.open import open_backend
from engine.backends.protocol import Backend, ServedModel
from engine.worker.drain import drain, until
from engine.worker.engine_watch import EngineWatch
from engine.worker.feed import Fixed
from engine.worker.heartbeat import Heartbeat, Status
from engine.worker.worker import Worker
from state import workers
from state.clock import Clock, SystemClock
from state.database import Database
from state.objects.open import open_store
from state.records import Unavailable
from state.settings import Settings
from state.wake import POLL_S, Waker, open_waker

log = logging.getLogger(__name__)

#: In flight where neither the settings nor the engine say.
IN_FLIGHT = 64

#: Seconds between looks at the open shards.
TEND_S = 0.05

#: Seconds the heartbeat's thread and the row in `workers` may take to go.
FAREWELL_S = 0.7

#: Seconds that a claim under way may take to end.
LAST_CLAIM_S = 1.0


async def run(settings: Settings, *, worker_id: str, upstream: str | None, stop: asyncio.Event) -> None:
    """Runs one engine's worker until `stop` is set; returns within ten seconds of it.

    Raises:
        EngineMisconfigured: the engine cannot work as configured.
        SettingsError: neither can the worker.
    """
    async with contextlib.AsyncExitStack() as stack:
        database = Database.open(settings.database)
        stack.push_async_callback(until, database.close, FAREWELL_S)
        store = open_store(settings)
        stack.push_async_callback(store.close)
        waker = open_waker(settings, "worker")
        stack.callback(waker.close)
        backend = open_backend(settings, upstream=upstream)
        clock = SystemClock()
        worker = Worker(
            settings=settings,
            worker_id=worker_id,
            database=database,
            store=store,
            backend=backend,
            waker=waker,
            clock=clock,
            throttle=Fixed(in_flight_limit(settings, backend)),
        )
        await Shift(
            settings=settings,
            worker_id=worker_id,
            worker=worker,
            backend=backend,
            database=database,
            waker=waker,
            clock=clock,
        ).run(stop)


def in_flight_limit(settings: Settings, backend: Backend) -> int:
    """How many requests may be at the engine: as set, else as the engine suggests, else 64."""
    suggested = getattr(backend, "suggested_in_flight", None)
    return settings.max_in_flight or suggested or IN_FLIGHT


class Shift:
    """A worker at work: its loops, from the first beat to the last."""

    def __init__(
        self,
        *,
        settings: Settings,
        worker_id: str,
        worker: Worker,
        backend: Backend,
        database: Database,
        waker: Waker,
        clock: Clock,
    ) -> None:
        self._worker_id, self._worker, self._backend = worker_id, worker, backend
        self._database, self._waker = database, waker
        self._look = asyncio.Event()
        self._status = Status("starting")
        self.heartbeat = Heartbeat(
            database_url=settings.database,
            worker_id=worker_id,
            engine=backend.name,
            leases=worker.leases,
            clock=clock,
            ttl=settings.lease_ttl,
            every=settings.lease_heartbeat,
            heard=worker.heard,
            status=lambda: self._status,
        )
        self._watch = EngineWatch(
            backend=backend,
            database=database,
            clock=clock,
            known=self._know,
            up=self._up,
            died=worker.engine_died,
            changed=self._publish,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then brings everything to its end; likewise when something breaks, which it raises."""
        self.heartbeat.start()
        claiming = asyncio.create_task(self._claim_on(), name="claim")
        loops = [
            asyncio.create_task(self._watch.run(), name="engine"),
            asyncio.create_task(self._listen_on(), name="listen"),
            asyncio.create_task(self._tend_on(), name="tend"),
        ]
        waits: list[asyncio.Future[Any]] = [
            *loops,
            claiming,
            asyncio.create_task(stop.wait(), name="stop"),
            self._worker.feed.broken,
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._end(waits, claiming)

    async def _end(self, waits: "Sequence[asyncio.Future[Any]]", claiming: "asyncio.Task[None]") -> None:
        self._worker.draining = True
        self._look.set()
        with contextlib.suppress(TimeoutError, Exception):  # a claim is let end, so that its lease is known
            await asyncio.wait_for(asyncio.shield(claiming), LAST_CLAIM_S)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await drain(self._worker, self._backend)
        with contextlib.suppress(Unavailable):
            await until(self.heartbeat.stop, FAREWELL_S)
            await until(lambda: workers.forget(self._database, worker_id=self._worker_id), FAREWELL_S)

    # ---- the loops ---------------------------------------------------------------------------------------------------
    async def _listen_on(self) -> None:
        """A notice means a new plan or a stopped batch: look for shards, and renew now to hear of the latter."""
        while True:
            if await self._waker.wait(POLL_S):
                self.heartbeat.nudge()
            self._look.set()

    async def _claim_on(self) -> None:
        while not self._worker.draining:
            await self._look.wait()
            self._look.clear()
            await self._attempt(self._worker.claim_what_is_due)

    async def _tend_on(self) -> None:
        while True:
            await self._attempt(self._worker.tend)
            self._publish()
            if self._worker.wants_more:
                self._look.set()
            await asyncio.sleep(TEND_S)

    async def _attempt(self, step: Callable[[], Awaitable[None]]) -> None:
        """One step of a loop; what goes wrong is logged with its context, and the loop goes on."""
        try:
            await step()
        except Unavailable as error:
            log.warning("%s, trying again", error, extra={"worker": self._worker_id})
            await asyncio.sleep(POLL_S)
        except Exception:
            log.exception("a step of the worker failed", extra={"worker": self._worker_id})
            await asyncio.sleep(POLL_S)

    # ---- the engine --------------------------------------------------------------------------------------------------
    def _know(self, served: Sequence[ServedModel]) -> None:
        self._worker.models = tuple(model.root for model in served)
        self._worker.desk.accepted = {model.root: frozenset(model.names) for model in served}

    def _up(self) -> None:
        self._worker.engine_up()
        self._look.set()

    def _publish(self) -> None:
        """What /readyz/engine shows; kept as one value, because the heartbeat reads it from its own thread."""
        status = self._watch.status
        cause = self._worker.triage.breaker.cause() if status.state == "ready" else None
        if cause is not None:
            status = Status("failing", cause, status.models)
        if status != self._status:
            self._status = status
            self.heartbeat.nudge()
