"""The parts a result file is made of: the table of answers, the lines of requests that never ran, the file's writer."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.packs import ERROR, OUTPUT, Pack
from engine.replies import result_line, unanswered
from state.ids import line_id
from state.losses import Loss
from state.objects import ObjectStore, ObjectWriter
from state.records import Corrupt, Segment

StopCode = Literal["batch_cancelled", "batch_expired"]

#: What the error line of a request that never ran says, by its code. The texts are OpenAI's.
NEVER_RAN: dict[StopCode, str] = {
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
    "batch_expired": "This request could not be executed before the completion window expired.",
}
_MISSING = 0xFF
_GATHER = 256 * 1024


class Book:
    """Where the answer to each line lies in the spool: 13 bytes a line, whatever the answers' size (invariant 12)."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._kinds = bytearray([_MISSING]) * total
        self._starts = array("Q", bytes(8 * total))
        self._sizes = array("I", bytes(4 * total))

    def enter(self, pack: Pack, *, base: int, where: str) -> None:
        """Enters a verified segment that was copied to `base` of the spool.

        Raises:
            Corrupt: it answers a line that is answered already, or none of this batch's. No bit rot does that past a
                checksum: a fence was broken (invariants 1 and 4), and nothing must be published.
        """
        for i, (line, mark) in enumerate(zip(pack.lines, pack.marks, strict=True)):
            if line >= self.total or mark not in (OUTPUT, ERROR):
                raise Corrupt(f"{where} answers line {line} of a batch of {self.total}")
            if self._kinds[line] != _MISSING:
                raise Corrupt(f"{where} answers line {line} a second time")
            self._kinds[line] = mark
            start, size = pack.body_span(i)
            self._starts[line], self._sizes[line] = base + start, size

    def missing(self) -> list[int]:
        """The lines without an answer, in order."""
        if _MISSING not in self._kinds:
            return []
        return [line for line, kind in enumerate(self._kinds) if kind == _MISSING]

    def spans(self) -> Iterator[tuple[int, int, int] | None]:
        """For each line in order (mark, start, size), or None where there is no answer."""
        for line, kind in enumerate(self._kinds):
            yield None if kind == _MISSING else (kind, self._starts[line], self._sizes[line])


class Tallies:
    """Counts each shard's verified results, so that of a shard that lost some it is known what is left."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}
        self._lost: dict[int, list[int]] = {}

    def note(self, segment: Segment, pack: Pack | None) -> None:
        """Takes note of a segment; `pack` None: it is lost."""
        if pack is None:
            self._lost.setdefault(segment.shard_number, []).append(segment.seq)
            return
        counts = self._counts.setdefault(segment.shard_number, [0, 0])
        for kind in (OUTPUT, ERROR):
            counts[kind] += pack.marks.count(kind)

    def losses(self) -> tuple[Loss, ...]:
        """The shards that lost segments, by number."""
        return tuple(
            Loss(shard, tuple(sorted(seqs)), *self._counts.get(shard, (0, 0)))
            for shard, seqs in sorted(self._lost.items())
        )


class Index:
    """The plan's index object: for each line its shard and its custom_id."""

    def __init__(self, pack: Pack, total: int) -> None:
        """Raises Corrupt when it does not name every line once."""
        self._pack = pack
        self._at = array("I", bytes(4 * total))
        if len(pack) != total or sorted(pack.lines) != list(range(total)):
            raise Corrupt(f"an index of {len(pack)} lines for a batch of {total}, or lines named twice")
        for i, line in enumerate(pack.lines):
            self._at[line] = i

    def shards(self, lines: Sequence[int]) -> tuple[int, ...]:
        """The shards these lines belong to, ascending."""
        return tuple(sorted({self._pack.marks[self._at[line]] for line in lines}))

    def custom_id(self, line: int) -> bytes:
        """The raw JSON of a line's custom_id."""
        return self._pack.head(self._at[line])


def never_ran(batch_id: str, line: int, custom_id: bytes, code: StopCode) -> bytes:
    """The error line of a request that was not run before its batch was stopped; `custom_id` is raw JSON (invariant 2)."""
    ending = unanswered(code, NEVER_RAN[code])
    return result_line(ending, line_id=line_id(batch_id, line), custom_id=custom_id)


@dataclass(frozen=True, slots=True)
class ResultObject:
    """A result file as it lies in the store, before a row names it."""

    object_key: str
    size: int
    sha256: str
    lines: int


class ResultWriter:
    """Gathers lines into one object, which comes into being with the first line: without lines there is no file."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self._upload: ObjectWriter | None = None
        self._waiting: list[bytes] = []
        self._size = 0
        self._lines = 0

    async def write(self, line: bytes) -> None:
        self._waiting.append(line)
        self._lines += 1
        self._size += len(line)
        if self._size >= _GATHER:
            await self._flush()

    async def commit(self) -> ResultObject | None:
        """Makes the object visible; None when nothing was written."""
        await self._flush()
        if self._upload is None:
            return None
        stored = await self._upload.commit()
        return ResultObject(self._key, stored.size, stored.sha256, self._lines)

    async def close(self) -> None:
        """Leaves nothing behind of what was not committed."""
        if self._upload is not None:
            await self._upload.__aexit__(None, None, None)

    async def _flush(self) -> None:
        if not self._waiting:
            return
        if self._upload is None:
            self._upload = await self._store.writer(self._key).__aenter__()
        data, self._waiting, self._size = b"".join(self._waiting), [], 0
        await self._upload.write(data)
