"""The workers that are about, as they say themselves: for readiness and for the cut of shards. Nothing is decided by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Row, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from state.database import Database, upsert
from state.tables import workers

#: A worker that has not been seen for so many seconds is not about.
RECENT_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself. `engine` is a kind such as `vllm`; `cause` says why it is not ready."""

    worker_id: str
    engine: str
    state: str
    cause: str | None
    models: tuple[str, ...]
    seen_at: float


async def seen(
    db: Database,
    *,
    worker_id: str,
    engine: str,
    state: str,
    cause: str | None,
    models: Sequence[str],
    now: float,
) -> None:
    """Notes that a worker is about. `state` is ready, starting or failing."""
    row = {
        "id": worker_id,
        "engine": engine,
        "state": state,
        "cause": cause,
        "models": orjson.dumps(list(models)).decode(),
        "seen_at": now,
    }
    async with db.write() as conn:
        await upsert(conn, workers, "id", row, keep=())


async def forget(db: Database, *, worker_id: str | None = None) -> None:
    """A worker has gone; or, with no id, every one that was ever here."""
    gone = delete(workers) if worker_id is None else delete(workers).where(workers.c.id == worker_id)
    async with db.write() as conn:
        await conn.execute(gone)


async def listed(db: Database, *, now: float, within: float = RECENT_S) -> list[WorkerInfo]:
    """The workers seen within so many seconds."""
    query = select(workers).where(workers.c.seen_at >= now - within).order_by(workers.c.id)
    async with db.read() as conn:
        return [_info(row) for row in await conn.execute(query)]


async def count_recent(conn: AsyncConnection) -> int:
    """How many workers were seen about as recently as the last one that was."""
    last = select(func.max(workers.c.seen_at)).scalar_subquery()
    query = select(func.count()).select_from(workers).where(workers.c.seen_at >= last - RECENT_S)
    return await conn.scalar(query) or 0


def _info(row: "Row[Any]") -> WorkerInfo:
    return WorkerInfo(row.id, row.engine, row.state, row.cause, tuple(orjson.loads(row.models)), row.seen_at)
