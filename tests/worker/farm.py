"""A farm for workers: a real database and store, batches that are planned already, and what became of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from engine.packs import OUTPUT, Pack, Record, pack
from engine.worker import role
from state import batches, jobs, shards, workers
from state.clock import SystemClock
from state.database import Database
from state.ids import new_batch_id
from state.objects import ObjectStore
from state.records import Batch, JobLease, NewShard, Segment, ShardLease
from state.settings import Settings
from state.wake import LocalWaker, open_waker
from tests.support.stub import chat

PROJECT = "default"
ENDPOINT = "/v1/chat/completions"


@dataclass
class Farm:
    """One deployment without its api and orchestrator."""

    db: Database
    store: ObjectStore
    settings: Settings
    clock: SystemClock = field(default_factory=SystemClock)

    def tell(self, **changes: Any) -> None:
        """Changes settings of the workers that are started from here on."""
        self.settings = replace(self.settings, **changes)

    async def plan(
        self,
        texts: Sequence[str],
        *,
        per_shard: int = 500,
        project: str = PROJECT,
        endpoint: str = ENDPOINT,
        model: str = "stub-model",
        asked: str | None = None,
        marks: Sequence[int] | None = None,
        write_objects: bool = True,
    ) -> str:
        """A batch in progress whose requests say these texts; `asked` is the model the bodies name. Returns its id."""
        batch = await batches.create(
            self.db,
            batch_id=new_batch_id(self.clock.wall()),
            project_id=project,
            endpoint=endpoint,
            input_file_id="file-in",
            completion_window="24h",
            window_s=86_400.0,
            metadata=None,
            output_expires_after=None,
            now=self.clock.wall(),
        )
        job = await self._plan_job(batch.id)
        cut = []
        for number, first in enumerate(range(0, len(texts), per_shard)):
            part = range(first, min(first + per_shard, len(texts)))
            data = pack(
                Record(i, marks[i] if marks else 0, b'"id-%d"' % i, body_of(texts[i], asked or model)) for i in part
            )
            key = f"batches/{batch.id}/e{job.epoch}/shard-{number}"
            if write_objects:
                await self.store.put(key, data)
            cut.append(NewShard(number, key, len(part), len(data)))
        await batches.planned(
            self.db,
            job=job,
            model_root=model,
            shards=cut,
            index_key=f"batches/{batch.id}/e{job.epoch}/index",
            total=len(texts),
            now=self.clock.wall(),
        )
        self.notify()
        return batch.id

    async def _plan_job(self, batch_id: str) -> JobLease:
        while True:  # finish jobs of other batches are nobody's here
            job = await jobs.claim(self.db, holder="orchestrator", now=self.clock.wall(), ttl=30.0)
            assert job is not None
            if job.batch_id == batch_id:
                return job

    def notify(self) -> None:
        """Wakes the workers, as an orchestrator does."""
        waker = open_waker(self.settings)
        waker.notify("worker")
        waker.close()

    def listening(self) -> LocalWaker:
        """What an orchestrator listens to."""
        waker = open_waker(self.settings, "orchestrator")
        assert isinstance(waker, LocalWaker)
        return waker

    async def batch(self, batch_id: str) -> Batch:
        return await batches.get(self.db, project_id=PROJECT, batch_id=batch_id)

    async def ended(self, batch_id: str) -> bool:
        """Whether every shard is closed: the batch is not in progress any more and has its finish job."""
        return (await self.batch(batch_id)).status in ("finalizing", "cancelling") and not await self.open_shards(
            batch_id
        )

    async def open_shards(self, batch_id: str) -> list[shards.ShardInfo]:
        return [s for s in await shards.shard_list(self.db, batch_id=batch_id) if s.state != "closed"]

    async def segments(self, batch_id: str) -> list[Segment]:
        return await shards.all_segments(self.db, batch_id=batch_id)

    async def lines(self, batch_id: str) -> dict[int, dict[str, Any]]:
        """The committed result lines by their place in the input; each must be there once (invariant 1)."""
        found: dict[int, dict[str, Any]] = {}
        for segment in await self.segments(batch_id):
            for record in Pack(await self.store.get(segment.object_key)):
                assert record.line not in found
                found[record.line] = {
                    **orjson.loads(record.body),
                    "file": "output" if record.mark == OUTPUT else "error",
                }
        return found

    async def claim(self, worker_id: str, model: str = "stub-model") -> ShardLease | None:
        """Claims a shard as another worker would."""
        return await shards.claim(
            self.db, worker_id=worker_id, models=[model], now=self.clock.wall(), ttl=30.0, grace=0.0
        )

    async def cancel(self, batch_id: str) -> None:
        await batches.cancel(self.db, project_id=PROJECT, batch_id=batch_id, now=self.clock.wall())
        self.notify()

    async def worker_state(self) -> str | None:
        """What the one worker there is says of its engine."""
        seen = await workers.listed(self.db, now=self.clock.wall())
        return seen[0].state if seen else None

    @asynccontextmanager
    async def worker(self, *, upstream: str | None = None, worker_id: str = "worker-1") -> AsyncIterator[asyncio.Event]:
        """A worker at work; the event that is handed out stops it early."""
        stop = asyncio.Event()
        task = asyncio.create_task(
            role.run(self.settings, worker_id=worker_id, upstream=upstream, stop=stop), name=worker_id
        )
        try:
            yield stop
        finally:
            stop.set()
            await task


def body_of(text: str, model: str = "stub-model") -> bytes:
    return orjson.dumps({"model": model, "messages": chat(text)})


def settings_for(data: Path, **changes: Any) -> Settings:
    """Settings under which things happen soon."""
    values = {"data": data, "engine": "remote", "lease_heartbeat": 0.2, "segment_interval": 0.2, "max_in_flight": 8}
    return Settings(**(values | changes))
