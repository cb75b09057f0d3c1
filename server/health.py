"""The routes for probes: does the process live, do its stores answer, can an engine take work."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.errors import SERVER, ApiError
from server.wire import JSON
from state import workers
from state.clock import Clock
from state.database import Database
from state.objects import ObjectStore
from state.records import JSONObject, Unavailable
from state.workers import WorkerInfo

#: How long a store may take to answer a probe, in seconds.
PATIENCE_S = 5.0


class Health:
    """Handlers and what they need."""

    def __init__(self, *, database: Database, store: ObjectStore, clock: Clock) -> None:
        self._database, self._store, self._clock = database, store, clock

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/healthz", self.alive, methods=["GET"]),
            Route("/readyz", self.ready, methods=["GET"]),
            Route("/readyz/engine", self.engine, methods=["GET"]),
        ]

    async def alive(self, request: Request) -> Response:
        """GET /healthz: the process lives."""
        return JSON({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /readyz: database and object store answer."""
        found = {"database": await self._answers(self._database), "store": await self._answers(self._store)}
        failing = [name for name, answers in found.items() if not answers]
        if failing:
            message = f"Not ready: {' and '.join(failing)} not answering."
            raise ApiError(503, message, kind=SERVER, code="not_ready", beside={"checks": found})
        return JSON({"status": "ready", "checks": found})

    async def engine(self, request: Request) -> Response:
        """GET /readyz/engine: an engine can take work. Batches are accepted all the same when none can."""
        known = await workers.listed(self._database, now=self._clock.wall())
        engines = [_engine_object(worker) for worker in known]
        if not any(worker.state == "ready" for worker in known):
            beside = {"engines": engines}
            raise ApiError(503, _why_no_engine(known), kind=SERVER, code="no_engine", beside=beside)
        return JSON({"status": "ready", "engines": engines})

    async def _answers(self, what: Database | ObjectStore) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await what.check()
        except (Unavailable, TimeoutError):
            return False
        return True


def _engine_object(worker: WorkerInfo) -> JSONObject:
    return {"engine": worker.engine, "state": worker.state, "cause": worker.cause, "models": list(worker.models)}


def _why_no_engine(known: Sequence[WorkerInfo]) -> str:
    if not known:
        return "No engine can take work: no worker is running."
    causes = [f"{w.engine} is {w.state}" + (f" ({w.cause})" if w.cause else "") for w in known]
    return "No engine can take work: " + "; ".join(causes)
