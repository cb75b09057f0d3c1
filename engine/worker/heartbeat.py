"""Keeps a worker's leases alive and its state known, whatever the rest of the process is doing.

It has a thread, an event loop and a database connection of its own: a slow store, a huge reply or a long commit on the
other loop delays no renewal (invariant 12, rule 6). What a renewal says is handed to the other loop; a notice from there
(`nudge`) brings the next beat forward, so that a cancelled batch is heard of at once.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.worker.leases import Key, Leases
from state import shards, workers
from state.clock import Clock
from state.database import Database
from state.records import Unavailable
from state.shards import Renewal

log = logging.getLogger(__name__)

#: Seconds until a beat that failed is tried again; an ordinary interval may be shorter.
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Status:
    """What a worker lets others know about its engine; for /readyz/engine."""

    state: str
    """starting, ready or failing"""
    cause: str | None = None
    models: tuple[str, ...] = ()


Heard = Callable[[Mapping[Key, int], Renewal], None]
"""Takes what was asked for (each lease's epoch) and what the ledger answered; called on the worker's loop."""


class Heartbeat:
    """The thread. `beat` is one step, which tests call directly."""

    def __init__(
        self,
        *,
        database_url: str,
        worker_id: str,
        engine: str,
        leases: Leases,
        clock: Clock,
        ttl: float,
        every: float,
        heard: Heard,
        status: Callable[[], Status],
    ) -> None:
        self._url, self._worker_id, self._engine = database_url, worker_id, engine
        self._leases, self._clock, self._ttl, self._every = leases, clock, ttl, every
        self._heard, self._status = heard, status
        self._published: Status | None = None
        self._published_at = 0.0
        self._home: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged = asyncio.Event()
        self._over = False
        self._ended: asyncio.Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begins to beat; `heard` is called on the loop that is running now."""
        self._home = asyncio.get_running_loop()
        self._ended = self._home.create_future()
        self._thread.start()

    def nudge(self) -> None:
        """Brings the next beat forward. May be called from any thread, never blocks."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                loop.call_soon_threadsafe(self._nudged.set)

    async def stop(self) -> None:
        """Ends the thread after its present beat. The leases stay as they are."""
        self._over = True
        self.nudge()
        if self._ended is not None:
            await asyncio.shield(self._ended)

    async def beat(self, database: Database) -> None:
        """Renews every lease that is held, and publishes the worker's state when it has changed or is getting old.

        Raises:
            Unavailable: the database does not answer; the leases are trusted for the rest of their window.
        """
        asked = self._leases.held()
        if asked:
            started = self._clock.monotonic()
            renewal = await shards.renew(
                database,
                worker_id=self._worker_id,
                leases=[(batch, number, epoch) for (batch, number), epoch in asked.items()],
                now=self._clock.wall(),
                ttl=self._ttl,
            )
            self._leases.renewed(asked, renewal.held | renewal.stopped, started=started)
            self._tell(asked, renewal)
        await self._publish(database)

    async def _publish(self, database: Database) -> None:
        status, now = self._status(), self._clock.monotonic()
        if status == self._published and now - self._published_at < self._every:
            return
        await workers.seen(
            database,
            worker_id=self._worker_id,
            engine=self._engine,
            state=status.state,
            cause=status.cause,
            models=list(status.models),
            now=self._clock.wall(),
        )
        self._published, self._published_at = status, now

    def _tell(self, asked: Mapping[Key, int], renewal: Renewal) -> None:
        self._at_home(lambda: self._heard(asked, renewal))

    def _at_home(self, step: Callable[[], None]) -> None:
        if self._home is not None:
            with contextlib.suppress(RuntimeError):  # the worker has ended meanwhile
                self._home.call_soon_threadsafe(step)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_on())
        finally:
            self._at_home(self._say_ended)

    def _say_ended(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _beat_on(self) -> None:
        self._loop = asyncio.get_running_loop()
        database = Database.open(self._url)
        try:
            while not self._over:
                await self._pause(await self._try_to_beat(database))
        finally:
            self._loop = None
            await database.close()

    async def _try_to_beat(self, database: Database) -> float:
        """One beat; returns the seconds until the next."""
        try:
            await self.beat(database)
        except Unavailable as error:
            log.warning("leases were not renewed: %s", error, extra={"worker": self._worker_id})
            return min(RETRY_S, self._every)
        except Exception:
            log.exception("a heartbeat failed", extra={"worker": self._worker_id})
            return min(RETRY_S, self._every)
        return self._every

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._nudged.wait()
        self._nudged.clear()
