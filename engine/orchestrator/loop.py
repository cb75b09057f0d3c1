"""How the orchestrator's parts run in the background: a step again and again, with one place that catches."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from state.records import Unavailable

log = logging.getLogger(__name__)

#: The pause after a failure doubles from the first to the second value, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class Bell:
    """Wakes a loop before its time. Rings while it is awake count as one."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self, timeout: float) -> None:
        """Returns when it was rung, after `timeout` seconds at the latest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rung.wait()
        self._rung.clear()


async def keep(step: Callable[[], Awaitable[bool]], *, name: str, every: float, bell: Bell) -> None:
    """Runs `step` for ever: at once again while it returns True (there is more to do), else after `every` seconds or a ring.

    A step that raises is logged and tried again after a pause that doubles; a loop ends by cancellation only
    (invariant 13).
    """
    failures = 0
    while True:
        try:
            more = await step()
            failures = 0
        except Unavailable as error:
            failures += 1
            log.warning("%s waits: %s", name, error)
        except Exception:
            failures += 1
            log.exception("%s failed and goes on", name)
        if failures:
            await asyncio.sleep(pause(failures))
        elif not more:
            await bell.wait(every)


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row, one at least."""
    return float(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(failures - 1, 16)))
