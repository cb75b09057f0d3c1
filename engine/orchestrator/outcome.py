"""From a claimed job to its committed outcome: what the child is asked, and what becomes of its answer.

The child proposes, this commits: a plan, a refusal, the result files, or shards that must run again. Every commit is fenced
by the job's row, so a proposal made under a lost lease changes nothing (invariant 4).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.lines import Limits
from engine.orchestrator.finish import FinishRequest, Written
from engine.orchestrator.plan import Planned, PlanRequest, PlanResult
from engine.orchestrator.results import ResultObject, StopCode
from engine.orchestrator.setback import NoModelYet, StoppedMeanwhile
from state import batches, losses, models, shards, workers
from state.batches import Result
from state.clock import Clock
from state.database import Database
from state.jobs import MOST_LOST, FinishInput, PlanInput
from state.records import Fault, JobLease, Model, StopReason
from state.settings import Settings
from state.wake import Waker

log = logging.getLogger(__name__)

#: What a batch says whose plan lost its process `MOST_LOST` times.
GIVEN_UP = Fault(
    "internal_error",
    f"The batch could not be validated: the process reading its input file ended unexpectedly {MOST_LOST} times.",
)
_STOP_CODES: dict[StopReason, StopCode] = {
    StopReason.CANCELLED: "batch_cancelled",
    StopReason.EXPIRED: "batch_expired",
}

Run = Callable[[Any], Awaitable[Any]]
"""How the child is asked: a request in, its answer out."""


class Outcomes:
    """Knows what to ask and what to commit; how the asking is done is the caller's."""

    def __init__(self, *, database: Database, clock: Clock, waker: Waker, settings: Settings) -> None:
        self._database, self._clock, self._waker, self._settings = database, clock, waker, settings

    async def reach(self, job: JobLease, details: PlanInput | FinishInput, run: Run) -> None:
        """Does one job to its end.

        Raises:
            LeaseLost: the job is somebody else's by now; nothing was changed.
            NoModelYet: there is no model to hold a plan against.
            StoppedMeanwhile: the batch was stopped while it was finished; it is to be finished again, as stopped.
            Unavailable, OutOfSpace, Corrupt, ChildDied, ChildFailed: the job could not be done now.
        """
        if isinstance(details, PlanInput):
            await self._plan(job, details, run)
        else:
            await self._finish(job, details, run)

    async def _plan(self, job: JobLease, details: PlanInput, run: Run) -> None:
        if job.attempts > MOST_LOST:
            log.error("gives up planning %s", job.batch_id, extra=_about(job))
            await batches.refused(self._database, job=job, faults=[GIVEN_UP], now=self._clock.wall())
            return
        known = await self._known_models()
        if not known:
            raise NoModelYet("no worker has registered a model yet")
        found: PlanResult = await run(plan_request(job, details, known, self._settings))
        if isinstance(found, Planned):
            await self._commit_plan(job, found)
        else:
            log.info("refused %s: %s", job.batch_id, found.faults[0].code, extra=_about(job))
            await batches.refused(self._database, job=job, faults=found.faults, now=self._clock.wall())

    async def _known_models(self) -> dict[str, Model]:
        known = await models.listed(self._database)
        any_name = await models.resolve(self._database, name=models.ANY)
        return {model.name: model for model in (*known, *((any_name,) if any_name else ()))}

    async def _commit_plan(self, job: JobLease, plan: Planned) -> None:
        committed = await batches.planned(
            self._database,
            job=job,
            model_root=plan.model_root,
            model=plan.requested_model,
            shards=plan.shards,
            index_key=plan.index_key,
            total=plan.total,
            now=self._clock.wall(),
        )
        if committed:
            log.info(
                "planned %s: %d requests in %d shards", job.batch_id, plan.total, len(plan.shards), extra=_about(job)
            )
            self._waker.notify("worker")
            await self._warn_of_waiting(job, plan.model_root)

    async def _warn_of_waiting(self, job: JobLease, root: str) -> None:
        """A model that was served once is known for ever, and its batch may wait for long: whoever runs this should know.

        Says nothing while a worker is not ready, because that one may be the one.
        """
        about = await workers.listed(self._database, now=self._clock.wall())
        if about and all(worker.state == "ready" and root not in worker.models for worker in about):
            log.warning("%s waits: no engine that runs serves %s", job.batch_id, root, extra=_about(job))

    async def _finish(self, job: JobLease, details: FinishInput, run: Run) -> None:
        written: Written = await run(finish_request(job, details, self._settings))
        if written.lost:
            where = ", ".join(f"{loss.shard}: {loss.seqs}" for loss in written.lost)
            log.error("the store lost segments of %s (%s)", job.batch_id, where, extra=_about(job))
            await losses.write_off(self._database, job=job, losses=written.lost)
        if written.holes:
            await self._send_back(job, written.holes)
            return
        batch = await batches.finished(
            self._database,
            job=job,
            output=_result(job, job.output_file_id, written.output, "output"),
            error=_result(job, job.error_file_id, written.error, "error"),
            output_ttl=self._settings.output_ttl,
            now=self._clock.wall(),
        )
        if batch is not None:
            log.info("%s is %s", batch.id, batch.status, extra=_about(job))

    async def _send_back(self, job: JobLease, holes: tuple[int, ...]) -> None:
        """Shards with lines without a result run again (invariant 1); the last to close makes the finish job again."""
        log.error("shards %s of %s run again", list(holes), job.batch_id, extra=_about(job))
        back = await shards.reopen(
            self._database, batch_id=job.batch_id, numbers=holes, job=job, now=self._clock.wall()
        )
        if not back:
            raise StoppedMeanwhile("the batch was stopped while it was being finished")
        self._waker.notify("worker")


def plan_request(job: JobLease, details: PlanInput, known: Mapping[str, Model], settings: Settings) -> PlanRequest:
    """What the child is asked for a plan."""
    batch, file = details.batch, details.file
    return PlanRequest(
        batch_id=batch.id,
        epoch=job.epoch,
        endpoint=batch.endpoint,
        file_id=batch.input_file_id,
        object_key=file.object_key if file else None,
        size=file.bytes if file else None,
        sha256=file.sha256 if file else None,
        models=known,
        workers=details.workers,
        limits=Limits.of(settings),
        min_free_bytes=settings.min_free_bytes,
    )


def finish_request(job: JobLease, details: FinishInput, settings: Settings) -> FinishRequest:
    """What the child is asked for a finish."""
    reason = details.batch.stop_reason
    return FinishRequest(
        batch_id=job.batch_id,
        epoch=job.epoch,
        total=details.total,
        index_key=details.index_key,
        segments=details.segments,
        spool_limit=settings.finish_spool_bytes,
        stop_code=None if reason is None else _STOP_CODES[reason],
        min_free_bytes=settings.min_free_bytes,
    )


def _about(job: JobLease) -> dict[str, str]:
    return {"batch_id": job.batch_id, "job_id": job.id}


def _result(job: JobLease, file_id: str | None, written: ResultObject | None, kind: str) -> Result | None:
    if written is None:
        return None
    assert file_id is not None  # chosen when the finish job was made (ledger rule 4)
    filename = f"{job.batch_id}_{kind}.jsonl"
    return Result(file_id, written.object_key, written.size, written.sha256, filename)
