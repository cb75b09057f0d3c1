"""The ledger's clock: a time that no jump of the wall clock can push, so that no batch expires early (invariant 8).

Deadlines are kept in ledger time. It is one number in the database, `ledger`, and rule 9 asks one thing of it: between any
two moments it grows by no more than the time that really passed between them. Then a batch whose deadline was stamped as
`ledger + window` at some moment after its creation cannot be due before its whole window has passed. Late is allowed: what
passes unobserved is given to the batches.

How that holds
--------------
The row also says under which boot it was last written, and at which reading of that boot's monotonic clock. Wall time is
read once, when the row is first made, so that ledger time looks like a date; never again.

- *The same boot* (a restart included): the two monotonic readings can be compared, and their difference is what passed.
- *Another boot* (a reboot, another machine): nothing can be said about the time before we looked. But while we look and the
  row's version stays the same, time passes for certain; once it has stayed so for `TAKEOVER_S`, its keeper is taken for
  gone, and the row goes on by just the time that we watched, under our boot.

Each step is therefore no longer than the time since the row was last written, whoever writes it; the steps add up to no
more than real time, and with several orchestrators on several machines one keeps the clock and the rest look on. Nobody
ever catches up for time that was missed: a batch stamped in the meantime would lose it from its window.

- *Between writes* a keeper reads its clock first and the row second. Stopped in between for an hour, it comes back with a time
  that is old, and not with one that nobody vouches for.

Stamping: a batch is created without a deadline, since the api cannot know the ledger time of now. The keeper stamps
`ledger + window` on batches that it finds without one, and reads its clock *after* it found them, in the transaction that
writes the row. So the ledger time of a stamp is never older than the batch.
"""

from dataclasses import dataclass

from sqlalchemy import Select, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from state.clock import Clock
from state.database import Database
from state.records import BatchStatus
from state.tables import batches
from state.tables import clock as clock_row

#: The row is written this often even when there is nothing to stamp (seconds): what a reboot may cost.
WRITE_S = 5.0
#: A row of another boot that has not changed for so long (seconds) has lost its keeper. More than `WRITE_S`.
TAKEOVER_S = 15.0
_STAMPS = 500


@dataclass(frozen=True, slots=True)
class Reading:
    """Ledger time as one orchestrator last saw it; handed to its next tick."""

    ledger_now: float
    """Seconds, on the scale of deadlines."""
    version: int
    """Counts the writes of the row."""
    since: float
    """This boot's monotonic reading when this version was first seen."""


@dataclass(frozen=True, slots=True)
class Row:
    """The persisted clock."""

    version: int
    ledger: float
    boot: str
    monotonic: float


def elapsed(row: Row, *, boot: str, monotonic: float, last: Reading | None) -> float | None:
    """How much time has passed for certain since the row was written, in seconds; None: the row is another's to advance.

    Pure. Never more than really passed; see the module's reasoning.
    """
    if row.boot == boot:
        return max(0.0, monotonic - row.monotonic)
    watched = monotonic - last.since if last is not None and last.version == row.version else 0.0
    return watched if watched >= TAKEOVER_S else None


async def tick(db: Database, *, clock: Clock, last: Reading | None) -> Reading:
    """Reads the ledger's time, and keeps the clock going if that is ours to do. To be called about once a second.

    `last` is what the tick before returned; None at the start of a process. Stamps the deadlines of new batches.
    """
    boot, monotonic = clock.boot_id(), clock.monotonic()  # before the row: a process may be stopped between the two
    async with db.read() as conn:
        row = await _row(conn)
        unstamped = await conn.scalar(_unstamped().limit(1)) is not None
    if row is not None:
        passed = elapsed(row, boot=boot, monotonic=monotonic, last=last)
        if passed is None:
            return _look_on(row, clock, last)
        if row.boot == boot and passed < WRITE_S and not unstamped:
            return Reading(row.ledger + passed, row.version, monotonic)
    async with db.write() as conn:
        return await _advance(conn, clock, last)


async def _advance(conn: AsyncConnection, clock: Clock, last: Reading | None) -> Reading:
    """One write of the row, and the stamps that go with it. The row is locked first, the clock read last."""
    row = await _row(conn, lock=True)
    new = list((await conn.scalars(_unstamped().limit(_STAMPS))).all())
    boot, monotonic = clock.boot_id(), clock.monotonic()
    if row is None:
        row = Row(0, clock.wall(), boot, monotonic)
        await conn.execute(clock_row.insert().values(id=1, **_values(row)))
    passed = elapsed(row, boot=boot, monotonic=monotonic, last=last)
    if passed is None:
        return _look_on(row, clock, last)
    written = Row(row.version + 1, row.ledger + passed, boot, monotonic)
    await conn.execute(update(clock_row).where(clock_row.c.id == 1).values(**_values(written)))
    stamp = update(batches).where(batches.c.n.in_(new)).values(deadline=written.ledger + batches.c.window_s)
    await conn.execute(stamp)
    return Reading(written.ledger, written.version, monotonic)


def _look_on(row: Row, clock: Clock, last: Reading | None) -> Reading:
    seen_before = last is not None and last.version == row.version
    return Reading(row.ledger, row.version, last.since if last is not None and seen_before else clock.monotonic())


def _unstamped() -> Select[tuple[int]]:
    open_ones = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    return select(batches.c.n).where(batches.c.status.in_(open_ones), batches.c.deadline.is_(None))


async def _row(conn: AsyncConnection, *, lock: bool = False) -> Row | None:
    query = select(clock_row.c.version, clock_row.c.ledger, clock_row.c.boot, clock_row.c.monotonic)
    found = (await conn.execute(query.with_for_update() if lock else query)).one_or_none()
    return None if found is None else Row(*found)


def _values(row: Row) -> dict[str, object]:
    return {"version": row.version, "ledger": row.ledger, "boot": row.boot, "monotonic": row.monotonic}
