"""The sweeper: advances the ledger's clock, expires batches whose window is over, closes what stopped batches left open.

It decides no result. Cancel and expire only compare-and-set the batch (ledger rule 3); here the shards follow, one short
transaction each, so that a stopped batch ends in time whatever its workers do (invariant 7). Any number of sweepers may
run: every move is a compare-and-set.
"""

import logging

from state import batches, ledger_clock
from state.clock import Clock
from state.database import Database
from state.ledger_clock import Reading
from state.settings import Settings
from state.wake import Waker

log = logging.getLogger(__name__)

#: Batches looked at in one step; the next step goes on with the next.
_AT_ONCE = 100


class Sweep:
    """The step is called every second and when something was cancelled."""

    def __init__(self, *, database: Database, clock: Clock, waker: Waker, settings: Settings) -> None:
        self._database, self._clock, self._waker, self._settings = database, clock, waker, settings
        self._reading: Reading | None = None

    async def step(self) -> bool:
        """One round; True when there may be more to do at once."""
        self._reading = await ledger_clock.tick(self._database, clock=self._clock, last=self._reading)
        due = await batches.due(self._database, ledger_now=self._reading.ledger_now, limit=_AT_ONCE)
        for batch_id in due:
            if await batches.expire(self._database, batch_id=batch_id, now=self._clock.wall()):
                log.info("the window of %s is over", batch_id, extra={"batch_id": batch_id})
        moved = await self._close_stopped()
        if due or moved:
            self._waker.notify("worker")
            self._waker.notify("orchestrator")
        return len(due) == _AT_ONCE or moved

    async def _close_stopped(self) -> bool:
        moved = False
        for batch_id in await batches.stopped(self._database, limit=_AT_ONCE):
            changed = await batches.close_stopped(
                self._database, batch_id=batch_id, now=self._clock.wall(), stop_grace=self._settings.stop_grace
            )
            moved = moved or changed
        return moved
