"""The janitor: removes what nobody needs any more.

What is garbage is decided by rows, never by age alone (ledger rule 5), and rows change first: when a row is gone the bytes
are garbage, so a crash in between leaves bytes to find again, never a row that promises bytes (invariant 11). Work comes
in small pieces, so that a hundred thousand deletions delay no commit (ledger rule 7).

What goes for good goes by a clock that no jump can hurry: wall time, but no further on than this process has lived since it
began (invariant 8). So a file may stay too long after the clock was set, and never goes too early.

Of a batch's objects the segments go an hour after its end; the plan's objects stay as long as a result file does, because
running its failed lines again needs them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import cycle

from engine.orchestrator.child import clear_abandoned
from state import batches, files, losses
from state.clock import Clock
from state.database import Database
from state.losses import Named
from state.objects import ObjectStore
from state.settings import Settings

log = logging.getLogger(__name__)

#: Rows in one transaction; objects in one call to the store.
_ROWS, _OBJECTS = 100, 500
#: Seconds after its end during which a batch's work stays, and after which an upload that did not end is given up.
WORK_AGE_S, UPLOAD_AGE_S = 3600.0, 86_400


class Janitor:
    """`step` does one chore's next piece and is called by a loop; `round` does everything there is to do."""

    def __init__(self, *, database: Database, store: ObjectStore, clock: Clock, settings: Settings) -> None:
        self._database, self._store, self._clock, self._settings = database, store, clock, settings
        self._ahead = clock.wall() - clock.monotonic()
        self.chores: tuple[Callable[[], Awaitable[bool]], ...] = (
            self.expire_files,
            self.discard_uploads,
            self.remove_files,
            self.remove_work,
            self.clear_spool,
        )
        self._turns = cycle(range(len(self.chores)))
        self._busy = False

    async def step(self) -> bool:
        """One piece of the next chore, so that one that fails does not keep the others from their turn.

        False at the end of a round in which no chore had more to do than a piece.
        """
        turn = next(self._turns)
        if turn == 0:
            self._busy = False
        self._busy = await self.chores[turn]() or self._busy
        return self._busy or turn < len(self.chores) - 1

    async def round(self) -> None:
        """Every chore until it has nothing left to do."""
        for chore in self.chores:
            while await chore():
                pass

    async def expire_files(self) -> bool:
        """Files whose time has come become invisible. Like each chore: True when there may be more."""
        return await files.expire(self._database, now=self._now(), limit=_ROWS) == _ROWS

    async def discard_uploads(self) -> bool:
        """Uploads that began a day ago and never ended are given up."""
        before = int(self._now()) - UPLOAD_AGE_S
        stale = await files.stale_pending(self._database, created_before=before, limit=_ROWS)
        for file_id in stale:
            await files.discard(self._database, file_id=file_id)
        return len(stale) == _ROWS

    async def remove_files(self) -> bool:
        """The bytes of deleted files go, with the last result of a batch its plan, and then the files' rows."""
        gone = await files.garbage(self._database, limit=_ROWS)
        if not gone:
            return False
        keys = frozenset(key for _, key in gone)
        await self._store.delete(keys)
        for batch_id in sorted({key.split("/")[1] for key in keys if key.startswith("results/")}):
            await self._remove_plan(batch_id, gone=keys)
        await files.forget(self._database, file_ids=[file_id for file_id, _ in gone])
        return len(gone) == _ROWS

    async def remove_work(self) -> bool:
        """What batches that ended an hour ago left: segments, and objects of attempts that were never committed."""
        ended = await batches.garbage(self._database, now=self._now(), age=WORK_AGE_S, limit=_ROWS)
        for batch_id in ended:
            named = await losses.named(self._database, batch_id=batch_id)
            await self._delete(batch_id, named)
            await batches.cleaned(self._database, batch_id=batch_id)
        return len(ended) == _ROWS

    async def clear_spool(self) -> bool:
        """Temporary files of processes that died."""
        for folder in await asyncio.to_thread(clear_abandoned, self._settings.spool_folder):
            log.info("removed %s, left by a process that died", folder.name)
        return False

    def _now(self) -> float:
        return min(self._clock.wall(), self._clock.monotonic() + self._ahead)

    async def _remove_plan(self, batch_id: str, *, gone: frozenset[str]) -> None:
        """The plan's objects, if none of the batch's results is left and its other work was removed before."""
        named = await losses.named(self._database, batch_id=batch_id)
        if named.cleaned and named.results <= gone:
            await self._delete(batch_id, replace(named, results=frozenset()))

    async def _delete(self, batch_id: str, named: Named) -> None:
        """All objects of an ended batch but those that are named, or are part of a plan that may be needed again."""
        plan = named.index_key.rpartition("/")[0] + "/" if named.index_key and named.results else None
        waiting: list[str] = []
        async for key in self._objects(batch_id):
            if key in named.results or (plan is not None and key.startswith(plan)):
                continue
            waiting.append(key)
            if len(waiting) == _OBJECTS:
                await self._store.delete(waiting)
                waiting = []
        await self._store.delete(waiting)

    async def _objects(self, batch_id: str) -> AsyncIterator[str]:
        for prefix in (f"batches/{batch_id}/", f"results/{batch_id}/"):
            async for key in self._store.list(prefix):
                yield key
