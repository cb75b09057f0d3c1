"""What runs next on this engine: the open shards, and the turn under way. Decisions only, no I/O."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from engine.worker.leases import Key
from engine.worker.shard import Flight, OpenShard, Phase
from engine.worker.turns import Standing, Turns

#: Requests in a turn of a shard that is run carefully: each waits for an empty engine, so others come sooner.
CAREFUL_TURN = 8


class Pass(Enum):
    """Whether a shard's request may be sent now, and which."""

    NEXT = auto()
    """The next one in order."""
    FRESH = auto()
    """One that was never sent: the engine is being tried after a failure, and not with a request that met it."""
    NO = auto()


@dataclass(slots=True)
class Turn:
    """A run of requests that is being handed out: those of one shard before place `end`."""

    shard: OpenShard
    standing: Standing
    end: int


class Scheduler:
    """Hands out requests, one at a time, turn by turn."""

    def __init__(self, *, admit: Callable[[OpenShard], Pass] = lambda _: Pass.NEXT) -> None:
        """`admit` says whether the engine may be sent a request of a shard; a yes is always made use of."""
        self._admit = admit
        self.shards: dict[Key, OpenShard] = {}
        self.unclaimed: dict[str, int] = {}
        """Requests of each batch that no worker holds yet, as last seen: for the judgement of deadlines."""
        self.rate = 0.0
        """Requests a second, lately; 0 while unknown."""
        self._turns = Turns()
        self._turn: Turn | None = None
        self._alone: Flight | None = None

    def add(self, shard: OpenShard) -> None:
        """A shard has been opened."""
        self.shards[shard.key] = shard

    def remove(self, shard: OpenShard) -> None:
        """A shard is closed, lost or given back."""
        if self.shards.get(shard.key) is not shard:
            return
        del self.shards[shard.key]
        batch, project = shard.lease.batch_id, shard.lease.project_id
        if not any(s.lease.batch_id == batch for s in self.shards.values()):
            last = not any(s.lease.project_id == project for s in self.shards.values())
            self._turns.forget(project, batch, last_of_project=last)

    def sendable(self) -> dict[str, int]:
        """How many requests of each open batch wait here to be sent."""
        waiting: dict[str, int] = {}
        for shard in self.shards.values():
            batch = shard.lease.batch_id
            waiting[batch] = waiting.get(batch, 0) + shard.sendable
        return waiting

    def take(self, *, now: float, wall: float, in_flight: int) -> Flight | None:
        """The next request to be sent, None when there is nothing to send now.

        A request of a careful shard is sent only when nothing else is at the engine, and nothing else is sent beside it:
        if this worker dies, the one to blame is known (invariant 10).
        """
        if self._alone is not None:
            return None
        barred: set[Key] = set()
        while True:
            turn = self._turn or self._begin(now, wall, barred)
            if turn is None:
                return None
            shard = turn.shard
            if shard.runnable(now) and shard.next_place < turn.end:
                if shard.careful and in_flight:
                    return None
                pass_ = self._admit(shard)
                if pass_ is not Pass.NO:
                    flight = shard.take_fresh() if pass_ is Pass.FRESH else shard.take(turn.end)
                    assert flight is not None
                    return self._sent(turn, flight)
                barred.add(shard.key)
            self._turn = None

    def landed(self, flight: Flight) -> None:
        """A request that was handed out is not at the engine any more."""
        if flight is self._alone:
            self._alone = None

    def _begin(self, now: float, wall: float, barred: set[Key]) -> Turn | None:
        """Chooses the batch of the next turn, and its first shard in plan order."""
        first: dict[str, OpenShard] = {}
        left: dict[str, int] = {}
        for shard in self.shards.values():
            batch = shard.lease.batch_id
            left[batch] = left.get(batch, self.unclaimed.get(batch, 0)) + shard.left
            if shard.key in barred or not shard.runnable(now):
                continue
            if batch not in first or shard.lease.number < first[batch].lease.number:
                first[batch] = shard
        standing = self._turns.choose(_standings(first.values(), left), now=wall, rate=self.rate)
        if standing is None:
            return None
        shard = first[standing.batch_id]
        end = shard.next_place + CAREFUL_TURN if shard.careful else shard.turn()
        self._turn = Turn(shard, standing, end)
        return self._turn

    def _sent(self, turn: Turn, flight: Flight) -> Flight:
        self._turns.charge(turn.standing, 1)
        if turn.shard.careful:
            turn.shard.careful -= 1
            flight.careful = True
            self._alone = flight
        return flight


def _standings(shards: Iterable[OpenShard], left: dict[str, int]) -> list[Standing]:
    return [
        Standing(s.lease.batch_id, s.lease.project_id, s.lease.deadline, left[s.lease.batch_id])
        for s in shards
        if s.phase is Phase.OPEN
    ]
