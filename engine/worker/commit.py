"""Commits what a shard has finished: the segment object first, then the row that names it.

One shard's commits come one after another; different shards' run side by side. A commit that the database or the store
cannot take now is tried again, the same bytes under the same key with the same number, for as long as the lease may be
relied on (ledger rules 4 and 6). If the lease is gone, nothing of it is committed (invariant 4).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from engine.worker.segments import Collected, Limits
from engine.worker.shard import OpenShard, Phase
from state import shards
from state.clock import Clock
from state.database import Database
from state.objects import ObjectStore
from state.records import LeaseLost, Segment, Unavailable
from state.wake import Waker

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Seconds between attempts at a commit that cannot be made: the first pause and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0

#: Seconds between looks at whether the lease may be relied on again.
TRUST_POLL_S = 0.1


class Ledgered(Protocol):
    """Who wants to know how commits end."""

    def committed(self, shard: OpenShard, size: int) -> None:
        """So many bytes of results have left memory, committed or given up."""
        ...

    def ended(self, shard: OpenShard) -> None:
        """The shard is closed in the ledger."""
        ...

    def lost(self, shard: OpenShard) -> None:
        """The shard belongs to somebody else by now."""
        ...


class Committer:
    """Starts commits when they are due."""

    def __init__(
        self, *, database: Database, store: ObjectStore, waker: Waker, clock: Clock, limits: Limits, told: Ledgered
    ) -> None:
        self._database, self._store, self._waker, self._clock = database, store, waker, clock
        self._limits, self._told = limits, told
        self.trouble: str | None = None
        """Why commits cannot be made at present, if they cannot."""

    def consider(self, shard: OpenShard, *, now: float, force: bool = False) -> None:
        """Starts a commit if one is due, or if `force` and there is anything to commit."""
        if shard.committing is not None or shard.phase is Phase.GONE:
            return
        if shard.closable or shard.collected.due(self._limits, now=now) or (force and shard.collected.rows):
            shard.committing = asyncio.create_task(self._commit(shard), name=f"commit {shard.key}")

    async def flush(self, shard: OpenShard) -> None:
        """Commits whatever the shard has finished; returns when it is committed, or the shard is gone."""
        while shard.phase is not Phase.GONE and (shard.committing is not None or shard.collected.rows):
            self.consider(shard, now=self._clock.monotonic(), force=True)
            if shard.committing is not None:
                await asyncio.wait([shard.committing])

    async def note_suspect(self, shard: OpenShard, place: int) -> None:
        """Notes in the ledger which request is about to be tried alone.

        What was finished before is committed first: a commit wipes the note.

        Raises:
            LeaseLost: the shard is somebody else's by now, and the worker has been told.
        """
        await self.flush(shard)
        try:
            await self._insist(
                shard, lambda: shards.suspect(self._database, lease=shard.lease, place=shard.mark(place))
            )
        except LeaseLost:
            self._told.lost(shard)
            raise

    async def _commit(self, shard: OpenShard) -> None:
        try:
            await self._commit_all(shard)
        except LeaseLost:
            self._told.lost(shard)
        except Exception:
            # The lease is dropped and runs out: another claim starts from what is committed.
            log.exception("a commit failed", extra={"batch": shard.lease.batch_id, "shard": shard.lease.number})
            self._told.lost(shard)
        finally:
            shard.committing = None

    async def _commit_all(self, shard: OpenShard) -> None:
        """Commits until nothing is due; what has come in meanwhile goes into the next segment."""
        while True:
            shard.closing = shard.closable
            collected = shard.collect()
            try:
                await self._write(shard, collected, close=shard.closing)
            finally:
                self._told.committed(shard, collected.size)
            if shard.closing:
                # Ledger rule 2: whoever closes the last shard has made the finish job in the same transaction.
                self._waker.notify("orchestrator")
                self._told.ended(shard)
                return
            if not shard.closable and not shard.collected.due(self._limits, now=self._clock.monotonic()):
                return

    async def _write(self, shard: OpenShard, collected: Collected, *, close: bool) -> None:
        if not collected.rows:
            if close:
                await self._insist(
                    shard, lambda: shards.close(self._database, lease=shard.lease, now=self._clock.wall())
                )
            return
        lease = shard.lease
        sealed = collected.seal(lease.requests)
        # Invariant 4: the key names the epoch and the number, so no other commit ever writes it.
        key = f"batches/{lease.batch_id}/s{lease.number}/e{lease.epoch}/seg-{lease.next_seq}"
        stored = await self._insist(shard, lambda: self._store.put(key, sealed.data))
        segment = Segment(
            batch_id=lease.batch_id,
            shard_number=lease.number,
            seq=lease.next_seq,
            epoch=lease.epoch,
            object_key=key,
            sha256=stored.sha256,
            size=stored.size,
            lines=sealed.lines,
            places=sealed.places,
        )
        shard.lease = await self._insist(
            shard,
            lambda: shards.append(
                self._database, lease=lease, segment=segment, tally=sealed.tally, close=close, now=self._clock.wall()
            ),
        )

    async def _insist(self, shard: OpenShard, step: Callable[[], Awaitable[T]]) -> T:
        """Does one step of a commit, again and again while database or store are away (invariant 13)."""
        pause = FIRST_PAUSE_S
        while True:
            await self._until_trusted(shard)
            try:
                result = await step()
            except Unavailable as error:
                if self.trouble is None:
                    log.warning("results cannot be committed, trying again: %s", error)
                self.trouble = str(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE_S)
            else:
                self.trouble = None
                return result

    async def _until_trusted(self, shard: OpenShard) -> None:
        """Waits until the lease may be relied on.

        Raises:
            LeaseLost: it is gone.
        """
        while shard.phase is not Phase.GONE:
            if shard.disowned or shard.trusted(self._clock.monotonic()):
                return
            await asyncio.sleep(TRUST_POLL_S)
        raise LeaseLost(f"shard {shard.lease.number} of {shard.lease.batch_id} is not ours any more")
