"""Looks after the engine: brings it up, makes its models known, notices its death and its recovery.

A remote engine that does not answer is asked again for ever, with the cause published; a managed one that ends before it
was ever healthy is a configuration error, which ends the worker.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.backends.protocol import Backend, EngineError, ServedModel
from engine.worker.heartbeat import Status
from engine.worker.retry import pause
from state import models
from state.clock import Clock
from state.database import Database
from state.records import Model, Unavailable

log = logging.getLogger(__name__)

#: Seconds between registrations of the models, by which /v1/models knows that they are served.
REFRESH_S = 60.0


def rows_of(served: Sequence[ServedModel], *, now: float) -> list[Model]:
    """A row for every name that this engine answers to: its models' own, their aliases, and `*` where it takes any."""
    rows: dict[str, Model] = {}
    for model in served:
        for name in model.names:
            rows.setdefault(name, Model(name, model.root, model.owned_by, int(now), now, model.endpoints))
    return list(rows.values())


def names_of(served: Sequence[ServedModel]) -> tuple[str, ...]:
    """Every name a file may ask for at this engine, in order of the alphabet; `*` where any will do."""
    return tuple(sorted({name for model in served for name in model.names}))


class EngineWatch:
    """One engine's life."""

    def __init__(
        self,
        *,
        backend: Backend,
        database: Database,
        clock: Clock,
        known: Callable[[Sequence[ServedModel]], None],
        up: Callable[[], None],
        died: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """`known` hears which models are served, `up` and `died` of the engine's fate, `changed` of a new status."""
        self._backend, self._database, self._clock = backend, database, clock
        self._known, self._up, self._died, self._changed = known, up, died, changed
        self._served: tuple[ServedModel, ...] = ()
        self.status = Status("starting")

    async def run(self) -> None:
        """Never returns.

        Raises:
            EngineMisconfigured: the engine cannot work as configured.
        """
        await self._learn()  # a managed engine knows its names before it is up, so plans can be made meanwhile
        while True:
            await self._start()
            death = asyncio.create_task(self._backend.died(), name="death")
            await self._learn_at_last()
            self._say(Status("ready", None, names_of(self._served)))
            self._up()
            reason = await self._until(death)
            log.warning("the engine died: %s", reason)
            self._say(Status("starting", reason, self.status.models))
            self._died()

    def _say(self, status: Status) -> None:
        self.status = status
        self._changed()

    async def _start(self) -> None:
        failures = 0
        while True:
            try:
                await self._backend.start()
            except EngineError as error:
                failures += 1
                if failures == 1:
                    log.warning("the engine does not answer, trying again: %s", error)
                self._say(Status("failing", str(error), self.status.models))
                await asyncio.sleep(pause(failures, None))
            else:
                return

    async def _until(self, death: "asyncio.Task[str]") -> str:
        """Waits for the engine's death, refreshing its models meanwhile; returns the reason."""
        try:
            while True:
                done, _ = await asyncio.wait([death], timeout=REFRESH_S)
                if done:
                    return death.result()
                await self._learn()
        except EngineError as error:  # it was dead before anybody could watch
            return str(error)
        finally:
            death.cancel()

    async def _learn_at_last(self) -> None:
        failures = 0
        while not await self._learn():
            failures += 1
            await asyncio.sleep(pause(failures, None))

    async def _learn(self) -> bool:
        """Asks what is served, and makes it known; False if the engine does not say now."""
        try:
            served = await self._backend.models()
        except EngineError as error:
            log.debug("the engine does not say which models it serves: %s", error)
            return False
        self._served = served
        self._known(served)
        rows = rows_of(served, now=self._clock.wall())
        failures = 0
        while True:
            try:
                await models.register(self._database, models=rows, now=self._clock.wall())
            except Unavailable as error:
                failures += 1
                log.warning("models could not be registered: %s", error)
                await asyncio.sleep(pause(failures, None))
            else:
                return True
