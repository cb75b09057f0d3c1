"""Whose requests go next, and how many in a row: pure decisions, no I/O.

Two things pull against each other. Requests that share a prefix should reach the engine one after another, or its prefix
cache forgets the prefix in between; and no batch should wait behind another one's thousands of requests. So work is
handed out in **turns**: a turn is a run of consecutive requests of one batch in plan order, never cut inside a prefix
group unless the group is very long, and turns go round by deficit round robin, over projects first and then over the
batches of a project.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Requests in a turn, unless a prefix group is under way at its end.
TURN = 32

#: The longest turn, in requests: a longer prefix group is cut here.
LONGEST_TURN = 128

#: Of so many turns in a row, one goes round fairly even while batches are short of time, so that a deadline that
#: cannot be met does not stop everybody else.
FAIR_EVERY = 4

#: A batch is short of time when its work, at the present rate, needs more than this part of the time it has left.
SAFE_PART = 0.5

#: Seconds that finishing a batch may take, kept free before its deadline.
RESERVE_S = 30.0


def shares_prefix(shared: int, size: int) -> bool:
    """Whether a request belongs to the prefix group of the one before it.

    `shared` is how many bytes of its prompt it has in common with that one, `size` the bytes of its whole body: half is
    enough, because what is recomputed after a cut then costs as much as what the request needs anyway.
    """
    return shared > 0 and shared * 2 >= size


def turn_end(marks: Sequence[int], sizes: Sequence[int], start: int) -> int:
    """The place after the last one of a turn that begins at `start`.

    `marks[i]` is the number of prompt bytes that request `i` shares with request `i - 1`, `sizes[i]` its body's length.
    """
    count = len(marks)
    end = min(start + TURN, count)
    longest = min(start + LONGEST_TURN, count)
    while end < longest and shares_prefix(marks[end], sizes[end]):
        end += 1
    return end


@dataclass(slots=True)
class Ring(Generic[K]):
    """Deficit round robin, in its surplus form: whoever has credit left is served and may overdraw it by one turn.

    Credit is counted in requests. Each time a key's turn to be served comes round it gets `TURN` more; the debt of a long
    turn is paid by sitting out. Debt is limited to one longest turn, credit to one ordinary turn, so that neither a burst
    nor a rest is remembered for ever.
    """

    _credit: dict[K, int] = field(default_factory=dict)
    """In the order of the ring: the first key is looked at first."""

    def choose(self, runnable: Collection[K]) -> K | None:
        """The next of the runnable keys to be served, None when there is none. New keys join at the end."""
        for key in runnable:
            self._credit.setdefault(key, TURN)
        if not runnable:
            return None
        while True:
            key, credit = next(iter(self._credit.items()))
            if key in runnable and credit > 0:
                return key
            del self._credit[key]
            self._credit[key] = min(credit + TURN, TURN)

    def charge(self, key: K, requests: int) -> None:
        """Takes the requests that were handed out off the key's credit."""
        if key in self._credit:
            self._credit[key] = max(self._credit[key] - requests, -LONGEST_TURN)

    def forget(self, key: K) -> None:
        """The key has nothing left and leaves the ring."""
        self._credit.pop(key, None)


@dataclass(frozen=True, slots=True)
class Standing:
    """A batch with something to send, as the choice of the next turn sees it."""

    batch_id: str
    project_id: str
    deadline: float
    left: int
    """Requests known to be left, here and unclaimed: what the deadline is measured against."""


def short_of_time(deadline: float, now: float, left: int, rate: float) -> bool:
    """Whether a batch should go first to be done in time. `rate` is in requests per second, 0 while unknown.

    A hint that only reorders work: expiry itself is decided in ledger time, elsewhere (invariant 8).
    """
    available = deadline - RESERVE_S - now
    if available <= 0:
        return True
    return rate > 0 and left / rate > available * SAFE_PART


@dataclass(slots=True)
class Turns:
    """Chooses the batch of each next turn."""

    _projects: Ring[str] = field(default_factory=Ring)
    _batches: dict[str, Ring[str]] = field(default_factory=dict)
    _since_fair: int = 0

    def choose(self, standings: Sequence[Standing], *, now: float, rate: float) -> Standing | None:
        """Earliest deadline among those short of time, for all but every `FAIR_EVERY`th turn; else round robin."""
        urgent = [s for s in standings if short_of_time(s.deadline, now, s.left, rate)]
        if urgent and self._since_fair < FAIR_EVERY - 1:
            self._since_fair += 1
            return min(urgent, key=lambda s: (s.deadline, s.batch_id))
        self._since_fair = 0
        return self._round_robin(standings)

    def charge(self, standing: Standing, requests: int) -> None:
        """Books what the batch's turn has used so far."""
        self._projects.charge(standing.project_id, requests)
        ring = self._batches.get(standing.project_id)
        if ring is not None:
            ring.charge(standing.batch_id, requests)

    def forget(self, project_id: str, batch_id: str, *, last_of_project: bool) -> None:
        """The batch has no open shard here any more."""
        if last_of_project:
            self._projects.forget(project_id)
            self._batches.pop(project_id, None)
        elif project_id in self._batches:
            self._batches[project_id].forget(batch_id)

    def _round_robin(self, standings: Sequence[Standing]) -> Standing | None:
        by_project: dict[str, dict[str, Standing]] = {}
        for standing in standings:
            by_project.setdefault(standing.project_id, {})[standing.batch_id] = standing
        project = self._projects.choose(by_project)
        if project is None:
            return None
        batch = self._batches.setdefault(project, Ring()).choose(by_project[project])
        assert batch is not None
        return by_project[project][batch]
