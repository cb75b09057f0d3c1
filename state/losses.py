"""Committed results that the store lost, and which objects of a batch its rows still name.

The one place where committed results are taken back: the object of a segment is gone or differs from its checksum, so what
the row promises does not exist. Then the row goes, the shard's counts become those of the segments that are left, and the
lines have no result; `shards.reopen` sends them back to run (invariant 1). Token sums stay: those tokens were spent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, or_, select, update

from state.database import Database
from state.records import FileStatus, JobLease, LeaseLost, WorkState
from state.tables import batches, files, jobs, segments, shards


@dataclass(frozen=True, slots=True)
class Loss:
    """What a shard lost: the segments `seqs`. `completed` and `failed` count what its other segments hold."""

    shard: int
    seqs: tuple[int, ...]
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Named:
    """The objects of a batch that rows name: its plan's index, and its result files.

    `cleaned`: the batch ended, and the objects of its work were removed.
    """

    index_key: str | None
    results: frozenset[str]
    cleaned: bool


async def write_off(db: Database, *, job: JobLease, losses: Sequence[Loss]) -> None:
    """Takes lost segments back, under the lease of the batch's finish job, which is kept. Done twice, it changes nothing more.

    Raises:
        LeaseLost: the job has another owner, or is closed; nothing was changed.
    """
    async with db.write() as conn:
        fence = (
            update(jobs)
            .where(jobs.c.id == job.id, jobs.c.epoch == job.epoch, jobs.c.state == WorkState.LEASED)
            .values(state=WorkState.LEASED)
        )
        if (await conn.execute(fence)).rowcount != 1:
            raise LeaseLost(f"{job.id} is no longer held under epoch {job.epoch}")
        for loss in sorted(losses, key=lambda loss: loss.shard):
            await conn.execute(
                update(shards)
                .where(shards.c.batch_id == job.batch_id, shards.c.number == loss.shard)
                .values(completed=loss.completed, failed=loss.failed)
            )
            await conn.execute(
                delete(segments).where(
                    segments.c.batch_id == job.batch_id,
                    segments.c.shard_number == loss.shard,
                    segments.c.seq.in_(loss.seqs),
                )
            )


async def named(db: Database, *, batch_id: str) -> Named:
    """What rows name of a batch's objects. A deleted file's row names its object until the bytes are gone."""
    query = select(batches.c.index_key, batches.c.output_file_id, batches.c.error_file_id, batches.c.cleaned)
    async with db.read() as conn:
        row = (await conn.execute(query.where(batches.c.id == batch_id))).one_or_none()
        if row is None:
            return Named(None, frozenset(), cleaned=True)
        mine = or_(files.c.id == row.output_file_id, files.c.id == row.error_file_id)
        keys = await conn.scalars(select(files.c.object_key).where(mine, files.c.status != FileStatus.PENDING))
        return Named(row.index_key, frozenset(keys.all()), row.cleaned)
