"""Keeps the engine fed: sends requests as fast as it takes them, within limits.

The hot path of the product. Long-lived runners take one request after another; there is no task, no lock, no database
work and no logging per request. Whatever makes more work possible (a shard opened, a pause over, a lease renewed, memory
freed) calls `pump`, which hands requests to waiting runners.
"""

import asyncio
from collections import deque
from typing import Protocol

from engine.backends.protocol import EngineError, Reply
from engine.worker.shard import Flight, OpenShard

#: How much of the former estimate of a reply's size is kept at each smaller reply: large ones are remembered for a while.
FADE = 0.98


class Throttle(Protocol):
    """How many requests may be at the engine at once."""

    @property
    def limit(self) -> int:
        """The present limit, at least 1."""
        ...


class Fixed:
    """A limit that stays as it is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


class Desk(Protocol):
    """Where requests come from and results go."""

    def next(self, in_flight: int) -> Flight | None:
        """The next request to be sent, None while there is none or nothing may be sent."""
        ...

    async def send(self, flight: Flight) -> Reply:
        """Sends it to the engine."""
        ...

    def landed(self, flight: Flight, result: Reply | EngineError) -> None:
        """The engine has answered, or failed to."""
        ...

    def recalled(self, flight: Flight) -> None:
        """The request was taken back before an answer came."""
        ...


class Feed:
    """The runners, and what is in flight."""

    def __init__(self, *, desk: Desk, throttle: Throttle, most_bytes: int) -> None:
        self._desk, self._throttle, self._most_bytes = desk, throttle, most_bytes
        self.flights: set[Flight] = set()
        self._runners: set[asyncio.Task[None]] = set()
        self._idle: deque[asyncio.Future[Flight]] = deque()
        self._bytes = 0
        self._reply_size = 0.0
        self._over = False
        self._landed = asyncio.Event()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a runner met an error that is a bug: the worker must not go on with a request in limbo."""

    @property
    def in_flight(self) -> int:
        """How many requests are at the engine."""
        return len(self.flights)

    def pump(self) -> None:
        """Sends whatever may be sent now."""
        while not self._over:
            if not self._idle and len(self._runners) >= self._throttle.limit:
                return
            flight = self._take()
            if flight is None:
                return
            self._hand_out(flight)

    def recall(self, flights: list[Flight]) -> None:
        """Takes requests back from the engine: it hears of it by the connection, and their answers are dropped."""
        for flight in flights:
            if not flight.recalled:
                flight.recalled = True
                if flight.task not in (None, asyncio.current_task()):  # None: not begun yet, and now it will not
                    flight.task.cancel()

    def recall_shard(self, shard: OpenShard) -> None:
        """Takes all requests of one shard back."""
        self.recall(list(shard.flying.values()))

    def stop(self) -> None:
        """Sends nothing more; what is in flight goes on."""
        self._over = True

    async def emptied(self) -> None:
        """Returns when nothing is in flight."""
        while self.flights:
            self._landed.clear()
            await self._landed.wait()

    async def close(self) -> None:
        """Ends the runners, and with them whatever is in flight."""
        self._over = True
        runners = list(self._runners)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    def _take(self) -> Flight | None:
        """The next request, if the limits leave room for it (invariant 12)."""
        if self._over or len(self.flights) >= self._throttle.limit:
            return None
        if self.flights and self._bytes + len(self.flights) * self._reply_size >= self._most_bytes:
            return None
        flight = self._desk.next(len(self.flights))
        if flight is not None:
            self.flights.add(flight)
            self._bytes += flight.size
        return flight

    def _hand_out(self, flight: Flight) -> None:
        while self._idle:
            waiting = self._idle.pop()
            if not waiting.done():
                waiting.set_result(flight)
                return
        runner = asyncio.get_running_loop().create_task(self._run(flight), name="runner")
        self._runners.add(runner)
        runner.add_done_callback(self._ended)

    def _ended(self, runner: "asyncio.Task[None]") -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def _run(self, flight: Flight | None) -> None:
        """One runner: serves requests until the limit has shrunk below the number of runners."""
        me = asyncio.current_task()
        assert me is not None
        while True:
            if flight is None:
                if self._over or len(self._runners) > self._throttle.limit:
                    return
                flight = await self._wait()
            await self._serve(flight, me)
            flight = self._take()

    async def _wait(self) -> Flight:
        waiting: asyncio.Future[Flight] = asyncio.get_running_loop().create_future()
        self._idle.append(waiting)
        return await waiting

    async def _serve(self, flight: Flight, me: "asyncio.Task[None]") -> None:
        result: Reply | EngineError | None = None
        try:
            if not flight.recalled:
                flight.task = me
                result = await self._desk.send(flight)
        except EngineError as error:
            result = error
        except asyncio.CancelledError:
            if not flight.recalled:
                raise
        finally:
            flight.task = None
            self.flights.discard(flight)
            self._bytes -= flight.size
        if isinstance(result, Reply):
            self._reply_size = max(float(len(result.body)), self._reply_size * FADE)
        if flight.recalled:
            if me.cancelling():
                me.uncancel()
            self._desk.recalled(flight)
        else:
            assert result is not None
            self._desk.landed(flight, result)
        if not self.flights:
            self._landed.set()
