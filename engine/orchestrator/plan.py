"""Planning a batch: its input checked, put in execution order, and cut into shards.

Runs in a process without a database (`engine.orchestrator.child`), so it decides nothing: it writes objects under the plan
job's epoch and says what it found; the orchestrator commits that, or not. Objects of a plan that was never committed are
garbage of their epoch.
"""

import asyncio
import os
import shutil
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Self

from engine.bodies import Catalogue, ordered_by_prefix
from engine.lines import Limits, Rules
from engine.orchestrator.order import cut, prefix_order
from engine.orchestrator.scan import Requests, Scan, scan
from engine.packs import Record, pack, pack_table
from state.objects import ObjectStore
from state.records import Corrupt, Fault, Model, NewShard, NotFound, OutOfSpace

#: A shard is at most so large, unless one request is larger.
SHARD_BYTES = 8 * 1024 * 1024
_FEWEST, _MOST = 16, 500
#: Shards for each worker, so that the last ones end at about the same time.
_SHARDS_PER_WORKER = 8
#: Shards written at once: a store's latency overlaps, memory stays small.
_WRITERS = 4
_PIECE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan needs, as plain data. `epoch` is the plan job's.

    `object_key` None: the input file is not there any more. `models` maps each name that may be asked for, `*` for any, to
    its row. `size` and `sha256` are the file's, where its row has them.
    """

    batch_id: str
    epoch: int
    endpoint: str
    file_id: str
    object_key: str | None
    size: int | None
    sha256: str | None
    models: Mapping[str, Model]
    workers: int
    limits: Limits
    min_free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, its objects written. `model_root` is what the engine calls the model, `requested_model` what the lines do."""

    model_root: str
    requested_model: str
    shards: tuple[NewShard, ...]
    index_key: str
    total: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The input cannot be run; why."""

    faults: tuple[Fault, ...]


PlanResult = Planned | Refused


async def make_plan(store: ObjectStore, *, request: PlanRequest, spool: Path) -> PlanResult:
    """Plans one batch. What it spools below the folder `spool` is gone when it returns.

    Raises:
        Corrupt: the input differs from its length or checksum.
        OutOfSpace: there is no room for the spool and the shards; nothing was done.
        Unavailable: the store does not answer.
    """
    if request.object_key is None:
        return _no_such_file(request)
    _check_room(store, request, spool)
    async with _folder(spool) as folder:
        source = folder / "input"
        try:
            await store.fetch(request.object_key, source)
        except NotFound:
            return _no_such_file(request)
        with Spools.open(folder) as spools:
            rules = Rules(request.endpoint, Catalogue(request.models), request.limits)
            found = await asyncio.to_thread(scan, source, rules=rules, ids=spools.ids, keys=spools.keys)
            _check_whole(found, request)
            if found.faults:
                return Refused(found.faults)
            layout = await asyncio.to_thread(_lay_out, found.requests, request, spools.keys)
            return await _Writer(store, request, found.requests, layout, spools).write(found.model)


@dataclass(frozen=True, slots=True)
class Spools:
    """The local files of a plan: the input, and what the scan writes."""

    source: BinaryIO
    ids: BinaryIO
    keys: BinaryIO

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Self]:
        """Opens them in a folder that holds the input."""
        with (
            open(folder / "input", "rb") as source,
            open(folder / "ids", "w+b", buffering=_PIECE) as ids,
            open(folder / "keys", "w+b", buffering=_PIECE) as keys,
        ):
            yield cls(source, ids, keys)


@dataclass(frozen=True, slots=True)
class Layout:
    """Who runs after whom: the requests in execution order, what each shares with the one before, and the shards."""

    order: "array[int]"
    shared: "array[int]"
    cuts: list[tuple[int, int]]


def shard_target(total: int, workers: int) -> int:
    """Requests per shard."""
    return max(_FEWEST, min(_MOST, total // (_SHARDS_PER_WORKER * max(workers, 1))))


def _lay_out(requests: Requests, request: PlanRequest, keys: BinaryIO) -> Layout:
    count = len(requests)
    if ordered_by_prefix(request.endpoint):
        starts = array("Q", accumulate(requests.key_sizes, initial=0))

        def read_block(i: int, start: int, size: int) -> bytes:
            size = min(size, requests.key_sizes[i] - start)
            return os.pread(keys.fileno(), size, starts[i] + start) if size > 0 else b""

        order, shared = prefix_order(count, read_block)
    else:
        order, shared = array("I", range(count)), array("I", bytes(4 * count))
    sizes = array("I", (requests.body_sizes[i] for i in order))
    target = shard_target(count, request.workers)
    return Layout(order, shared, cut(sizes, shared, target=target, most_bytes=SHARD_BYTES))


class _Writer:
    """Writes a plan's objects: one pack per shard, and the index."""

    def __init__(
        self,
        store: ObjectStore,
        request: PlanRequest,
        requests: Requests,
        layout: Layout,
        spools: Spools,
    ) -> None:
        self._store, self._request, self._requests, self._layout = store, request, requests, layout
        self._source, self._ids = spools.source, spools.ids
        self._id_starts = array("Q", accumulate(requests.id_sizes, initial=0))
        self._folder = f"batches/{request.batch_id}/e{request.epoch}"

    async def write(self, model: str) -> Planned:
        """Writes everything, shards a few at a time."""
        waiting = iter(range(len(self._layout.cuts)))
        done: list[NewShard] = []
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_WRITERS):
                    group.create_task(self._write_shards(waiting, done))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        index_key = await self._write_index()
        known = Catalogue(self._request.models).find(model)
        root = model if known is None or known.root == "*" else known.root
        shards = tuple(sorted(done, key=lambda shard: shard.number))
        return Planned(
            model_root=root, requested_model=model, shards=shards, index_key=index_key, total=len(self._requests)
        )

    async def _write_shards(self, waiting: Iterator[int], done: list[NewShard]) -> None:
        for number in waiting:
            start, end = self._layout.cuts[number]
            data = await asyncio.to_thread(self._pack, start, end)
            key = f"{self._folder}/shard-{number}"
            await self._store.put(key, data)
            done.append(NewShard(number, key, end - start, len(data)))

    def _pack(self, start: int, end: int) -> bytes:
        return pack(self._records(start, end))

    def _records(self, start: int, end: int) -> Iterator[Record]:
        for place in range(start, end):
            i = self._layout.order[place]
            shared = self._layout.shared[place] if place > start else 0
            yield Record(i, shared, self._id(i), self._body(i))

    def _id(self, i: int) -> bytes:
        return os.pread(self._ids.fileno(), self._requests.id_sizes[i], self._id_starts[i])

    def _body(self, i: int) -> bytes:
        return os.pread(self._source.fileno(), self._requests.body_sizes[i], self._requests.body_offsets[i])

    async def _write_index(self) -> str:
        """The index's heap is the spool of ids as it is: both hold the custom_ids in input order."""
        key = f"{self._folder}/index"
        async with self._store.writer(key) as upload:
            await upload.write(await asyncio.to_thread(self._index_table))
            for start in range(0, self._id_starts[-1], _PIECE):
                await upload.write(os.pread(self._ids.fileno(), _PIECE, start))
            await upload.commit()
        return key

    def _index_table(self) -> bytes:
        count = len(self._requests)
        shard_of = array("I", bytes(4 * count))
        for number, (start, end) in enumerate(self._layout.cuts):
            for i in self._layout.order[start:end]:
                shard_of[i] = number
        return pack_table(range(count), shard_of, self._requests.id_sizes, bytes(count))


def _no_such_file(request: PlanRequest) -> Refused:
    message = f"Cannot find file {request.file_id}, or organization default does not have access to it."
    return Refused((Fault("invalid_request", message, "file_id", None),))


def _check_room(store: ObjectStore, request: PlanRequest, spool: Path) -> None:
    """The spool takes the input (where it cannot be linked) and the keys, the store the shards."""
    size = request.size or 0
    disk = shutil.disk_usage(spool).free
    room = store.free_bytes()
    for free, needed in ((disk, 2 * size), (disk if room is None else room, size)):
        if free < needed + request.min_free_bytes:
            message = f"a plan for {request.batch_id} needs {needed} bytes beside a reserve of {request.min_free_bytes}"
            raise OutOfSpace(f"{message}; {free} are free", needed=needed + request.min_free_bytes, free=free)


def _check_whole(found: Scan, request: PlanRequest) -> None:
    if request.size is not None and found.size != request.size:
        raise Corrupt(f"{request.file_id} holds {found.size} bytes instead of {request.size}")
    if request.sha256 is not None and found.sha256 != request.sha256:
        raise Corrupt(f"{request.file_id} differs from its checksum")


@asynccontextmanager
async def _folder(spool: Path) -> AsyncIterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="plan-", dir=spool))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
