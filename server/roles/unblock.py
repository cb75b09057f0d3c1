"""What a frozen process does to a SQLite database, and how the supervisor ends it.

A process that is stopped in the middle of a write transaction keeps the lock, and nobody else can write: no cancel, no
expiry, no finish (invariant 7). PostgreSQL would end such a session; here the supervisor looks whether the database can be
written to, and when it cannot for a while, kills the child that gives no sign of life. A process that is stopped anywhere
else is left alone: its leases pass to others, and it may wake up.
"""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

from server.roles.supervise import Supervisor

#: Seconds between two looks, and how long one waits for the lock.
EVERY_S, PATIENCE_S = 2.0, 1.0

#: So many looks in a row must find the database locked.
LOOKS = 3

#: A child that was not heard for so many seconds is frozen; they speak every second.
SILENT_S = 4.0


async def keep_writable(database: Path, supervisor: Supervisor) -> None:
    """Looks for ever; to be cancelled."""
    found_locked = 0
    while True:
        await asyncio.sleep(EVERY_S)
        found_locked = found_locked + 1 if await asyncio.to_thread(is_locked, database) else 0
        if found_locked >= LOOKS:
            supervisor.end_silent(SILENT_S)


def is_locked(database: Path, patience: float = PATIENCE_S) -> bool:
    """Whether the write lock cannot be had within so many seconds. It is given back at once, and nothing is written."""
    try:
        name = f"{database.absolute().as_uri()}?mode=rw"  # never makes the file
        with contextlib.closing(sqlite3.connect(name, timeout=patience, isolation_level=None, uri=True)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        return "locked" in str(error)
    return False
