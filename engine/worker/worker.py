"""The worker: takes shards on, keeps the engine fed with their requests, and closes each shard or gives it back.

All of it runs on one loop; only the heartbeat has a thread of its own. What is done in the background is in `role`.
"""

import logging
import random
from collections.abc import Mapping
from dataclasses import replace

from engine.backends.protocol import Backend
from engine.worker.claims import Claimer, choose_claim, count_at_hand
from engine.worker.commit import Committer
from engine.worker.desk import Desk
from engine.worker.feed import Feed, Throttle
from engine.worker.leases import Key, Leases
from engine.worker.pulse import Lane
from engine.worker.segments import Limits
from engine.worker.shard import OpenShard, Phase
from engine.worker.triage import Triage
from state.clock import Clock
from state.database import Database
from state.objects import ObjectStore
from state.records import ShardLease
from state.settings import Settings
from state.shards import Renewal
from state.wake import Waker

log = logging.getLogger(__name__)

#: Seconds after which a shard is given back that makes no progress here: never begun, or its engine fails.
IDLE_S = 30.0

#: Seconds for which its batch is then left to other workers.
SHUN_S = 5.0

#: How many times the limit of what is in flight is kept at hand.
AHEAD = 3

#: A lane that no request has: only a failure of the whole engine stops it.
NO_LANE = Lane("", "")

#: Feeding pauses while so many segments' worth of results wait to be committed.
UNCOMMITTED_SEGMENTS = 4


class Worker:
    """What one engine's worker holds, and the steps it is made of. Told by `Committer` how commits end."""

    def __init__(
        self,
        *,
        settings: Settings,
        worker_id: str,
        database: Database,
        store: ObjectStore,
        backend: Backend,
        waker: Waker,
        clock: Clock,
        throttle: Throttle,
    ) -> None:
        self._clock, self._throttle = clock, throttle
        self.leases = Leases(ttl=settings.lease_ttl)
        self.claimer = Claimer(
            database=database,
            store=store,
            clock=clock,
            leases=self.leases,
            worker_id=worker_id,
            ttl=settings.lease_ttl,
            grace=settings.lease_grace,
        )
        self.triage = Triage(
            backend=backend, monotonic=clock.monotonic, random=random.random, max_attempts=settings.max_attempts
        )
        self.committer = Committer(
            database=database,
            store=store,
            waker=waker,
            clock=clock,
            limits=Limits(settings.segment_lines, settings.segment_bytes, settings.segment_interval),
            told=self,
        )
        self.desk = Desk(
            backend=backend,
            managed=settings.engine_kind != "remote",
            triage=self.triage,
            committer=self.committer,
            clock=clock,
            most_uncommitted=UNCOMMITTED_SEGMENTS * settings.segment_bytes,
        )
        self.feed = Feed(desk=self.desk, throttle=throttle, most_bytes=settings.max_in_flight_bytes)
        self.shards = self.desk.scheduler.shards
        self.models: tuple[str, ...] = ()
        """The roots of the models the engine serves: whose shards are claimed."""
        self.draining = False
        self.hungry = False
        """The last look found more to claim than was taken."""
        self._shunned: dict[str, float] = {}

    # ---- taking shards on --------------------------------------------------------------------------------------------
    async def claim_what_is_due(self) -> None:
        """Claims and opens shards until enough is at hand, or nothing is left.

        Raises:
            Unavailable: the database or the store does not answer.
        """
        self.hungry = False
        if not self._may_claim():
            return
        now = self._clock.monotonic()
        self._shunned = {batch: until for batch, until in self._shunned.items() if until > now}
        found = await self.claimer.candidates(self.models)
        candidates = {c.batch_id: c for c in found if c.batch_id not in self._shunned}
        self.desk.scheduler.unclaimed = {b: c.ready_shards * self._usual_requests() for b, c in candidates.items()}
        while self._may_claim():
            at_hand = count_at_hand(list(self.shards.values()))
            choice = choose_claim(list(candidates.values()), at_hand, enough=self.enough)
            if choice is None:
                break
            lease = await self.claimer.claim(choice.batch_id, self.models)
            left = choice.ready_shards - 1 if lease else 0
            candidates[choice.batch_id] = replace(choice, ready_shards=left)
            if not left:
                del candidates[choice.batch_id]
            if lease is not None:
                await self._open(lease)
        self.hungry = bool(candidates)

    @property
    def enough(self) -> int:
        """Requests to have at hand: a few times what may be in flight, or what half a second takes."""
        return max(AHEAD * self._throttle.limit, int(self.desk.scheduler.rate / 2))

    @property
    def wants_more(self) -> bool:
        """Whether it is time to look for shards without having been told of any."""
        return self.hungry and self._may_claim() and self._waiting() < self.enough

    async def _open(self, lease: ShardLease) -> None:
        shard = await self.claimer.open(lease, careful=self._throttle.limit)
        if shard is None:
            return
        if self.draining:
            await self.claimer.give_back(lease)
            return
        self.desk.take_on(shard)
        self.committer.consider(shard, now=self._clock.monotonic())  # everything may be committed already
        self.feed.pump()

    def _may_claim(self) -> bool:
        """One shard is claimed even from a failing engine's worker: there must be something to try it with."""
        return self.desk.open and not self.draining and bool(self.models) and not (self.engine_fails and self.shards)

    @property
    def engine_fails(self) -> bool:
        """Whether the whole engine takes no requests at present, and not one lane of it only."""
        return not self.triage.breaker.closed(NO_LANE)

    def _waiting(self) -> int:
        return sum(shard.sendable for shard in self.shards.values())

    def _usual_requests(self) -> int:
        return max((shard.lease.requests for shard in self.shards.values()), default=100)

    # ---- the engine's life -------------------------------------------------------------------------------------------
    def engine_up(self) -> None:
        """The engine answers: feeding begins."""
        self.triage.breaker.reset()
        self.desk.open = True
        self.feed.pump()

    def engine_died(self) -> None:
        """Everything that was at the engine is put back, and uses no attempt."""
        flights = list(self.feed.flights)
        self.desk.engine_died(flights)
        self.feed.recall(flights)

    # ---- tending them ------------------------------------------------------------------------------------------------
    async def tend(self) -> None:
        """One look at the open shards: commits that are due by time, requests that come again, shards to give back."""
        now = self._clock.monotonic()
        self.desk.tick()
        for shard in list(self.shards.values()):
            self.committer.consider(shard, now=now)
            if self._is_moving(shard):
                shard.moved = now
            elif now - shard.moved >= IDLE_S:
                await self._give_up(shard, now)
        self.feed.pump()

    def _is_moving(self, shard: OpenShard) -> bool:
        """Whether it makes sense to keep the shard. One that was begun rests here: retries remember their attempts."""
        if shard.committing is not None or shard.phase is not Phase.OPEN:
            return True
        return shard.started and self.desk.open and self.triage.breaker.closed(shard.lane)

    async def _give_up(self, shard: OpenShard, now: float) -> None:
        """Nothing of the shard can be sent here: another worker may do better (invariant 9)."""
        if shard.flying or shard.collected.rows:
            self.committer.consider(shard, now=now, force=True)
            return
        self._shunned[shard.lease.batch_id] = now + SHUN_S
        await self.give_back(shard)

    async def give_back(self, shard: OpenShard) -> None:
        """Lets others have the shard. What it has finished must be committed before."""
        self._forget(shard)
        await self.claimer.give_back(shard.lease)

    # ---- what the ledger says ----------------------------------------------------------------------------------------
    def heard(self, asked: Mapping[Key, int], renewal: Renewal) -> None:
        """A renewal has answered: what is lost is dropped, what is stopped is aborted."""
        for key in renewal.lost:
            shard = self.shards.get(key)
            if shard is None:
                self.leases.drop(key, asked[key])
            elif shard.lease.epoch == asked[key]:
                if shard.closing:
                    shard.disowned = True  # perhaps closed by ourselves a moment ago: the commit under way will know
                else:
                    self.lost(shard)
        for key in renewal.stopped:
            shard = self.shards.get(key)
            if shard is not None and shard.phase is Phase.OPEN:
                self._stop(shard)
        self.feed.pump()  # leases may be trusted again

    def committed(self, shard: OpenShard, size: int) -> None:
        self.desk.uncommitted -= size
        self.feed.pump()

    def ended(self, shard: OpenShard) -> None:
        self._forget(shard)

    def lost(self, shard: OpenShard) -> None:
        if shard.phase is not Phase.GONE:
            log.warning("a shard was lost", extra={"batch": shard.lease.batch_id, "shard": shard.lease.number})
            self._forget(shard)
            self.desk.uncommitted -= shard.collect().size  # invariant 4: it is not ours to commit any more
            self.feed.recall_shard(shard)

    def _stop(self, shard: OpenShard) -> None:
        """Its batch is cancelled or expired (invariant 7): aborts what is out, commits what is finished, closes."""
        shard.phase = Phase.STOPPED
        self.feed.recall_shard(shard)
        self.committer.consider(shard, now=self._clock.monotonic())

    def _forget(self, shard: OpenShard) -> None:
        shard.phase = Phase.GONE
        self.desk.scheduler.remove(shard)
        self.leases.drop(shard.key, shard.lease.epoch)
