"""What a worker asks of an engine, and what it must be told when that fails.

The one thing a caller must know of a failed call is whether the request may have run: `NotSent` says it certainly did
not, `OutcomeUnknown` that it may have. Everything else is a `Reply`, whatever its status.
"""

from dataclasses import dataclass
from typing import Protocol

from state.records import OvernightError


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer. `body` is as it came; `retry_after` is in seconds where the engine sent one."""

    status: int
    body: bytes
    request_id: str | None = None
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model an engine answers for. `names` are those it accepts in a body as they are; `root` is one of them."""

    root: str
    names: tuple[str, ...]
    owned_by: str = "overnight"
    endpoints: tuple[str, ...] | None = None
    """Batch endpoints it serves; None where it does not say."""


class EngineError(OvernightError):
    """A call got no usable reply."""


class NotSent(EngineError):
    """The request certainly did not reach the engine (refused, no such socket, name not resolved)."""


class OutcomeUnknown(EngineError):
    """The connection broke, or time ran out, after the request may have been read."""


class TimedOut(OutcomeUnknown):
    """No reply within `request_timeout`; the request may have run, or still be running."""


class ReplyTooLarge(EngineError):
    """The reply is larger than the limit; it was cut off and the connection closed."""


class EngineMisconfigured(OvernightError):
    """The engine cannot work as configured: it ended before it was ever healthy. Carries its last output lines."""

    def __init__(self, message: str, tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tail = tail


class Backend(Protocol):
    """An engine, as a worker sees it."""

    #: Shown in logs and /readyz/engine: "vllm (managed)", a URL without credentials, "echo".
    name: str

    async def start(self) -> None:
        """Brings the engine up, or makes first contact; returns when it is ready to answer.

        Raises:
            EngineMisconfigured: a managed engine ended before it was ever healthy.
            EngineError: a remote engine does not answer (yet); call again.
        """
        ...

    async def models(self) -> tuple[ServedModel, ...]:
        """What the engine serves. Raises EngineError when it does not answer."""
        ...

    async def send(self, endpoint: str, body: bytes) -> Reply:
        """One request; `endpoint` is a path such as `/v1/chat/completions`. Cancelling the call aborts the request.

        Raises:
            NotSent, OutcomeUnknown, ReplyTooLarge.
        """
        ...

    async def died(self) -> str:
        """Returns when a managed engine's process has ended or hangs (and was ended), with the reason in one line.

        Never returns for an engine we do not run. After it returns, `start` brings the engine up again.
        """
        ...

    async def close(self) -> None:
        """Ends connections and, if managed, the engine with its whole process group."""
        ...
