"""Which shards a worker takes on, and opening them.

A worker keeps a few times as many requests at hand as it may have in flight, so that a shard's object is always there
before it is needed; and it opens shards of further batches beyond that, so that a small batch never waits for a large one
to be through (the turns between them are the scheduler's).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.packs import Pack
from engine.worker.leases import Leases
from engine.worker.poison import care
from engine.worker.segments import marked
from engine.worker.shard import OpenShard
from state import shards
from state.clock import Clock
from state.database import Database
from state.objects import ObjectStore
from state.records import Corrupt, LeaseLost, NotFound, Segment, ShardLease, Unavailable
from state.shards import Candidate

log = logging.getLogger(__name__)

#: Most shards and most bytes of requests a worker holds open; for a project that has nothing open, twice as many.
MOST_SHARDS = 128
MOST_BYTES = 128 * 1024 * 1024

#: So many batches are open beside one another even if there are requests enough to keep the engine busy.
BREADTH = 64

#: Seconds a shard is left alone whose object cannot be read.
UNREADABLE_PAUSE_S = 30.0

#: Seconds a shard is left alone that could not be opened because the store does not answer.
STORE_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class AtHand:
    """What a worker holds open, as the choice of the next claim sees it. Numbers of requests are those not yet sent."""

    shards: int
    bytes: int
    by_batch: Mapping[str, int]
    by_project: Mapping[str, int]

    @property
    def requests(self) -> int:
        """All that wait here to be sent."""
        return sum(self.by_batch.values())


def choose_claim(candidates: Sequence[Candidate], at_hand: AtHand, *, enough: int) -> Candidate | None:
    """The batch to claim a shard of, None if what is at hand suffices.

    Projects with the least at hand go first, then the earliest deadline, then the oldest batch. Below `enough` requests
    anything is welcome; above, only a batch that has nothing here to send, and that of a project without any always.
    """
    best = min(candidates, key=lambda c: _rank(c, at_hand), default=None)
    if best is None:
        return None
    lonely = not at_hand.by_project.get(best.project_id)
    room = 2 if lonely else 1
    if at_hand.shards >= room * MOST_SHARDS or at_hand.bytes >= room * MOST_BYTES:
        return None
    fresh = not at_hand.by_batch.get(best.batch_id)
    hungry = at_hand.requests < enough
    return best if hungry or lonely or (fresh and len(at_hand.by_batch) < BREADTH) else None


def _rank(candidate: Candidate, at_hand: AtHand) -> tuple[bool, bool, int, int, float, float]:
    """What claims are ordered by; of equals the first goes first, which is the oldest."""
    project = at_hand.by_project.get(candidate.project_id, 0)
    batch = at_hand.by_batch.get(candidate.batch_id, 0)
    return project > 0, batch > 0, project, batch, candidate.deadline, candidate.created_at


def count_at_hand(open_shards: Sequence[OpenShard]) -> AtHand:
    """What these shards come to."""
    by_batch: dict[str, int] = {}
    by_project: dict[str, int] = {}
    for shard in open_shards:
        waiting = shard.sendable
        if waiting:
            by_batch[shard.lease.batch_id] = by_batch.get(shard.lease.batch_id, 0) + waiting
            by_project[shard.lease.project_id] = by_project.get(shard.lease.project_id, 0) + waiting
    return AtHand(len(open_shards), sum(s.size for s in open_shards), by_batch, by_project)


class Claimer:
    """Claims shards in the ledger and opens them."""

    def __init__(
        self,
        *,
        database: Database,
        store: ObjectStore,
        clock: Clock,
        leases: Leases,
        worker_id: str,
        ttl: float,
        grace: float,
    ) -> None:
        self._database, self._store, self._clock, self._leases = database, store, clock, leases
        self._worker_id, self._ttl, self._grace = worker_id, ttl, grace

    async def candidates(self, models: Sequence[str]) -> list[Candidate]:
        """The batches that have shards to be claimed for these models."""
        return await shards.candidates(self._database, models=models, now=self._clock.wall(), grace=self._grace)

    async def claim(self, batch_id: str, models: Sequence[str]) -> ShardLease | None:
        """Takes a shard of this batch, unless others were faster."""
        started = self._clock.monotonic()
        lease = await shards.claim(
            self._database,
            worker_id=self._worker_id,
            models=models,
            now=self._clock.wall(),
            ttl=self._ttl,
            grace=self._grace,
            batch_id=batch_id,
        )
        if lease is not None:
            self._leases.hold((lease.batch_id, lease.number), lease.epoch, started=started)
        return lease

    async def open(self, lease: ShardLease, *, careful: int) -> OpenShard | None:
        """Reads what is committed and the requests; None if the shard cannot be run now and was given back.

        Where earlier owners died in vain, the next `careful` requests are to be tried one at a time: those are the ones
        that can have been at the engine then.

        The segments are read in a transaction of their own after the claim's commit (ledger rule 1), so none that an
        older epoch committed is missed, and invariant 3 holds: what is committed is not run again.
        """
        try:
            segments = await shards.segments(self._database, batch_id=lease.batch_id, number=lease.number)
            pack = _pack_of(lease, await self._store.get(lease.object_key))
            return self._opened(lease, pack, segments, careful)
        except (Corrupt, NotFound) as error:
            log.exception("a shard cannot be read", extra={"batch": lease.batch_id, "shard": lease.number})
            await self.give_back(lease, pause=UNREADABLE_PAUSE_S, error=str(error))
            return None
        except Unavailable as error:
            await self.give_back(lease, pause=STORE_PAUSE_S, error=str(error))
            raise
        except (
            Exception
        ) as error:  # whatever it is: a lease that nobody runs must not be renewed for ever (invariant 9)
            await self.give_back(lease, pause=UNREADABLE_PAUSE_S, error=repr(error))
            raise

    def _opened(self, lease: ShardLease, pack: Pack, segments: Sequence[Segment], careful: int) -> OpenShard | None:
        holding = self._leases.holding((lease.batch_id, lease.number))
        if holding is None:
            return None  # a renewal has heard meanwhile that it is lost
        done = {place for segment in segments for place in marked(segment.places)}
        how = care(claims_in_vain=lease.claims_since_progress - 1, mark=lease.suspect, done=done)
        return OpenShard(
            lease=lease,
            pack=pack,
            done=done,
            holding=holding,
            care=how,
            careful=careful if how.careful else 0,
            now=self._clock.monotonic(),
        )

    async def give_back(self, lease: ShardLease, *, pause: float = 0.0, error: str | None = None) -> None:
        """Lets another worker have the shard, at once or after `pause` seconds.

        If the ledger does not take it, the lease runs out by itself.
        """
        self._leases.drop((lease.batch_id, lease.number), lease.epoch)
        now = self._clock.wall()
        try:
            await shards.release(
                self._database, lease=lease, now=now, not_before=now + pause if pause else 0.0, error=error
            )
        except (LeaseLost, Unavailable) as problem:
            log.info("a lease was not given back: %s", problem, extra={"batch": lease.batch_id, "shard": lease.number})


def _pack_of(lease: ShardLease, data: bytes) -> Pack:
    pack = Pack(data)
    if len(pack) != lease.requests:
        raise Corrupt(f"a shard of {lease.requests} requests holds {len(pack)}")
    return pack
