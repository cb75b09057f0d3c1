"""Whether an engine works, by what it did for requests lately: the evidence on which a failure is judged.

Kept per *lane*, an endpoint and a model: chat may work while embeddings do not, and behind one gateway one model may
be down while another answers. Reads a clock that is handed in, and does nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

#: A lane is alive for so many seconds after a success,
ALIVE_FOR: Final = 10.0
#: unless so many calls have failed since. Without this, an engine that breaks would cost what is sent to it in those
#: seconds, thousands of requests, all their attempts.
MOST_FAILURES: Final = 8


class Lane(NamedTuple):
    """What requests have in common that an engine may or may not serve."""

    endpoint: str
    model: str


class Scene(NamedTuple):
    """A lane at one moment. The counters only grow; two scenes tell what happened between them."""

    alive: bool = False
    """Something succeeded in the last `ALIVE_FOR` seconds, and little has failed since: what fails, fails by itself."""
    successes: int = 0
    """2xx replies, and canaries that came back."""
    answers: int = 0
    """The successes, and the engine's final refusals of single requests. These are no sign of life: a gateway refuses
    bad requests by itself while nothing behind it works."""
    refusals: int = 0
    """Calls that met a failure of the engine."""


@dataclass(slots=True)
class _Count:
    successes: int = 0
    answers: int = 0
    refusals: int = 0
    failures: int = 0
    """Calls that failed in any way since the last success."""
    last_success: float = float("-inf")


class Pulse:
    """Counts what became of calls, lane by lane."""

    def __init__(self, *, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._counts: dict[Lane, _Count] = {}

    def succeeded(self, lane: Lane) -> None:
        """A 2xx reply came, or the canary came back."""
        count = self._count(lane)
        count.answers += 1
        count.successes += 1
        count.failures = 0
        count.last_success = self._monotonic()

    def settled(self, lane: Lane) -> None:
        """The engine refused a request for good."""
        self._count(lane).answers += 1

    def refused(self, lane: Lane) -> None:
        """A call met a failure of the engine."""
        self._count(lane).refusals += 1

    def failed(self, lane: Lane) -> None:
        """A call failed and may have failed by itself."""
        self._count(lane).failures += 1

    def scene(self, lane: Lane) -> Scene:
        """How the lane stands now."""
        count = self._count(lane)
        lately = self._monotonic() - count.last_success < ALIVE_FOR
        alive = lately and count.failures < MOST_FAILURES
        return Scene(alive, count.successes, count.answers, count.refusals)

    def _count(self, lane: Lane) -> _Count:
        count = self._counts.get(lane)
        if count is None:
            count = self._counts[lane] = _Count()
        return count
