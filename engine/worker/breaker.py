"""When an engine may be sent anything: open after it failed, one request at a time to find out whether it works again.

One circuit for the engine and one for each lane (an endpoint and a model) that has failed by itself. A circuit is

- *closed*: requests pass;
- *open*: nothing passes until the pause is over (`retry.pause`: 1 s, doubled at each failed try up to 30 s, or longer
  where the engine asks for it);
- *half open*: one request passes; the others wait for what becomes of it. A request that has met an engine failure
  lets others go first. A circuit in doubt (see `outcome`) lets the canary pass instead.

A success closes a circuit if its request was sent after the circuit opened; in doubt any success does, since "nothing
succeeds" was the reason. Pure; the clock is handed in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from engine.worker.outcome import EngineFailure, Scope
from engine.worker.pulse import Lane
from engine.worker.retry import pause

#: How soon to ask again while another request is the probe, in seconds.
ASK_AGAIN: Final = 1.0


@dataclass(slots=True)
class _Circuit:
    """Open or half open; a closed circuit does not exist. Times are monotonic."""

    cause: str
    opened: float
    until: float
    failures: int = 1
    in_doubt: bool = False
    probing: bool = False


class Breaker:
    """The circuits of one engine."""

    def __init__(self, *, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._circuits: dict[Lane | None, _Circuit] = {}

    def admit(self, lane: Lane, *, unlucky: bool = False, others_wait: bool = False) -> float:
        """Whether a request of this lane may be sent now: 0.0 yes, else the seconds after which to ask again.

        A yes on a half-open circuit makes the request the probe: its outcome must be told by `failed`, `succeeded` or
        `abandoned`. `unlucky` is a request with refusals in its history; it is no probe while `others_wait`.
        """
        now = self._monotonic()
        circuits = list(self._of(lane))
        wait = max((_wait(c, now) for c in circuits), default=0.0)
        if circuits and not wait and unlucky and others_wait:
            return ASK_AGAIN
        if not wait:
            for circuit in circuits:
                circuit.probing = True
        return wait

    def failed(self, lane: Lane, failure: EngineFailure, *, sent_at: float) -> None:
        """An engine failure was met by a request that was sent at `sent_at` (monotonic)."""
        self.abandoned(lane, sent_at=sent_at)
        self._fail(None if failure.scope is Scope.ENGINE else lane, failure, sent_at)

    def canary_failed(self, lane: Lane, cause: str) -> None:
        """The canary was not answered: the lane stays open for a pause, then a request tries it."""
        now = self._monotonic()
        for circuit in self._of(lane):
            if circuit.in_doubt:
                circuit.cause, circuit.in_doubt = cause, False
                circuit.until = max(circuit.until, now + pause(circuit.failures, None))

    def succeeded(self, lane: Lane, *, sent_at: float) -> None:
        """A request, or the canary, was answered."""
        closing = [k for k in (None, lane) if (c := self._circuits.get(k)) and (c.in_doubt or sent_at > c.opened)]
        for key in closing:
            del self._circuits[key]

    def abandoned(self, lane: Lane, *, sent_at: float) -> None:
        """A request came to nothing that says anything about the engine: if it was the probe, another may be."""
        for circuit in self._of(lane):
            if circuit.probing and sent_at > circuit.opened:
                circuit.probing = False

    def reset(self) -> None:
        """All is forgotten: a new engine has started."""
        self._circuits.clear()

    def cause(self) -> str | None:
        """Why feeding pauses, for people; None while every circuit is closed."""
        whole = self._circuits.get(None)
        if whole:
            return whole.cause
        causes = [f"{lane.endpoint} ({lane.model}): {c.cause}" for lane, c in self._circuits.items() if lane]
        return "; ".join(causes) or None

    def closed(self, lane: Lane) -> bool:
        """Whether requests of this lane pass freely."""
        return not any(self._of(lane))

    def in_doubt(self, lane: Lane) -> bool:
        """Whether the canary is to be sent."""
        return any(c.in_doubt for c in self._of(lane))

    def _of(self, lane: Lane) -> Iterator[_Circuit]:
        return (c for k in (None, lane) if (c := self._circuits.get(k)))

    def _fail(self, key: Lane | None, failure: EngineFailure, sent_at: float) -> None:
        now = self._monotonic()
        circuit = self._circuits.get(key)
        if circuit is None:
            circuit = self._circuits[key] = _Circuit(failure.cause, now, now)
        elif sent_at > circuit.opened:  # the probe; others were sent before and add nothing but their Retry-After
            circuit.failures += 1
            circuit.cause = failure.cause
        elif not failure.retry_after:
            return
        circuit.until = max(circuit.until, now + pause(circuit.failures, failure.retry_after))
        circuit.in_doubt = circuit.in_doubt or failure.in_doubt


def _wait(circuit: _Circuit, now: float) -> float:
    """Seconds until this circuit lets a request through, 0.0 if it does now."""
    if now < circuit.until:
        return circuit.until - now
    return ASK_AGAIN if circuit.probing or circuit.in_doubt else 0.0
