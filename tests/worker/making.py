"""Leases, packs and shards as the tests of the worker need them."""

from collections.abc import Iterable, Sequence

from engine.packs import Pack, Record, pack
from engine.worker.leases import Holding
from engine.worker.segments import Finished
from engine.worker.shard import OpenShard
from state.records import ShardLease, Usage

FOREVER = float("inf")


def a_lease(
    batch: str = "batch_a", number: int = 0, *, requests: int = 4, project: str = "default", deadline: float = FOREVER
) -> ShardLease:
    return ShardLease(
        batch_id=batch,
        number=number,
        epoch=1,
        worker_id="worker-1",
        project_id=project,
        model="stub-model",
        endpoint="/v1/chat/completions",
        object_key=f"batches/{batch}/e1/shard-{number}",
        requests=requests,
        size=requests * 10,
        next_seq=0,
        deadline=deadline,
        batch_created_at=0,
        claims_since_progress=0,
        suspect=None,
    )


def a_pack(requests: int, *, marks: Sequence[int] | None = None, first_line: int = 0) -> Pack:
    return Pack(
        pack(Record(first_line + i, marks[i] if marks else 0, b'"c%d"' % i, b'{"n": %3d}' % i) for i in range(requests))
    )


def a_shard(
    batch: str = "batch_a",
    number: int = 0,
    *,
    requests: int = 4,
    done: Iterable[int] = (),
    project: str = "default",
    deadline: float = FOREVER,
    careful: int = 0,
    marks: Sequence[int] | None = None,
    trusted_until: float = FOREVER,
) -> OpenShard:
    return OpenShard(
        lease=a_lease(batch, number, requests=requests, project=project, deadline=deadline),
        pack=a_pack(requests, marks=marks),
        done=done,
        holding=Holding(1, trusted_until),
        careful=careful,
    )


def a_result(line: int = 0, *, mark: int = 0, model: str | None = "stub-model") -> Finished:
    return Finished(line, mark, b'{"line": %d}\n' % line, Usage(3, 1, 2, 0), model)
