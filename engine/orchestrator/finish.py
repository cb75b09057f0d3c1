"""Writing a batch's output and error file from the segments its workers left.

Runs in the orchestrator's child process: it has the object store and a folder for temporary files, and no database. What
it returns is a proposal; the parent commits it under the job's lease, so a result of a lost lease is garbage under a key
of its own epoch (invariant 4).

Results are written in input order: the segments, which lie in execution order, are verified against their checksums and
copied one after another into one spool file, with three compact arrays saying where each line's answer lies; then the
lines are read in order. Results too large to spool are written in execution order, straight from the segments. Either way
each line number appears exactly once over both files (invariant 1), or nothing is written and the holes are named.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from engine.orchestrator.results import Book, Index, ResultObject, ResultWriter, StopCode, Tallies, never_ran
from engine.packs import ERROR, OUTPUT, Pack
from state.losses import Loss
from state.objects import ObjectStore
from state.records import Corrupt, NotFound, OutOfSpace, Segment, Unavailable

#: Segments are fetched ahead of their use, up to so many at once and so many bytes: a store far away costs its latency
#: once, not once per segment.
_AHEAD, _AHEAD_BYTES = 8, 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """What the finish of one batch needs, as plain data. `epoch` is the finish job's.

    `spool_limit` is in bytes of segments; above it plan order is kept. `min_free_bytes` stay free on each disk.
    """

    batch_id: str
    epoch: int
    total: int
    index_key: str
    segments: tuple[Segment, ...]
    spool_limit: int
    stop_code: StopCode | None = None
    min_free_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of all segments: what is read, and about what is written."""
        return sum(segment.size for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome: two objects (None where a file would be empty), or the shards that must run again.

    `lost` are the segments whose object is gone or differs from its checksum.
    """

    output: ResultObject | None = None
    error: ResultObject | None = None
    holes: tuple[int, ...] = ()
    lost: tuple[Loss, ...] = ()


class _Holes(Exception):
    """Lines without an answer in a batch that was not stopped."""

    def __init__(self, shards: tuple[int, ...]) -> None:
        self.shards = shards


_Line = tuple[int, bytes]
"""Which file (OUTPUT or ERROR) and the line itself."""

_Ahead = tuple[Segment, asyncio.Task[tuple[Pack, bytes] | None]]
"""A segment that is being fetched."""


async def write_results(store: ObjectStore, *, request: FinishRequest, spool: Path) -> Written:
    """Writes both files under `results/<batch>/e<epoch>/`.

    Raises:
        Corrupt: a line is answered twice, or the index does not fit: nothing is written, a person must look.
        OutOfSpace: there is no room for the spool and the files; before anything was done, where that can be foreseen.
        Unavailable: the store does not answer, or has lost the index object.
    """
    _check_room(store, request, spool)
    prefix = f"results/{request.batch_id}/e{request.epoch}"
    files = {OUTPUT: ResultWriter(store, f"{prefix}/output"), ERROR: ResultWriter(store, f"{prefix}/error")}
    tallies = Tallies()
    order = _input_order if request.size <= request.spool_limit else _plan_order
    try:
        async with contextlib.aclosing(order(store, request, spool, tallies)) as lines:
            async for kind, line in lines:
                await files[kind].write(line)
        return Written(await files[OUTPUT].commit(), await files[ERROR].commit(), lost=tallies.losses())
    except _Holes as holes:
        return Written(holes=holes.shards, lost=tallies.losses())
    finally:
        for file in files.values():
            await file.close()


def _check_room(store: ObjectStore, request: FinishRequest, spool: Path) -> None:
    """The spool takes all segments and the store the files, which are as large; on one disk that is twice their size."""
    spooled = request.size if request.size <= request.spool_limit else 0
    room = store.free_bytes()
    for free, needed in ((shutil.disk_usage(spool).free, spooled), (room, spooled + request.size)):
        if free is not None and free < needed + request.min_free_bytes:
            message = (
                f"the results of {request.batch_id} need {needed} bytes beside {request.min_free_bytes} in reserve"
            )
            raise OutOfSpace(f"{message}; {free} are free", needed=needed + request.min_free_bytes, free=free)


async def _input_order(
    store: ObjectStore, request: FinishRequest, spool: Path, tallies: Tallies
) -> AsyncGenerator[_Line, None]:
    book, base = Book(request.total), 0
    with _spool_file(spool) as file:
        async with contextlib.aclosing(_verified(store, request.segments, tallies)) as packs:
            async for segment, pack, data in packs:
                book.enter(pack, base=base, where=segment.object_key)
                _append(file, data)
                base += len(data)
        index = await _index_if_needed(store, request, book)
        for line, span in enumerate(book.spans()):
            if span is not None:
                kind, start, size = span
                yield kind, _whole(os.pread(file.fileno(), size, start), size, line)
            elif index is not None and request.stop_code is not None:
                yield ERROR, never_ran(request.batch_id, line, index.custom_id(line), request.stop_code)


async def _plan_order(
    store: ObjectStore, request: FinishRequest, spool: Path, tallies: Tallies
) -> AsyncGenerator[_Line, None]:
    book = Book(request.total)
    segments = sorted(request.segments, key=lambda segment: (segment.shard_number, segment.seq))
    async with contextlib.aclosing(_verified(store, segments, tallies)) as packs:
        async for segment, pack, _ in packs:
            book.enter(pack, base=0, where=segment.object_key)
            for record in pack:
                yield record.mark, _whole(record.body, len(record.body), record.line)
    index = await _index_if_needed(store, request, book)
    if index is not None and request.stop_code is not None:
        for line in book.missing():
            yield ERROR, never_ran(request.batch_id, line, index.custom_id(line), request.stop_code)


async def _index_if_needed(store: ObjectStore, request: FinishRequest, book: Book) -> Index | None:
    """The index when lines are missing and may be; raises _Holes when they may not."""
    missing = book.missing()
    if not missing:
        return None
    try:
        index = Index(Pack(await store.get(request.index_key)), request.total)
    except NotFound as error:
        # Whoever lost the index lost more than one segment (an unmounted folder, a wrong bucket): running everything
        # again would not mend that, waiting for the store may.
        raise Unavailable(f"the store has lost {request.index_key}") from error
    if request.stop_code is None:
        raise _Holes(index.shards(missing))
    return index


async def _verified(
    store: ObjectStore, segments: Sequence[Segment], tallies: Tallies
) -> AsyncGenerator[tuple[Segment, Pack, bytes], None]:
    """The segments in order, read ahead; those that are lost or changed are only noted."""
    ahead: deque[_Ahead] = deque()
    rest = iter(segments)
    following = next(rest, None)
    try:
        while following is not None or ahead:
            while following is not None and _room_ahead(ahead, following):
                ahead.append((following, asyncio.create_task(_fetch(store, following))))
                following = next(rest, None)
            segment, fetched = ahead.popleft()
            verified = await fetched
            tallies.note(segment, verified and verified[0])
            if verified is not None:
                yield segment, *verified
    finally:
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)


def _room_ahead(ahead: "deque[_Ahead]", following: Segment) -> bool:
    fetching = sum(segment.size for segment, _ in ahead)
    return not ahead or (len(ahead) < _AHEAD and fetching + following.size <= _AHEAD_BYTES)


async def _fetch(store: ObjectStore, segment: Segment) -> tuple[Pack, bytes] | None:
    """The segment, None if it is gone or damaged. A first reading that does not fit its checksum is not believed."""
    try:
        for _ in range(2):
            data = await store.get(segment.object_key)
            if (pack := _checked(segment, data)) is not None:
                return pack, data
    except NotFound:
        pass
    return None


def _checked(segment: Segment, data: bytes) -> Pack | None:
    """The segment's pack, or None when the bytes are not those whose checksum was committed."""
    if hashlib.sha256(data).hexdigest() != segment.sha256:
        return None
    try:
        return Pack(data)
    except Corrupt:
        return None


def _whole(line: bytes, size: int, number: int) -> bytes:
    if len(line) != size or not line.endswith(b"\n"):
        raise Corrupt(f"the result of line {number} is cut short")
    return line


@contextlib.contextmanager
def _spool_file(folder: Path) -> Iterator[IO[bytes]]:
    """A file without a name: it is gone with its process, however that ends."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        yield file


def _append(file: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
