"""What the orchestrator and its child processes say to each other, over the child's stdin and stdout.

A message is eight bytes of length and a pickle. Pickle is safe here and only here: both ends are the same code, and the
pipe has no other ends. Errors cross it as plain data, so that one which cannot be pickled is not lost.
"""

import pickle
import struct
import traceback
from dataclasses import dataclass
from typing import Any

from state.records import Corrupt, OutOfSpace, OvernightError, Unavailable

LENGTH = struct.Struct("<Q")

#: Seconds between a working child's signs of life.
ALIVE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Ready:
    """The child has imported what it needs and opened its store."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The child is at work on its job; said every `ALIVE_EVERY_S` by a thread that the work does not stop."""


@dataclass(frozen=True, slots=True)
class Done:
    """The value of a job, and the child's resident memory in bytes after it."""

    value: Any
    resident: int


@dataclass(frozen=True, slots=True)
class Raised:
    """The error of a job: the name of its class, its text, the traceback for the log."""

    kind: str
    message: str
    trace: str
    needed: int = 0
    free: int = 0

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """Describes an error; of several that were raised at once, the first."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        kind = next((k.__name__ for k in type(error).__mro__ if k in _KINDS), type(error).__name__)
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, OutOfSpace):
            return cls(kind, str(error), trace, error.needed, error.free)
        return cls(kind, str(error), trace)

    def error(self) -> OvernightError:
        """The error again, for the parent to raise."""
        if self.kind == OutOfSpace.__name__:
            return OutOfSpace(self.message, needed=self.needed, free=self.free)
        for kind in _KINDS:
            if kind.__name__ == self.kind:
                return kind(self.message)
        return ChildFailed(f"{self.kind}: {self.message}\n{self.trace}")


_KINDS: tuple[type[OvernightError], ...] = (OutOfSpace, Unavailable, Corrupt)


class ChildFailed(OvernightError):
    """The job raised what nobody foresaw; the text holds the child's traceback."""


class ChildDied(OvernightError):
    """The child process ended in the middle of a job."""


def encode(message: Any) -> bytes:
    """A message with its length in front."""
    data = pickle.dumps(message, protocol=5)
    return LENGTH.pack(len(data)) + data


def decode(data: bytes) -> Any:
    """A message without its length."""
    return pickle.loads(data)  # noqa: S301 (our own process at the other end, see above)
