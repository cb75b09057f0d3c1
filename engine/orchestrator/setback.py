"""What becomes of a job that could not be done: when it is tried again, and whether the attempt counts against it.

A pure decision. Only an attempt that took its process along, or broke in a way nobody foresaw, counts: such a job may do it
again every time. An outage, a full disk or an idle fleet says nothing about the job (invariant 13).
"""

import logging
from dataclasses import dataclass

from engine.orchestrator.loop import pause
from state.records import Corrupt, OutOfSpace, OvernightError, Unavailable

#: Seconds until a job looks again for room on the disk, and for a person who mends corrupt data.
SPACE_DELAY, CORRUPT_DELAY = 5.0, 60.0
#: Seconds until a job looks again for the large lane: so many more at each look, so that hundreds of large batches in a
#: queue do not keep the database busy with looking.
BUSY_DELAY, LONGEST_BUSY_DELAY = 1.0, 30.0
#: Seconds until a plan looks again for the first model: often while that is likely to come soon, then more seldom.
MODEL_DELAY, MODEL_DELAY_LATER, MODEL_SOON = 1.0, 5.0, 60


class NoModelYet(OvernightError):
    """No worker has ever registered, so nobody can say whether the batch's model exists."""


class LaneBusy(OvernightError):
    """Another large job is running."""


class StoppedMeanwhile(OvernightError):
    """A batch was cancelled, or its window closed, while it was finished as if it had not been."""


@dataclass(frozen=True, slots=True)
class Setback:
    """Tried again after `delay` seconds. `lost` attempts are counted; `level` is the log's."""

    delay: float
    reason: str
    lost: bool
    level: int


def setback(error: Exception, *, failures: int) -> Setback:
    """Decides for the job's `failures`th failure in a row, at least 1."""
    reason = str(error) or type(error).__name__
    match error:
        case NoModelYet():
            delay = MODEL_DELAY if failures <= MODEL_SOON else MODEL_DELAY_LATER
            return Setback(delay, reason, lost=False, level=logging.INFO if failures == 1 else logging.DEBUG)
        case LaneBusy():
            delay = min(BUSY_DELAY * failures, LONGEST_BUSY_DELAY)
            return Setback(delay, reason, lost=False, level=logging.DEBUG)
        case StoppedMeanwhile():
            return Setback(0.0, reason, lost=False, level=logging.INFO)
        case OutOfSpace():
            return Setback(SPACE_DELAY, reason, lost=False, level=logging.WARNING)
        case Unavailable():
            return Setback(pause(failures), reason, lost=False, level=logging.WARNING)
        case Corrupt():
            return Setback(CORRUPT_DELAY, reason, lost=False, level=logging.ERROR)
        case _:
            return Setback(pause(failures), reason, lost=True, level=logging.ERROR)
