"""Whether an engine works, by what it did for requests lately: the evidence on which a failure is judged.

Kept per *lane*, an endpoint and a model: chat may work while embeddings do not, and behind one gateway one model may
be down while another answers. Reads a clock that is handed in, and does nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

#: A lane is alive for so many seconds after a success.
ALIVE_FOR: Final = 10.0


class Lane(NamedTuple):
    """What requests have in common that an engine may or may not serve."""

    endpoint: str
    model: str


@dataclass(frozen=True, slots=True)
class Scene:
    """A lane at one moment. The counters only grow; two scenes tell what happened between them."""

    alive: bool = False
    """Something succeeded in the last `ALIVE_FOR` seconds: what fails now fails by itself."""
    answers: int = 0
    """Verdicts of the engine on a request: 2xx, or a final 4xx. Only a 2xx (or the canary) makes a lane alive: a
    gateway refuses bad requests by itself while nothing behind it works."""
    refusals: int = 0


@dataclass(slots=True)
class _Count:
    answers: int = 0
    refusals: int = 0
    last_success: float = float("-inf")


class Pulse:
    """Counts answers and engine failures, lane by lane."""

    def __init__(self, *, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._counts: dict[Lane, _Count] = {}

    def answered(self, lane: Lane, *, success: bool) -> None:
        """A request, or the canary, was answered."""
        count = self._counts.setdefault(lane, _Count())
        count.answers += 1
        if success:
            count.last_success = self._monotonic()

    def refused(self, lane: Lane) -> None:
        """A request met a failure of the engine."""
        self._counts.setdefault(lane, _Count()).refusals += 1

    def scene(self, lane: Lane) -> Scene:
        """How the lane stands now."""
        count = self._counts.get(lane)
        if count is None:
            return Scene()
        alive = self._monotonic() - count.last_success < ALIVE_FOR
        return Scene(alive, count.answers, count.refusals)
