"""Between the scheduler and the engine: which request is sent, what is made of its answer, when it comes again.

The decisions are those of `scheduler` and `triage`; what is finished is collected on its shard, and the committer told.
"""

import asyncio
import heapq
import logging
from collections.abc import Mapping, Sequence

import msgspec

from engine.backends.protocol import Backend, EngineError, OutcomeUnknown, Reply
from engine.replies import Ending, result_line, unanswered
from engine.splice import splice_model
from engine.worker.commit import Committer
from engine.worker.outcome import Done
from engine.worker.poison import Poison
from engine.worker.scheduler import Pass, Scheduler
from engine.worker.segments import Finished
from engine.worker.shard import NO_HISTORY, Flight, OpenShard, Phase
from engine.worker.triage import Triage
from state import models
from state.clock import Clock
from state.ids import line_id
from state.records import LeaseLost

log = logging.getLogger(__name__)

#: The death of an engine that we run is noticed a little after the calls it broke; so many seconds those are in doubt.
DEATH_NOTICE_S = 5.0

#: Seconds over which the rate of requests is measured.
RATE_SPAN_S = 5.0


Asked = tuple[str, int, int]
"""A request: its batch, its shard's number, its place there."""


class _Named(msgspec.Struct):
    model: str = ""


_name_of = msgspec.json.Decoder(_Named).decode


def fitted(body: bytes, *, model: str, accepted: frozenset[str]) -> bytes:
    """The body as the engine takes it: byte for byte, unless it names the model in a way the engine does not know."""
    if models.ANY in accepted:
        return body
    try:
        if _name_of(body).model in accepted:
            return body
    except msgspec.DecodeError:
        pass  # a lone-surrogate escape, for instance; splicing works on bytes and takes it
    return splice_model(body, model)


class Desk:
    """One engine's outgoing requests and incoming answers."""

    def __init__(
        self,
        *,
        backend: Backend,
        managed: bool,
        triage: Triage,
        committer: Committer,
        clock: Clock,
        most_uncommitted: int,
    ) -> None:
        """`managed`: the engine is ours, so that its death will be known."""
        self.scheduler = Scheduler(admit=self._admit)
        self.open = False
        """Whether the engine is up."""
        self.uncommitted = 0
        """Bytes of results that are finished and not committed yet."""
        self.accepted: Mapping[str, frozenset[str]] = {}
        """The names the engine takes for each model it serves, by the model's root."""
        self._backend, self._triage, self._committer, self._clock = backend, triage, committer, clock
        self._managed, self._most_uncommitted = managed, most_uncommitted
        self._resting: list[tuple[float, int, OpenShard, int]] = []
        self._rested = 0
        self._in_doubt: list[tuple[float, Flight, Reply | EngineError]] = []
        self._was_failing = False
        self._poison: Poison[Asked] = Poison()
        self._deaths = 0
        self._doomed: set[Asked] = set()
        self._done, self._done_since = 0, clock.monotonic()

    def next(self, in_flight: int) -> Flight | None:
        """The next request to be sent, if the engine is up and there is memory for its result (invariant 12)."""
        if not self.open or self.uncommitted >= self._most_uncommitted:
            return None
        now = self._clock.monotonic()
        if self._poison.isolating:
            flight = self._next_suspect()
        else:
            flight = self.scheduler.take(now=now, wall=self._clock.wall(), in_flight=in_flight)
        if flight is not None:
            flight.sent_at = now
        return flight

    async def send(self, flight: Flight) -> Reply:
        """Asks the engine.

        Raises:
            EngineError: as the backend does.
        """
        shard = flight.shard
        if flight.careful:
            await self._note(flight)
        body = fitted(
            shard.pack.body(flight.place),
            model=shard.lease.model,
            accepted=self.accepted.get(shard.lease.model, frozenset()),
        )
        return await self._backend.send(shard.lease.endpoint, body)

    def landed(self, flight: Flight, result: Reply | EngineError) -> None:
        """Makes of an answer a result, or lets the request rest until it comes again."""
        self.scheduler.landed(flight)
        if self._managed and _may_be_death(result):
            self._in_doubt.append((self._clock.monotonic(), flight, result))
        else:
            self._judge(flight, result)

    def _judge(self, flight: Flight, result: Reply | EngineError) -> None:
        shard, place = flight.shard, flight.place
        history = shard.history(place)
        verdict = self._triage.verdict(result, lane=shard.lane, history=history, sent_at=flight.sent_at)
        if self._deaths and (isinstance(result, Reply) or isinstance(verdict, Done)):
            self._poison.finished(_asked(flight))
        if isinstance(verdict, Done):
            self.finish(shard, place, verdict.ending)
            return
        now = self._clock.monotonic()
        shard.rest(place, verdict.history)
        self._rested += 1
        heapq.heappush(self._resting, (now + verdict.delay, self._rested, shard, place))
        self._committer.consider(shard, now=now)

    def recalled(self, flight: Flight) -> None:
        """The request was aborted: as if it had never been sent."""
        self.scheduler.landed(flight)
        self._triage.abandoned(flight.shard.lane, sent_at=flight.sent_at)
        flight.shard.put_back(flight.place)
        if (asked := _asked(flight)) in self._doomed:
            self._doomed.remove(asked)
            self._give_up(*asked)
        self._committer.consider(flight.shard, now=self._clock.monotonic())

    def finish(self, shard: OpenShard, place: int, ending: Ending) -> None:
        """The request, which is out, has ended: its result line waits to be committed."""
        line = shard.pack.lines[place]
        text = result_line(ending, line_id=line_id(shard.lease.batch_id, line), custom_id=shard.pack.head(place))
        now = self._clock.monotonic()
        shard.finish(place, Finished(line, ending.mark, text, ending.usage, ending.model), now=now)
        self.uncommitted += len(text)
        self._done += 1
        self._committer.consider(shard, now=now)

    def take_on(self, shard: OpenShard) -> None:
        """A shard was opened. If a request of it has killed its worker twice while it ran alone, that one is given up."""
        self.scheduler.add(shard)
        if shard.care.give_up is not None:
            self._give_up(*shard.key, shard.care.give_up)

    def engine_died(self, flights: Sequence[Flight]) -> None:
        """The engine has died with these at it, which are recalled next, and with those whose fate was in doubt."""
        self.open = False
        self._deaths += 1
        broken, self._in_doubt = [flight for _, flight, _ in self._in_doubt], []
        present = {_asked(f) for f in (*flights, *broken) if f.shard.phase is Phase.OPEN}
        self._doomed.update(self._poison.died(sorted(present)))
        for flight in broken:
            self.recalled(flight)

    def _give_up(self, batch: str, number: int, place: int) -> None:
        """Quarantines a request that waits to be sent: it becomes an error line and blocks nobody (invariant 10)."""
        shard = self.scheduler.shards.get((batch, number))
        if shard is None or shard.take_this(place) is None:
            return
        log.warning("a request is quarantined", extra={"batch": batch, "line": shard.pack.lines[place]})
        self.finish(
            shard, place, unanswered("engine_crash", "The engine crashed repeatedly while it was running this request.")
        )

    def _next_suspect(self) -> Flight | None:
        """One of the requests that may be at the engine while it is found out which of them kills it."""
        for asked in self._poison.group:
            batch, number, place = asked
            shard = self.scheduler.shards.get((batch, number))
            if shard is None or shard.phase is not Phase.OPEN:
                self._poison.finished(asked)  # no longer ours to run
            elif place not in shard.flying:
                shard.wake(place)
                if not shard.waits(place):
                    self._poison.finished(asked)  # it is not the one that was there: the shard was lost and came again
                elif not self._triage.admit(shard.lane, shard.history(place)):
                    return shard.take_this(place)
        return None

    def tick(self) -> None:
        """Lets requests come again whose rest is over; all of them, when the engine has just recovered."""
        now = self._clock.monotonic()
        failing = self._triage.breaker.cause() is not None
        recovered, self._was_failing = self._was_failing and not failing, failing
        while self._resting and (recovered or self._resting[0][0] <= now):
            _, _, shard, place = heapq.heappop(self._resting)
            shard.wake(place)
        while self._in_doubt and self._in_doubt[0][0] <= now - DEATH_NOTICE_S:
            _, flight, result = self._in_doubt.pop(0)
            self._conclude(flight, result)
        if now - self._done_since >= RATE_SPAN_S:
            self.scheduler.rate = self._done / (now - self._done_since)
            self._done, self._done_since = 0, now

    def _conclude(self, flight: Flight, result: Reply | EngineError) -> None:
        """The engine lives: what went wrong with this request was its own."""
        if flight.recalled:
            self.recalled(flight)
        else:
            self._judge(flight, result)

    def _admit(self, shard: OpenShard) -> Pass:
        """Whether the breaker lets a request of this shard through. A yes makes it the probe, so it must be sent."""
        breaker, lane = self._triage.breaker, shard.lane
        if breaker.closed(lane):
            return Pass.NEXT
        history = shard.history(shard.next_place)
        choice = Pass.NEXT
        others = False
        if history.refusals and shard.has_fresh:
            history, choice = NO_HISTORY, Pass.FRESH
        elif history.refusals:
            others = any(s.has_fresh and s.lane == lane for s in self.scheduler.shards.values())
        return Pass.NO if self._triage.admit(lane, history, others_wait=others) else choice

    async def _note(self, flight: Flight) -> None:
        """Writes down what is tried, before it is tried (invariant 10)."""
        try:
            await self._committer.note_suspect(flight.shard, flight.place)
        except LeaseLost:
            flight.recalled = True
            raise asyncio.CancelledError from None


def _asked(flight: Flight) -> Asked:
    return flight.shard.lease.batch_id, flight.shard.lease.number, flight.place


def _may_be_death(result: Reply | EngineError) -> bool:
    """Whether this is how a request fails whose engine dies: the connection breaks, or a last answer says so."""
    return result.status >= 500 if isinstance(result, Reply) else isinstance(result, OutcomeUnknown)
