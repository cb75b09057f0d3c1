"""The ledger: who holds which shard, and what has been committed for it.

Ledger rule 1: the fence is a lock, not a condition. Every transaction here begins with the update of the shard's row, with
the holder's epoch and the state in its WHERE; unless that changed one row, LeaseLost. Only then come segments and batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, case, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state import batch_rows, leasing, tables
from state.closing import book_closed
from state.database import Database
from state.records import LeaseLost, Segment, ShardLease, Tally, WorkState
from state.shard_claims import Candidate, candidates, claim, reopen
from state.tables import batches, shards

__all__ = [
    "Candidate",
    "Renewal",
    "ShardInfo",
    "all_segments",
    "append",
    "candidates",
    "claim",
    "close",
    "expire_leases",
    "release",
    "renew",
    "reopen",
    "segments",
    "shard_list",
    "suspect",
]


@dataclass(frozen=True, slots=True)
class Renewal:
    """What became of the leases that were to be renewed, as (batch id, shard number)."""

    held: frozenset[tuple[str, int]]
    """Still ours, and good for another ttl."""
    lost: frozenset[tuple[str, int]]
    """Another's, closed, or given back: stop, commit nothing."""
    stopped: frozenset[tuple[str, int]]
    """Those of the held whose batch was cancelled or whose window is over: abort, commit what is finished, close."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard as finishing sees it."""

    number: int
    object_key: str
    requests: int
    epoch: int
    state: WorkState


async def append(
    db: Database, *, lease: ShardLease, segment: Segment, tally: Tally, now: float, close: bool = False
) -> ShardLease:
    """Commits a segment, whose object is already durable, and closes the shard with it if asked.

    Returns the lease as it goes on. Sending the same segment again, after an unknown outcome, commits it once.

    Raises:
        LeaseLost: the shard has another owner, or is closed; nothing was changed (invariant 4).
    """
    if (segment.batch_id, segment.shard_number, segment.seq) != (lease.batch_id, lease.number, lease.next_seq):
        raise ValueError(f"segment {segment.seq} does not follow on {lease.batch_id}/{lease.number}")
    kept = replace(lease, next_seq=lease.next_seq + 1, claims_since_progress=0, suspect=None)
    values = _booked(tally) | (_CLOSED if close else {})

    async def send(conn: AsyncConnection) -> ShardLease:
        await _fenced(conn, lease, values, shards.c.next_seq == lease.next_seq)
        await conn.execute(tables.segments.insert().values(_segment_row(segment)))
        if tally.model is not None:
            await _name_model(conn, lease.batch_id, tally.model)
        if close:
            await book_closed(conn, batch_id=lease.batch_id, count=1, now=now)
        return kept

    async def found(conn: AsyncConnection) -> ShardLease | None:
        key = await conn.scalar(
            select(tables.segments.c.object_key).where(
                tables.segments.c.batch_id == segment.batch_id,
                tables.segments.c.shard_number == segment.shard_number,
                tables.segments.c.seq == segment.seq,
            )
        )
        return kept if key == segment.object_key else None

    return await db.settle(send, found)


async def close(db: Database, *, lease: ShardLease, now: float) -> None:
    """Closes a shard without another segment: all is committed, or the batch is stopped.

    Raises:
        LeaseLost: the shard has another owner, or was closed by another; nothing was changed.
    """

    async def send(conn: AsyncConnection) -> bool:
        await _fenced(conn, lease, _CLOSED)
        await book_closed(conn, batch_id=lease.batch_id, count=1, now=now)
        return True

    await db.settle(send, lambda conn: _reached(conn, lease, WorkState.CLOSED))


async def release(
    db: Database, *, lease: ShardLease, now: float, not_before: float = 0.0, error: str | None = None
) -> None:
    """Gives a shard back. It may be claimed again from `not_before` on (wall time; at most ten minutes from now).

    The epoch stays: the next claim counts it up. A shard given back in order is no sign of a poisonous request, so this
    claim is not counted in `claims_since_progress`.

    Raises:
        LeaseLost: the shard has another owner, or is closed; nothing was changed.
    """
    claims = shards.c.claims_since_progress
    values = {
        "state": WorkState.READY,
        "worker_id": None,
        "not_before": leasing.put_off_until(now, not_before),
        "claims_since_progress": case((claims > 0, claims - 1), else_=0),
        "suspect": None,
        "last_error": error,
    }

    async def send(conn: AsyncConnection) -> bool:
        await _fenced(conn, lease, values)
        return True

    await db.settle(send, lambda conn: _reached(conn, lease, WorkState.READY))


async def suspect(db: Database, *, lease: ShardLease, place: int | None) -> None:
    """Notes which place of the shard is about to be tried alone, so that whoever comes after a death knows it.

    Raises:
        LeaseLost: the shard has another owner, or is closed.
    """
    async with db.write() as conn:
        await _fenced(conn, lease, {"suspect": place})


async def renew(
    db: Database, *, worker_id: str, leases: Sequence[tuple[str, int, int]], now: float, ttl: float
) -> Renewal:
    """Renews leases, each given as (batch id, shard number, epoch), and says which are lost and which to stop.

    Ledger rule 6: succeeds while the epoch is unchanged and the shard not closed, even after the lease ran out.
    """
    held: set[tuple[str, int]] = set()
    async with db.write() as conn:
        for batch_id, number, epoch in sorted(leases):
            change = (
                update(shards)
                .where(*_held(batch_id, number, epoch), shards.c.worker_id == worker_id)
                .values(lease_until=leasing.lease_until(now, ttl))
            )
            if (await conn.execute(change)).rowcount == 1:
                held.add((batch_id, number))
        running = await _running(conn, {batch_id for batch_id, _ in held})
    everything = {(batch_id, number) for batch_id, number, _ in leases}
    return Renewal(
        held=frozenset(held),
        lost=frozenset(everything - held),
        stopped=frozenset(place for place in held if place[0] not in running),
    )


async def expire_leases(db: Database, *, holder: str | None = None) -> None:
    """Ends the leases of a worker that is certainly dead, or all of them when every worker is."""
    async with db.write() as conn:
        await conn.execute(leasing.ended_by_death(shards, column="worker_id", holder=holder))


async def segments(db: Database, *, batch_id: str, number: int) -> list[Segment]:
    """What is committed for a shard, in order. To be read after the claim has committed (ledger rule 1)."""
    return await _segments(db, tables.segments.c.batch_id == batch_id, tables.segments.c.shard_number == number)


async def all_segments(db: Database, *, batch_id: str) -> list[Segment]:
    """What is committed for a whole batch, by shard and in order."""
    return await _segments(db, tables.segments.c.batch_id == batch_id)


async def shard_list(db: Database, *, batch_id: str) -> list[ShardInfo]:
    """A batch's shards by number."""
    query = (
        select(shards.c.number, shards.c.object_key, shards.c.requests, shards.c.epoch, shards.c.state)
        .where(shards.c.batch_id == batch_id)
        .order_by(shards.c.number)
    )
    async with db.read() as conn:
        return [
            ShardInfo(row.number, row.object_key, row.requests, row.epoch, WorkState(row.state))
            for row in await conn.execute(query)
        ]


_CLOSED: dict[str, Any] = {"state": WorkState.CLOSED, "worker_id": None}


def _held(batch_id: str, number: int, epoch: int) -> tuple[ColumnElement[bool], ...]:
    return (
        shards.c.batch_id == batch_id,
        shards.c.number == number,
        shards.c.epoch == epoch,
        shards.c.state == WorkState.LEASED,
    )


async def _fenced(
    conn: AsyncConnection, lease: ShardLease, values: dict[str, Any], *further: ColumnElement[bool]
) -> None:
    """The fence: the first statement of the transaction, and a lock on the shard's row (invariant 4)."""
    change = update(shards).where(*_held(lease.batch_id, lease.number, lease.epoch), *further).values(**values)
    if (await conn.execute(change)).rowcount != 1:
        raise LeaseLost(f"{lease.batch_id}/{lease.number} is no longer held under epoch {lease.epoch}")


async def _reached(conn: AsyncConnection, lease: ShardLease, state: WorkState) -> bool | None:
    """Whether the shard is in this state under our epoch: then it was us who brought it there (ledger rule 4)."""
    query = select(shards.c.n).where(
        shards.c.batch_id == lease.batch_id,
        shards.c.number == lease.number,
        shards.c.epoch == lease.epoch,
        shards.c.state == state,
    )
    return (await conn.scalar(query)) is not None or None


def _booked(tally: Tally) -> dict[str, Any]:
    """What a segment changes on its shard's row (ledger rule 2)."""
    added = {
        "completed": tally.completed,
        "failed": tally.failed,
        "input_tokens": tally.usage.input_tokens,
        "cached_tokens": tally.usage.cached_tokens,
        "output_tokens": tally.usage.output_tokens,
        "reasoning_tokens": tally.usage.reasoning_tokens,
        "next_seq": 1,
    }
    return {name: shards.c[name] + count for name, count in added.items()} | {
        "claims_since_progress": 0,
        "suspect": None,
    }


def _segment_row(segment: Segment) -> dict[str, Any]:
    return {column.name: getattr(segment, column.name) for column in tables.segments.c}


async def _name_model(conn: AsyncConnection, batch_id: str, model: str) -> None:
    """The first committed reply names the batch's model."""
    await conn.execute(
        update(batches).where(batches.c.id == batch_id, batches.c.reply_model.is_(None)).values(reply_model=model)
    )


async def _running(conn: AsyncConnection, batch_ids: Iterable[str]) -> set[str]:
    """Those of the batches whose requests are to be run."""
    query = select(batches.c.id).where(and_(batches.c.id.in_(list(batch_ids)), batch_rows.workable()))
    return set((await conn.scalars(query)).all())


async def _segments(db: Database, *wanted: ColumnElement[bool]) -> list[Segment]:
    table = tables.segments
    async with db.read() as conn:
        rows = await conn.execute(select(table).where(*wanted).order_by(table.c.shard_number, table.c.seq))
        return [_segment(row) for row in rows]


def _segment(row: "Row[Any]") -> Segment:
    return Segment(**{**row._asdict(), "places": bytes(row.places)})
