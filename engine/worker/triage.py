"""One engine's failures, sorted: the evidence, the judgement and the breaker, behind three calls.

For a worker that feeds an engine::

    wait = triage.admit(lane, history, others_wait=...)   # 0.0: send now
    sent_at = triage.now()
    verdict = triage.verdict(result, lane=lane, history=history, sent_at=sent_at)

and `triage.abandoned(lane, sent_at=sent_at)` for a call that was cancelled.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.backends.protocol import Backend, EngineError, Reply
from engine.packs import OUTPUT
from engine.worker.breaker import Breaker
from engine.worker.canary import sing
from engine.worker.outcome import Case, Done, EngineFailure, History, RetryRequest, Verdict, judge
from engine.worker.pulse import Lane, Pulse

log = logging.getLogger(__name__)


class Triage:
    """Decides on every call to one engine, and sends the canary when in doubt."""

    def __init__(
        self,
        *,
        backend: Backend,
        monotonic: Callable[[], float],
        random: Callable[[], float],
        max_attempts: int,
    ) -> None:
        self.breaker = Breaker(monotonic=monotonic)
        self._pulse = Pulse(monotonic=monotonic)
        self._backend, self._max_attempts = backend, max_attempts
        self._random, self.now = random, monotonic
        self._canaries: dict[Lane, asyncio.Task[None]] = {}

    def admit(self, lane: Lane, history: History, *, others_wait: bool = False) -> float:
        """Whether a request may be sent now: 0.0 yes, else the seconds after which to ask again (see `Breaker.admit`)."""
        return self.breaker.admit(lane, unlucky=history.refusals > 0, others_wait=others_wait)

    def verdict(self, result: Reply | EngineError, *, lane: Lane, history: History, sent_at: float) -> Verdict:
        """What becomes of a request; moves the breaker accordingly. `sent_at` is `now()` of its sending."""
        verdict = judge(Case(result, history, self._pulse.scene(lane), self._max_attempts, self._random))
        if isinstance(verdict, EngineFailure):
            self._pulse.refused(lane)
            self.breaker.failed(lane, verdict, sent_at=sent_at)
        elif isinstance(verdict, Done) and verdict.settled:
            self._settled(lane, verdict, sent_at)
        else:
            self._failed_alone(lane, verdict, sent_at)
        if not isinstance(verdict, Done) and verdict.in_doubt:
            self._send_canary(lane)
        return verdict

    def abandoned(self, lane: Lane, *, sent_at: float) -> None:
        """A call was cancelled: it says nothing about the engine."""
        self.breaker.abandoned(lane, sent_at=sent_at)

    async def close(self) -> None:
        """Ends the canaries under way."""
        tasks = list(self._canaries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _settled(self, lane: Lane, verdict: Done, sent_at: float) -> None:
        if verdict.ending.mark == OUTPUT:
            self._pulse.succeeded(lane)
        else:
            self._pulse.settled(lane)
        self.breaker.succeeded(lane, sent_at=sent_at)

    def _failed_alone(self, lane: Lane, verdict: Done | RetryRequest, sent_at: float) -> None:
        if isinstance(verdict, RetryRequest) and verdict.refused:
            self._pulse.refused(lane)
        else:
            self._pulse.failed(lane)
        self.breaker.abandoned(lane, sent_at=sent_at)

    def _send_canary(self, lane: Lane) -> None:
        if lane not in self._canaries:
            self._canaries[lane] = asyncio.create_task(self._ask(lane), name=f"canary {lane.endpoint}")

    async def _ask(self, lane: Lane) -> None:
        sent_at = self.now()
        try:
            problem = await sing(self._backend, lane)
        except Exception:
            log.exception("the canary failed", extra={"endpoint": lane.endpoint})
            problem = "cannot be asked whether it works; see the log"
        finally:
            del self._canaries[lane]  # before the result is told: who is in doubt from now on sends another
        if problem is None:
            self._pulse.succeeded(lane)
            self.breaker.succeeded(lane, sent_at=sent_at)
        else:
            self.breaker.canary_failed(lane, problem)
