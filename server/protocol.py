"""uvicorn's HTTP/1.1 protocol with what it leaves open: limits in time, size and number, and readers that never read.

As it comes, a connection that sends half a header is held for ever, and so is one whose client stops reading; whoever sends
requests ahead without end has them all kept, and trailers are taken for headers. Bodies that stall are `server.intake`'s
concern, because there the application can still answer.
"""

import asyncio
from typing import Any, ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import SERVER, ApiError

#: All header lines of a request together, in bytes.
LARGEST_HEADER = 64 * 1024
#: A client that takes nothing for so long, in seconds, while there is something to take, is disconnected.
LONGEST_UNREAD_S = 120.0
#: So many requests may wait on a connection behind the one that is answered.
MOST_AHEAD = 16


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its limits are set on a subclass by `guarded`, since uvicorn makes the instances."""

    header_timeout: ClassVar[float] = 20.0
    unread_timeout: ClassVar[float] = LONGEST_UNREAD_S
    most_connections: ClassVar[int] = 1024

    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    #: The request that is answered; `cycle` is the one that was read last.
    _answered: RequestResponseCycle | None = None
    #: Whether a header is complete and its body is not.
    _in_body = False
    #: What has come of the next header so far: raw bytes, and the lines that were parsed.
    _header_bytes = 0
    _line_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            self._refuse(_too_many_connections())
        else:
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._clear_stall()
        super().connection_lost(exc)
        if self._answered is not None and self._answered is not self.cycle:  # uvicorn tells only the request read last
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._header_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._in_body:
            return
        if self._header_bytes > LARGEST_HEADER:
            self._refuse(_header_too_large())
        elif self._is_idle() and self._deadline is None:
            self._await_header()  # uvicorn stopped its own clock for these bytes, and they completed no header

    # What the parser finds

    def on_message_begin(self) -> None:
        self._line_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._line_bytes += len(name) + len(value)
        if self._line_bytes > LARGEST_HEADER:
            raise ValueError("the header is too large")  # the parser turns this into a 400, and we that into a 431
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise ValueError("an unknown transfer coding")  # which a proxy in front may have read in another way
        if not self._in_body:  # what follows a body is a trailer and no header: the door must not read it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body, self._header_bytes = True, 0
        self._clear_deadline()
        super().on_headers_complete()
        if len(self.pipeline) > MOST_AHEAD:
            raise ValueError("too many requests are sent ahead")  # the parser calls this malformed: the connection ends

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (self._in_body or self._header_bytes) and not self.transport.is_closing():
            self._await_header()  # the rest of a body that nobody reads counts as a wait for the next header

    def send_400_response(self, msg: str) -> None:
        self._refuse(_header_too_large() if self._line_bytes > LARGEST_HEADER else ApiError(400, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    # Limits

    def pause_writing(self) -> None:
        super().pause_writing()
        self._clear_stall()
        self._stall = self.loop.call_later(self.unread_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clear_stall()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self.header_timeout, self._header_overdue)

    def _header_overdue(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or not self._is_idle():
            return
        if self._header_bytes:
            message = f"The request's header did not arrive within {self.header_timeout:g} seconds."
            self._refuse(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _clear_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _refuse(self, error: ApiError) -> None:
        """Answers what never became a whole request, and ends the connection; in silence where it would be taken for a reply.

        The client may be waiting for the reply to an earlier request, or be in the middle of one.
        """
        if self._is_idle() or (self._in_body and not self.pipeline and not self.cycle.response_started):
            self._write(error)
        self.transport.close()

    def _write(self, error: ApiError) -> None:
        body = orjson.dumps(error.body())
        headers = {
            "content-type": "application/json",
            "x-content-type-options": "nosniff",
            "connection": "close",
            "content-length": str(len(body)),
            **error.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode("ascii") + b"\r\n" + body)


def guarded(*, header_timeout: float, most_connections: int) -> type[GuardedProtocol]:
    """The protocol with its limits filled in."""
    limits: dict[str, Any] = {"header_timeout": header_timeout, "most_connections": most_connections}
    return type("GuardedProtocol", (GuardedProtocol,), limits)


def _header_too_large() -> ApiError:
    return ApiError(431, f"The request's header is larger than {LARGEST_HEADER} bytes.", code="header_too_large")


def _too_many_connections() -> ApiError:
    message = "Too many connections at once; try again in a moment."
    return ApiError(503, message, kind=SERVER, code="overloaded", headers={"retry-after": "1"})
