"""An orchestrator's parts in one hand, and a worker played through the ledger, for tests of whole batches."""

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.orchestrator.child import perform
from engine.orchestrator.janitor import Janitor
from engine.orchestrator.jobs import Jobs
from engine.orchestrator.outcome import Outcomes
from engine.orchestrator.sweep import Sweep
from engine.packs import ERROR, OUTPUT, Pack, Record, pack
from state import batches, files, models, shards
from state.clock import Clock
from state.database import Database
from state.ids import line_id, new_batch_id, new_file_id
from state.objects.local import LocalStore
from state.records import Batch, File, Model, Segment, ShardLease, Tally, Usage
from state.settings import Settings
from state.wake import PollingWaker, Topic

ENDPOINT = "/v1/chat/completions"
PROJECT = "default"


class InProcess:
    """Children's place, without processes: for tests of what is decided, not of what dies."""

    def __init__(self, store: LocalStore, spool: Path) -> None:
        self._store, self._spool = store, spool
        self.before: Callable[[Any], Any] | None = None
        """Called with each job first; may raise, or be a coroutine function to wait in."""

    async def run_small(self, job: Any) -> Any:
        if self.before is not None and asyncio.iscoroutine(waits := self.before(job)):
            await waits
        return await perform(job, store=self._store, parent=self._spool)

    run_large = run_small


class Notices(PollingWaker):
    """Remembers whom it woke."""

    def __init__(self) -> None:
        self.woken: list[Topic] = []

    def notify(self, topic: Topic) -> None:
        self.woken.append(topic)


def input_lines(count: int, *, model: str = "m") -> bytes:
    """A good input file. Prompts run against the order of the lines, so that execution order is not input order."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"r-{n}",
                "method": "POST",
                "url": ENDPOINT,
                "body": {"model": model, "messages": [{"role": "user", "content": f"{(count - n) * 7919 % 1000:04}"}]},
            }
        ).encode()
        + b"\n"
        for n in range(count)
    )


def answer(batch_id: str, line: int, custom_id: bytes, *, good: bool = True) -> bytes:
    """The result line that `House.work` writes."""
    status = 200 if good else 400
    return b'{"id": "%s", "custom_id": %s, "response": {"status_code": %d, "body": {}}, "error": null}\n' % (
        line_id(batch_id, line).encode(),
        custom_id,
        status,
    )


def answers(batch_id: str, lines: Collection[int], *, good: bool = True) -> bytes:
    """The result lines of these lines of `input_lines`."""
    return b"".join(answer(batch_id, n, b'"r-%d"' % n, good=good) for n in lines)


def parts(
    *, database: Database, children: Any, clock: Clock, settings: Settings, holder: str = "orchestrator-1"
) -> tuple[Jobs, Sweep, Notices]:
    """The job loop and the sweeper, as the role wires them, and whom they woke."""
    waker = Notices()
    outcomes = Outcomes(database=database, clock=clock, waker=waker, settings=settings)
    jobs = Jobs(database=database, children=children, outcomes=outcomes, clock=clock, holder=holder, settings=settings)
    return jobs, Sweep(database=database, clock=clock, waker=waker, settings=settings), waker


@dataclass(kw_only=True)
class House:
    db: Database
    store: LocalStore
    clock: Any
    settings: Settings
    children: Any
    jobs: Jobs
    sweep: Sweep
    notices: Notices
    janitor: Janitor

    async def serve_model(self, name: str = "m") -> None:
        model = Model(name, name, "test", 1, self.clock.wall())
        await models.register(self.db, models=[model], now=self.clock.wall())

    async def upload(self, content: bytes) -> str:
        file_id = new_file_id()
        key = f"files/{file_id}"
        await files.reserve(
            self.db,
            file_id=file_id,
            project_id=PROJECT,
            purpose="batch",
            filename="input.jsonl",
            object_key=key,
            now=self.clock.wall(),
            expires_at=None,
        )
        stored = await self.store.put(key, content)
        await files.publish(self.db, file_id=file_id, size=stored.size, sha256=stored.sha256)
        return file_id

    async def create(self, content: bytes, *, window_s: float = 86_400, file_id: str | None = None) -> Batch:
        """Uploads a file and makes a batch of it."""
        return await batches.create(
            self.db,
            batch_id=new_batch_id(self.clock.wall()),
            project_id=PROJECT,
            endpoint=ENDPOINT,
            input_file_id=file_id or await self.upload(content),
            completion_window="24h",
            window_s=window_s,
            metadata=None,
            output_expires_after=None,
            now=self.clock.wall(),
        )

    async def planned(self, lines: int, **rest: Any) -> Batch:
        """A batch that is in progress."""
        await self.serve_model()
        batch = await self.create(input_lines(lines), **rest)
        await self.settle()
        return await self.get(batch)

    async def get(self, batch: Batch) -> Batch:
        return await batches.get(self.db, project_id=PROJECT, batch_id=batch.id)

    async def cancel(self, batch: Batch) -> None:
        await batches.cancel(self.db, project_id=PROJECT, batch_id=batch.id, now=self.clock.wall())

    async def settle(self) -> None:
        """Sweeper and job loop run until neither has anything to do now."""
        while await self.sweep.step() or await self.jobs.step():
            pass

    async def claim(self) -> ShardLease | None:
        return await shards.claim(
            self.db, worker_id="worker-1", models=["m"], now=self.clock.wall(), ttl=30.0, grace=20.0
        )

    async def work(self, *, failed: Collection[int] = (), segment_lines: int = 5) -> None:
        """A worker answers everything there is."""
        while (lease := await self.claim()) is not None:
            await self.answer(lease, failed=failed, segment_lines=segment_lines)

    async def answer(
        self,
        lease: ShardLease,
        *,
        failed: Collection[int] = (),
        segment_lines: int = 5,
        most: int = 1 << 30,
        close: bool = True,
    ) -> ShardLease:
        """Answers the shard's requests that have no answer yet, `most` at most, and closes it."""
        shard = list(Pack(await self.store.get(lease.object_key)))
        done = await self._done(lease)
        places = [place for place in range(len(shard)) if place not in done][:most]
        for start in range(0, len(places), segment_lines):
            chunk = places[start : start + segment_lines]
            lease = await self._append(lease, shard, chunk, set(failed))
        if close:
            await shards.close(self.db, lease=lease, now=self.clock.wall())
        return lease

    async def _done(self, lease: ShardLease) -> set[int]:
        known = await shards.segments(self.db, batch_id=lease.batch_id, number=lease.number)
        return {i for s in known for i in range(len(s.places) * 8) if s.places[i // 8] >> (i % 8) & 1}

    async def _append(self, lease: ShardLease, shard: list[Record], places: list[int], failed: set[int]) -> ShardLease:
        lines = [
            Record(
                shard[p].line,
                ERROR if shard[p].line in failed else OUTPUT,
                b"",
                answer(lease.batch_id, shard[p].line, shard[p].head, good=shard[p].line not in failed),
            )
            for p in places
        ]
        bitmap = bytearray((len(shard) + 7) // 8)
        for p in places:
            bitmap[p // 8] |= 1 << (p % 8)
        key = f"batches/{lease.batch_id}/s{lease.number}/e{lease.epoch}/seg-{lease.next_seq}"
        stored = await self.store.put(key, pack(lines))
        bad = sum(line.mark for line in lines)
        segment = Segment(
            batch_id=lease.batch_id,
            shard_number=lease.number,
            seq=lease.next_seq,
            epoch=lease.epoch,
            object_key=key,
            sha256=stored.sha256,
            size=stored.size,
            lines=len(lines),
            places=bytes(bitmap),
        )
        tally = Tally(completed=len(lines) - bad, failed=bad, usage=Usage(input_tokens=len(lines)), model="m-2026")
        return await shards.append(self.db, lease=lease, segment=segment, tally=tally, now=self.clock.wall())

    async def content(self, file_id: str | None) -> bytes:
        """A result file's bytes, as a client would read them."""
        assert file_id is not None
        file = await files.get(self.db, project_id=PROJECT, file_id=file_id)
        data = await self.store.get(file.object_key)
        assert len(data) == file.bytes  # invariant 11
        return data

    async def file(self, file_id: str) -> File:
        return await files.get(self.db, project_id=PROJECT, file_id=file_id)

    async def keys(self, prefix: str) -> list[str]:
        return sorted([key async for key in self.store.list(prefix)])
