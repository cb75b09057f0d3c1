"""Results of one shard on their way into a segment: collected in memory, then laid out as one object.

Pure bookkeeping; when to commit is decided here, the commit itself is made in `commit`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.packs import OUTPUT, Record, pack
from state.records import Tally, Usage


@dataclass(frozen=True, slots=True)
class Limits:
    """When a shard's results are committed: after so many lines, bytes or seconds, whatever comes first."""

    lines: int
    bytes: int
    seconds: float


class Finished(NamedTuple):
    """What became of one request: its finished result line, newline included, and what it adds to the tally."""

    line: int
    """The request's place in the input, 0-based."""
    mark: int
    """`OUTPUT` or `ERROR`: which file the line belongs to."""
    body: bytes
    usage: Usage
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    """A segment ready to be written. The same bytes are written again when an attempt has failed."""

    data: bytes
    places: bytes
    lines: int
    tally: Tally


@dataclass(slots=True)
class Collected:
    """Results that are not committed yet, by their place in the shard. `since` is the oldest one's monotonic time."""

    rows: dict[int, Finished] = field(default_factory=dict)
    size: int = 0
    since: float | None = None

    def add(self, place: int, finished: Finished, *, now: float) -> None:
        """Keeps a result; the place must have none yet."""
        assert place not in self.rows, "a request has one result (invariant 1)"
        self.rows[place] = finished
        self.size += len(finished.body)
        if self.since is None:
            self.since = now

    def due(self, limits: Limits, *, now: float) -> bool:
        """Whether these results should be committed now."""
        if self.since is None:
            return False
        return len(self.rows) >= limits.lines or self.size >= limits.bytes or now - self.since >= limits.seconds

    def seal(self, count: int) -> Sealed:
        """Lays the results out as a segment of a shard of `count` requests, in plan order."""
        rows = sorted(self.rows.items())
        return Sealed(
            data=pack(Record(f.line, f.mark, b"", f.body) for _, f in rows),
            places=bitmap((place for place, _ in rows), count),
            lines=len(rows),
            tally=tally(f for _, f in rows),
        )


def tally(results: Iterable[Finished]) -> Tally:
    """What these results add to the shard's row. The model is the one the first successful reply names."""
    completed = failed = 0
    inputs = cached = outputs = reasoning = 0
    model: str | None = None
    for result in results:
        if result.mark == OUTPUT:
            completed += 1
            model = model or result.model
        else:
            failed += 1
        inputs += result.usage.input_tokens
        cached += result.usage.cached_tokens
        outputs += result.usage.output_tokens
        reasoning += result.usage.reasoning_tokens
    return Tally(completed, failed, Usage(inputs, cached, outputs, reasoning), model)


def bitmap(places: Iterable[int], count: int) -> bytes:
    """A bitmap over a shard of `count` requests: bit i % 8 of byte i // 8 says that place i has a result."""
    bits = bytearray((count + 7) // 8)
    for place in places:
        bits[place >> 3] |= 1 << (place & 7)
    return bytes(bits)


def marked(bits: bytes) -> Iterator[int]:
    """The places a bitmap names, ascending."""
    for at, byte in enumerate(bits):
        while byte:
            low = byte & -byte
            yield at * 8 + low.bit_length() - 1
            byte ^= low
