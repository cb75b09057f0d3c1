"""The job loop: claims plans and finishes, has a child process do them, commits what it proposes.

The parent holds the job's lease, renews it while the child works, and commits under it; when the lease is lost the child's
work is dropped, and its objects are garbage by their epoch (invariant 4). A job is never lost: whatever goes wrong it is
put back, later each time, and only a plan that lost its process three times fails its batch.

Small jobs run one after another in the warm child; a large one runs beside them in a process of its own, so that a batch
of three requests never waits behind one of fifty thousand. A second large job is put back until the first is done.
"""

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

from engine.orchestrator.children import Children
from engine.orchestrator.loop import pause
from engine.orchestrator.outcome import Outcomes
from engine.orchestrator.setback import LaneBusy, setback
from state import jobs
from state.clock import Clock
from state.database import Database
from state.jobs import FinishInput, PlanInput
from state.records import JobLease, LeaseLost, Unavailable
from state.settings import Settings

log = logging.getLogger(__name__)

#: A job that reads more than this many bytes is a large one.
LARGE_BYTES = 8 * 1024 * 1024
#: A child that is slower than this, in bytes a second over a minute's allowance, hangs and is killed.
_SLOWEST, _ALLOWANCE_S = 256 * 1024, 120.0
#: How long giving jobs back may take when the role stops, in seconds.
_GOODBYE_S = 2.0


class Jobs:
    """Claims and does jobs; `step` is called by a loop, `close` once at the end."""

    def __init__(
        self,
        *,
        database: Database,
        children: Children,
        outcomes: Outcomes,
        clock: Clock,
        holder: str,
        settings: Settings,
    ) -> None:
        self._database, self._children, self._outcomes = database, children, outcomes
        self._clock, self._holder, self._settings = clock, holder, settings
        self._large: asyncio.Task[None] | None = None
        self._failures: dict[str, int] = {}

    async def step(self) -> bool:
        """Claims one job and does it, or sees a large one on its way; False when there is none."""
        job = await jobs.claim(
            self._database,
            holder=self._holder,
            now=self._clock.wall(),
            ttl=self._settings.lease_ttl,
            grace=self._settings.lease_grace,
        )
        if job is None:
            return False
        await self._guarded(job, self._dispatch(job))
        return True

    async def close(self) -> None:
        """Gives a large job back."""
        if self._large is not None:
            self._large.cancel()
            await asyncio.gather(self._large, return_exceptions=True)

    async def _dispatch(self, job: JobLease) -> None:
        details = await jobs.details(self._database, job=job)
        size = job_bytes(details)
        if size <= LARGE_BYTES:
            await self._while_held(job, self._outcomes.reach(job, details, self._children.run_small), size)
        elif self._large is not None and not self._large.done():
            raise LaneBusy("another large job is running")
        else:
            work = self._while_held(job, self._outcomes.reach(job, details, self._children.run_large), size)
            self._large = asyncio.create_task(self._guarded(job, work))

    async def _guarded(self, job: JobLease, work: Coroutine[Any, Any, None]) -> None:
        """Does the work; whatever goes wrong, the job is put back."""
        try:
            await work
        except LeaseLost as error:
            log.info("dropped a %s that is no longer ours: %s", job.kind, error, extra=_about(job))
        except asyncio.CancelledError:
            await self._goodbye(job)
            raise
        except Exception as error:
            await self._put_back(job, error)
            return
        self._failures.pop(job.id, None)

    async def _while_held(self, job: JobLease, work: Coroutine[Any, Any, None], size: int) -> None:
        """Awaits the work and renews the lease meanwhile.

        Raises:
            LeaseLost: the job is somebody else's, or was closed because its batch was stopped; the work is cancelled.
            TimeoutError: the child hangs.
        """
        task = asyncio.create_task(work)
        try:
            async with asyncio.timeout(_ALLOWANCE_S + size / _SLOWEST):
                while not (await asyncio.wait({task}, timeout=self._settings.lease_heartbeat))[0]:
                    await self._renew(job)
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _renew(self, job: JobLease) -> None:
        try:
            held = await jobs.renew(self._database, job=job, now=self._clock.wall(), ttl=self._settings.lease_ttl)
        except Unavailable as error:
            log.warning("cannot renew the lease of a %s: %s", job.kind, error, extra=_about(job))
            return  # the fence of the commit decides (ledger rule 6)
        if not held:
            raise LeaseLost(f"{job.id} has another owner or is closed")

    async def _put_back(self, job: JobLease, error: Exception) -> None:
        failures = self._failures[job.id] = self._failures.get(job.id, 0) + 1
        what = setback(error, failures=failures)
        log.log(what.level, "a %s is put back for %.1f s: %s", job.kind, what.delay, what.reason, extra=_about(job))
        for tries in itertools.count(1):
            try:
                await jobs.release(
                    self._database,
                    job=job,
                    now=self._clock.wall(),
                    delay=what.delay,
                    error=what.reason,
                    lost=what.lost,
                )
            except LeaseLost:
                return
            except Unavailable:  # without the database there is nothing else to do, so wait for it here
                await asyncio.sleep(pause(tries))
            else:
                return

    async def _goodbye(self, job: JobLease) -> None:
        """The role stops: the next orchestrator need not wait for the lease to run out."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await jobs.release(self._database, job=job, now=self._clock.wall(), delay=0.0, error=None)
        except (LeaseLost, Unavailable, TimeoutError) as error:
            log.warning("could not give a %s back: %s", job.kind, error, extra=_about(job))


def job_bytes(details: PlanInput | FinishInput) -> int:
    """How much a job reads: the input file, or the segments."""
    if isinstance(details, FinishInput):
        return sum(segment.size for segment in details.segments)
    return 0 if details.file is None else details.file.bytes


def _about(job: JobLease) -> dict[str, str]:
    return {"batch_id": job.batch_id, "job_id": job.id}
