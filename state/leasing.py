"""What shards and jobs have in common: when a row may be claimed, and what a claim does to it.

A row that is LEASED stays so when its lease runs out (ledger rule 6); the claim is the only transition. Leases and delays
are written in wall time, which may jump. Forward, it costs leases. Backward, a row could seem leased or put off for ever;
so a time further away than anybody ever writes is taken as past (invariants 8 and 9).
"""

from sqlalchemy import ColumnElement, Table, and_, or_, update
from sqlalchemy.sql.dml import Update

from state.records import WorkState

#: The longest lease and the longest delay that are ever written, in seconds.
LONGEST_LEASE_S = 1800.0
LONGEST_DELAY_S = 600.0


def claimable(table: Table, *, now: float, grace: float) -> ColumnElement[bool]:
    """Whether a row of `shards` or `jobs` is ready, or leased to somebody who has let the lease run out."""
    until, not_before = table.c.lease_until, table.c.not_before
    ready = and_(table.c.state == WorkState.READY, or_(not_before <= now, not_before > now + LONGEST_DELAY_S))
    lapsed = and_(table.c.state == WorkState.LEASED, or_(until < now - grace, until > now + LONGEST_LEASE_S))
    open_ones = table.c.state.in_((WorkState.READY, WorkState.LEASED))  # says the same again, for the index
    return and_(open_ones, or_(ready, lapsed))


def lease_until(now: float, ttl: float) -> float:
    """The end of a lease that begins or is renewed now."""
    return now + min(ttl, LONGEST_LEASE_S)


def put_off_until(now: float, not_before: float) -> float:
    """When a row that is given back may be claimed again."""
    return min(not_before, now + LONGEST_DELAY_S)


def ended_by_death(table: Table, *, column: str, holder: str | None) -> Update:
    """Ends the leases of one holder, or all: only for holders that are certainly dead.

    The epoch stays: should the holder live after all, it renews or is fenced off by the next claim, as ever.
    """
    change = update(table).where(table.c.state == WorkState.LEASED).values(lease_until=0.0)
    return change if holder is None else change.where(table.c[column] == holder)
