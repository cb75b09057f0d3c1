"""Short ways to bring a ledger into the state that a test begins with."""

import itertools
from collections.abc import Sequence

from state import batches, jobs, shards
from state.database import Database
from state.ids import new_batch_id
from state.records import Batch, JobKind, JobLease, NewShard, Segment, ShardLease, Tally, Usage

NOW = 1_800_000_000.0
MODEL = "smol"
PROJECT = "default"
TTL = 30.0
GRACE = 20.0

_serial = itertools.count()


async def create(db: Database, *, now: float = NOW, window_s: float = 86_400.0, **changes: object) -> Batch:
    values: dict[str, object] = {
        "batch_id": new_batch_id(now),
        "project_id": PROJECT,
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-in",
        "completion_window": "24h",
        "window_s": window_s,
        "metadata": None,
        "output_expires_after": None,
        "now": now,
    }
    return await batches.create(db, **(values | changes))  # type: ignore[arg-type]


async def claim_job(db: Database, kind: JobKind, *, now: float = NOW, holder: str = "orchestrator-1") -> JobLease:
    job = await jobs.claim(db, holder=holder, now=now, ttl=TTL)
    assert job is not None, "no job to claim"
    assert job.kind is kind
    return job


def cut(batch_id: str, sizes: Sequence[int]) -> list[NewShard]:
    return [NewShard(i, f"batches/{batch_id}/e1/shard-{i}", size, size * 100) for i, size in enumerate(sizes)]


async def plan(db: Database, batch: Batch, *sizes: int, now: float = NOW) -> bool:
    job = await claim_job(db, JobKind.PLAN, now=now)
    assert job.batch_id == batch.id
    return await batches.planned(
        db,
        job=job,
        model_root=MODEL,
        shards=cut(batch.id, sizes),
        index_key=f"batches/{batch.id}/e{job.epoch}/index",
        total=sum(sizes),
        now=now,
    )


async def running(db: Database, *sizes: int, now: float = NOW, **changes: object) -> Batch:
    """A batch in progress with shards of these sizes."""
    batch = await create(db, now=now, **changes)
    assert await plan(db, batch, *sizes, now=now)
    return await look(db, batch)


async def look(db: Database, batch: Batch) -> Batch:
    return await batches.get(db, project_id=batch.project_id, batch_id=batch.id)


async def claim(db: Database, *, worker: str = "worker-1", now: float = NOW) -> ShardLease:
    lease = await shards.claim(db, worker_id=worker, models=[MODEL], now=now, ttl=TTL, grace=GRACE)
    assert lease is not None, "no shard to claim"
    return lease


def segment(lease: ShardLease, *places: int) -> Segment:
    bits = bytearray((lease.requests + 7) // 8)
    for place in places:
        bits[place // 8] |= 1 << place % 8
    return Segment(
        batch_id=lease.batch_id,
        shard_number=lease.number,
        seq=lease.next_seq,
        epoch=lease.epoch,
        object_key=f"batches/{lease.batch_id}/s{lease.number}/e{lease.epoch}/seg-{lease.next_seq}-{next(_serial)}",
        sha256="0" * 64,
        size=10 * len(places),
        lines=len(places),
        places=bytes(bits),
    )


async def append(
    db: Database, lease: ShardLease, *places: int, failed: int = 0, close: bool = False, now: float = NOW
) -> ShardLease:
    tally = Tally(
        completed=len(places) - failed, failed=failed, usage=Usage(10 * len(places), 1, 5, 2), model="smol-v1"
    )
    return await shards.append(db, lease=lease, segment=segment(lease, *places), tally=tally, close=close, now=now)


async def run_out(db: Database, lease: ShardLease, *, now: float = NOW) -> None:
    """Answers all of a shard's requests and closes it."""
    await append(db, lease, *range(lease.requests), close=True, now=now)


async def finish(db: Database, *, now: float = NOW) -> Batch | None:
    job = await claim_job(db, JobKind.FINISH, now=now)
    return await batches.finished(db, job=job, output=result(job, "output"), error=None, now=now)


def result(job: JobLease, kind: str, size: int = 100) -> batches.Result:
    file_id = job.output_file_id if kind == "output" else job.error_file_id
    assert file_id is not None
    key = f"results/{job.batch_id}/e{job.epoch}/{kind}"
    return batches.Result(file_id, key, size, "1" * 64, f"{job.batch_id}_{kind}.jsonl")
