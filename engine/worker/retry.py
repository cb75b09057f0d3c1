"""How long to wait before a request is tried again, and before an engine is tried again. Pure."""

from collections.abc import Callable
from typing import Final

#: First and longest wait of a request's own backoff, in seconds.
FIRST: Final = 0.5
LONGEST: Final = 30.0
#: First and longest pause of an engine that fails, in seconds.
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
#: A `Retry-After` beyond this is not believed: an engine that says "tomorrow" is asked again in five minutes.
LONGEST_RETRY_AFTER: Final = 300.0


def backoff(failures: int, *, random: Callable[[], float]) -> float:
    """Seconds before a request that failed `failures` times (at least once) is sent again.

    Exponential with full jitter, so that requests that failed together do not come back together; `random` gives
    numbers in [0, 1).
    """
    return random() * _grown(FIRST, failures, LONGEST)


def pause(failures: int, retry_after: float | None) -> float:
    """Seconds until an engine that failed `failures` times in a row is tried again: 1, 2, 4 ... 30.

    A longer `Retry-After` of the engine is obeyed, within reason.
    """
    return max(_grown(FIRST_PAUSE, failures, LONGEST_PAUSE), min(retry_after or 0.0, LONGEST_RETRY_AFTER))


def own_pause(refusals: int, retry_after: float | None, *, random: Callable[[], float]) -> float:
    """Seconds before a request that met its `refusals`-th engine failure is sent again.

    Grows like an engine's pause but is a little longer, by a random part: when the engine is tried again, the
    request that met its failure is not the one to try it with.
    """
    return pause(refusals, retry_after) * (1.1 + 0.4 * random())


def _grown(first: float, failures: int, most: float) -> float:
    return float(min(most, first * 2 ** min(max(failures, 1) - 1, 16)))
