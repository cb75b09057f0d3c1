"""Ends engines whose guard was killed: at once by its worker, or by the next one if that was killed too (invariant 15).

Each guard writes a record of what it started. A process id alone proves nothing, ids are used again; so a record counts
only within the boot it was written in, and only for processes that carry the recorded start times. A session id cannot
be given to another process while one of its members lives, so members outlast a dead leader safely; of those only the
ones that run the engine's own executable and started after it are taken for the engine's.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.backends import guard

log = logging.getLogger(__name__)

#: Seconds a guard whose worker has died gets to do its work before we do it.
GUARD_ENDS_IN_S: Final = 12.0
#: Seconds a left-over process gets between SIGTERM and SIGKILL, and again to vanish.
TERM_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Record:
    """What a guard wrote: process ids, and the start times that make them unmistakable within a boot."""

    boot_id: str
    engine: int
    engine_start: int
    executable: str
    guard: int
    guard_start: int
    owner: int
    owner_start: int
    folder: str


def parse_record(text: str) -> Record | None:
    """A record as a guard writes it; None if it is something else."""
    try:
        facts: dict[str, Any] = json.loads(text)
        return Record(**{name: facts[name] for name in Record.__slots__})
    except (ValueError, KeyError, TypeError):
        return None


def lives(processes: Iterable[guard.Process], pid: int, start: int) -> bool:
    """Whether that very process is still there. Pure."""
    return any(p.pid == pid and p.start == start and not p.zombie for p in processes)


def members(processes: Iterable[guard.Process], record: Record, executables: dict[int, str]) -> list[int]:
    """Ids of the recorded engine's living processes. Pure; `executables` gives the file that each process runs."""
    session = [p for p in processes if p.session == record.engine]
    leader = next((p for p in session if p.pid == record.engine), None)
    if leader is not None and leader.start != record.engine_start:
        return []  # the id was used again: a stranger's session
    if leader is not None:
        return [p.pid for p in session if not p.zombie]
    return [
        p.pid
        for p in session
        if not p.zombie and p.start >= record.engine_start and executables.get(p.pid) == record.executable
    ]


async def end_leftovers(folder: Path) -> None:
    """Ends what records in `folder` tell of, unless another worker that lives has started it. Takes 16 s at most per record.

    What we have started ourselves is over as well, for a worker has one engine.
    """
    for path in _records(folder):
        record = _read(path)
        if record is None or record.boot_id != guard.boot_id() or await _end(record):
            guard.remove(str(path), record.folder if record else "")


def _records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


async def end_recorded(path: Path) -> None:
    """Kills what is left of an engine whose guard has ended, in 2 s at most. A guard that ended in order left no record."""
    record = _read(path)
    if record is not None and await _kill(record, signal.SIGKILL):
        guard.remove(str(path), record.folder)


def _read(path: Path) -> Record | None:
    with contextlib.suppress(OSError):
        return parse_record(path.read_text("utf-8", errors="replace"))
    return None


async def _end(record: Record) -> bool:
    """Ends one engine; False if it is another living worker's, or would not end."""
    if record.owner != os.getpid() and lives(guard.read_processes(), record.owner, record.owner_start):
        return False
    await _until(lambda: not lives(guard.read_processes(), record.guard, record.guard_start), GUARD_ENDS_IN_S)
    return await _kill(record, signal.SIGTERM) or await _kill(record, signal.SIGKILL)


async def _kill(record: Record, number: signal.Signals) -> bool:
    """Sends a signal to what is left of an engine; whether nothing is left then."""
    left = _left(record)
    if left:
        log.warning("ending processes that an engine left behind: %s", left)
    for pid in left:
        guard.send(pid, number)
    return await _until(lambda: not _left(record), TERM_S)


def _left(record: Record) -> list[int]:
    processes = guard.read_processes()
    session = (p.pid for p in processes if p.session == record.engine and p.pid != os.getpid())
    return members(processes, record, {pid: guard.executable(pid) for pid in session})


async def _until(done: Any, within: float) -> bool:
    deadline = time.monotonic() + within
    while not done():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
