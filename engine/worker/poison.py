"""Requests that kill the engine, or the whole worker: found, set apart, and kept from blocking anybody. Pure.

**While the worker lives** (`Poison`). After an engine's first death everything runs again as usual: most deaths are
nobody's fault. A request that was at the engine at two deaths, without an answer in between, is a suspect. Suspects run
in groups, with nothing else at the engine: a group that is answered is innocent, one that kills the engine is split in
halves, and a request that kills it twice while it is alone there is quarantined: it becomes an error line
(`engine_crash`, counted as failed). Requests answered in between are forgotten, so nobody becomes a suspect by having
been around at deaths long ago.

*Bound.* With p poison requests and at most c at the engine, at most p * (4 + ceil(log2 c)) deaths: two in the crowd,
one for each halving, two alone. A death is charged to one poison request that was at the engine; each halving halves the
group it is in.

**When the worker dies too** (`care`). The shard's row knows how often the shard was claimed since its last result. The
third claimer in vain is careful: it sends one request at a time, with nothing else at the engine, and writes to the
row which one before it does (`mark`). A claimer that finds such a mark tries that request first, alone, marked as tried
twice. A claimer that finds that mark gives the request up. So it takes two deaths alone here as well: one kill -9, or a
pod that was evicted, must not cost an innocent request its answer.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

#: Deaths a request must have been at the engine for before it is a suspect, and deaths alone before it is quarantined.
CROWD: Final = 2
ALONE: Final = 2
#: From so many claims in vain on, a claimer is careful.
VAIN_CLAIMS: Final = 2


class Poison(Generic[Key]):
    """What is suspected of killing one engine. Keys stand for requests, in the order they should be tried in."""

    def __init__(self) -> None:
        self._deaths: Counter[Key] = Counter()
        self._alone: Counter[Key] = Counter()
        self._groups: deque[tuple[Key, ...]] = deque()

    @property
    def isolating(self) -> bool:
        """Whether suspects are being tried: then `group`, and nothing else, may be at the engine."""
        return bool(self._groups)

    @property
    def group(self) -> tuple[Key, ...]:
        """The requests that may be at the engine now, those of them that are not yet answered."""
        return self._groups[0] if self._groups else ()

    def died(self, at_engine: Iterable[Key]) -> tuple[Key, ...]:
        """The engine has died with these requests there. Returns those that are to be quarantined.

        A death with nothing there is nobody's fault and changes nothing.
        """
        present = tuple(dict.fromkeys(at_engine))
        if not present:
            return ()
        if self._groups:
            return self._died_of_group(present)
        self._deaths.update(present)
        suspects = tuple(key for key in present if self._deaths[key] >= CROWD)
        self._enqueue(suspects)
        return ()

    def finished(self, key: Key) -> None:
        """A request was answered, in whatever way, or is no longer ours to run: it is no suspect."""
        del self._deaths[key]  # a Counter does not mind a missing key
        del self._alone[key]
        if self._groups and any(key in group for group in self._groups):
            rest = (tuple(k for k in group if k != key) for group in self._groups)
            self._groups = deque(group for group in rest if group)

    def _died_of_group(self, present: tuple[Key, ...]) -> tuple[Key, ...]:
        group = self._groups.popleft()
        absent = tuple(key for key in group if key not in present)
        if absent:
            self._groups.appendleft(absent)  # not sent yet when the engine died: still one group
        if len(present) > 1:
            self._enqueue(present, split=True)
            return ()
        key = present[0]
        self._alone[key] += 1
        if self._alone[key] < ALONE:
            self._groups.appendleft(present)
            return ()
        self.finished(key)
        return present

    def _enqueue(self, keys: tuple[Key, ...], *, split: bool = False) -> None:
        half = (len(keys) + 1) // 2 if split else len(keys)
        self._groups.extendleft(group for group in (keys[half:], keys[:half]) if group)


@dataclass(frozen=True, slots=True)
class Care:
    """How a claimer is to treat a shard. Places are 0-based, in the shard.

    `careful`: one request of the shard at a time, nothing else at the engine meanwhile, each marked before it is sent.
    `first`: this place before any other, alone, marked as tried twice.
    `give_up`: this place becomes an error line (`engine_crash`) without being sent.
    """

    careful: bool = False
    first: int | None = None
    give_up: int | None = None


def care(*, claims_in_vain: int, mark: int | None, done: Collection[int]) -> Care:
    """How to treat a shard that was claimed so often in vain before, with this mark in its row.

    `done` are the places that have results: a mark on one of them is out of date.
    """
    careful = claims_in_vain >= VAIN_CLAIMS
    if mark is None:
        return Care(careful)
    place, again = place_of(mark)
    if place in done:
        return Care(careful)
    return Care(careful=True, give_up=place) if again else Care(careful=True, first=place)


def mark_of(place: int, *, again: bool = False) -> int:
    """What is written into the row's `suspect` before a careful claimer sends a place; negative for the second time."""
    return -1 - place if again else place


def place_of(mark: int) -> tuple[int, bool]:
    """The place a mark names, and whether it was being tried for the second time."""
    return (-1 - mark, True) if mark < 0 else (mark, False)
