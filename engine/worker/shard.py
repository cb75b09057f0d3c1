"""One leased shard while a worker runs it: which requests are to be sent, at the engine, finished, committed.

Bookkeeping only, no I/O. Every place of the shard is in exactly one of these: already committed, waiting to be sent (not
reached yet, or put back), at the engine, waiting for a retry, or collected (invariant 1: a place is answered once).
"""

import asyncio
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from engine.packs import Pack
from engine.worker.leases import Holding
from engine.worker.outcome import History
from engine.worker.poison import Care, mark_of
from engine.worker.pulse import Lane
from engine.worker.segments import Collected, Finished
from engine.worker.turns import turn_end
from state.records import ShardLease

#: Of a request that has not failed yet.
NO_HISTORY = History()

#: Of a shard under which nobody has died.
NO_CARE = Care()


class Phase(Enum):
    """What may still be done with a shard."""

    OPEN = auto()
    """Requests may be sent."""
    STOPPED = auto()
    """Its batch was cancelled or has expired: nothing is sent, what is finished is committed, then it is closed."""
    GONE = auto()
    """The lease is lost, given back or closed: nothing of this shard is sent or committed here any more."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request at the engine."""

    shard: "OpenShard"
    place: int
    size: int
    task: "asyncio.Task[None] | None" = None
    sent_at: float = 0.0
    careful: bool = False
    """It was sent alone, from a shard whose last owners died without progress."""
    recalled: bool = False
    """It is being taken back: whatever the engine answers now is dropped."""


class OpenShard:
    """A shard, its requests and how far they are."""

    def __init__(
        self,
        *,
        lease: ShardLease,
        pack: Pack,
        done: Iterable[int],
        holding: Holding,
        care: Care = NO_CARE,
        careful: int = 0,
        now: float = 0.0,
    ) -> None:
        """`done` are the places committed under earlier epochs. `careful` many requests are sent one at a time, and
        before all others that at place `first`.
        """
        self.lease = lease
        self.pack = pack
        self.holding = holding
        self.phase = Phase.OPEN
        self.moved = now  # when it last made progress, monotonic
        self.started = False  # whether anything of it was sent
        self.care = care
        self.careful = careful
        self.flying: dict[int, Flight] = {}
        self.lane = Lane(lease.endpoint, lease.model)
        self.histories: dict[int, History] = {}
        self.collected = Collected()
        self.committing: asyncio.Task[None] | None = None
        self.closing = False  # the commit under way closes the shard
        self.disowned = False  # a renewal found no lease; the closing commit may be why, and the fence will tell
        self._sizes = [pack.body_size(i) for i in range(len(pack))]
        self._passed = bytearray(len(pack))  # what the cursor passes over
        for place in done:
            self._passed[place] = 1
        self.left = len(pack) - sum(self._passed)
        self._next = 0
        self._again: list[int] = []  # a heap: what was put back is sent in plan order, and before what was never sent
        self._resting: set[int] = set()
        first = care.first if care.give_up is None else care.give_up
        if first is not None:
            self._passed[first] = 1
            self._again.append(first)
        self._skip()

    @property
    def key(self) -> tuple[str, int]:
        """What names the shard: its batch and its number."""
        return self.lease.batch_id, self.lease.number

    @property
    def size(self) -> int:
        """Bytes of request bodies it keeps in memory."""
        return self.lease.size

    @property
    def sendable(self) -> int:
        """About how many requests could be sent now (an upper bound after a takeover)."""
        return 0 if self.phase is not Phase.OPEN else len(self._again) + len(self._passed) - self._next

    @property
    def complete(self) -> bool:
        """Whether every request has a result, committed or not."""
        return self.left == 0

    @property
    def closable(self) -> bool:
        """Whether nothing more will come: everything has its result, or the batch is stopped and nothing is out."""
        return self.complete or (self.phase is Phase.STOPPED and not self.flying)

    def trusted(self, now: float) -> bool:
        """Whether the lease may be relied on at this monotonic time (rule 6)."""
        return now < self.holding.trusted_until

    def runnable(self, now: float) -> bool:
        """Whether a request of this shard may be sent now."""
        return self.phase is Phase.OPEN and (bool(self._again) or self._next < len(self._passed)) and self.trusted(now)

    def turn(self) -> int:
        """The place after the last one of the turn that would begin now."""
        return turn_end(self.pack.marks, self._sizes, self.next_place)

    @property
    def next_place(self) -> int:
        """The place that is sent next; the shard's length when none is left to send."""
        return self._again[0] if self._again else self._next

    @property
    def has_fresh(self) -> bool:
        """Whether there are requests that have not been sent yet."""
        return self.phase is Phase.OPEN and self._next < len(self._passed)

    def mark(self, place: int) -> int:
        """What is written into the shard's row before this request is tried alone."""
        return mark_of(place, again=place == self.care.first)

    def history(self, place: int) -> History:
        """What a request has been through in this worker."""
        return self.histories.get(place, NO_HISTORY)

    def take(self, end: int) -> Flight | None:
        """Sends the next request out, if there is one before place `end`."""
        place = self.next_place
        if place >= min(end, len(self._passed)):
            return None
        if self._again:
            heapq.heappop(self._again)
        else:
            self._next += 1
            self._skip()
        return self._send(place)

    def take_fresh(self) -> Flight:
        """Sends out a request that was never sent before, past those that were put back (see `has_fresh`)."""
        place = self._next
        self._next += 1
        self._skip()
        return self._send(place)

    def waits(self, place: int) -> bool:
        """Whether this request was put back and may be sent again."""
        return self.phase is Phase.OPEN and place in self._again

    def take_this(self, place: int) -> Flight | None:
        """Sends one certain request out, if it is among those that were put back."""
        if not self.waits(place):
            return None
        self._again.remove(place)
        heapq.heapify(self._again)
        return self._send(place)

    def put_back(self, place: int) -> None:
        """The request was taken back, and comes again as if it had never been sent."""
        del self.flying[place]
        heapq.heappush(self._again, place)

    def rest(self, place: int, history: History) -> None:
        """The request waits until it may be sent again; `history` is what it has been through."""
        del self.flying[place]
        self.histories[place] = history
        self._resting.add(place)

    def wake(self, place: int) -> None:
        """The wait is over: the request is to be sent again, ahead of those not reached yet."""
        if place in self._resting:
            self._resting.remove(place)
            heapq.heappush(self._again, place)

    def finish(self, place: int, finished: Finished, *, now: float) -> None:
        """The request has its result."""
        del self.flying[place]
        self.histories.pop(place, None)
        self.collected.add(place, finished, now=now)
        self.left -= 1
        self.moved = now

    def collect(self) -> Collected:
        """Takes the results that are to go into the next segment."""
        collected, self.collected = self.collected, Collected()
        return collected

    def _send(self, place: int) -> Flight:
        flight = Flight(self, place, self._sizes[place])
        self.flying[place] = flight
        self.started = True
        return flight

    def _skip(self) -> None:
        while self._next < len(self._passed) and self._passed[self._next]:
            self._next += 1
