"""Guards over request bodies: how they may be encoded, how long they may stall, what becomes of the part nobody reads.

A refusal often comes before the body has been read (a bad purpose, a wrong key, a file too large). Closing the connection
then would make the client's kernel throw the answer away together with the unsent rest, so the answer goes out first, the
rest is read and dropped up to a limit, and only then the connection ends.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import errors
from server.errors import ApiError
from state.records import JSONObject

MIB = 1024 * 1024

#: The largest body of a JSON route, in bytes.
LARGEST_JSON = MIB
#: How much of a refused body is read and dropped, and for how long, before the connection is closed all the same.
MOST_DRAINED = 512 * MIB
LONGEST_DRAIN_S = 20.0
#: Up to this length an unread body does not cost the connection.
_SMALL = 64 * 1024
_LENGTH = re.compile(r"[0-9]{1,20}")


class BodyStalled(ApiError):
    """The client stopped sending in the middle of a body, or sends next to nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(408, message, code="request_timeout", headers={"connection": "close"})


class Intake:
    """Pure ASGI middleware around everything that reads a body.

    `body_timeout` is the longest wait for the next byte, in seconds. It is also what all waits together may exceed the time
    in which the body would have come at `min_body_rate` bytes per second: else one byte a minute held an upload for ever.
    """

    def __init__(self, app: ASGIApp, *, body_timeout: float, min_body_rate: float) -> None:
        self._app, self._body_timeout, self._min_body_rate = app, body_timeout, min_body_rate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(Headers(scope=scope), receive, send, self._body_timeout, self._min_body_rate)
        await self._app(scope, body.receive, body.send)


class _Body:
    """One request's body on its way in, and the reply on its way out."""

    def __init__(self, headers: Headers, receive: Receive, send: Send, timeout: float, rate: float) -> None:
        self._receive, self._send, self._timeout, self._rate = receive, send, timeout, rate
        self._length = None if "transfer-encoding" in headers else declared_length(headers) or 0
        self._unread = self._length != 0
        self._waited, self._taken = 0.0, 0

    async def receive(self) -> Message:
        if not self._unread:
            return await self._receive()
        patience = min(self._timeout, self._timeout + self._taken / self._rate - self._waited)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                message = await self._receive()
        except TimeoutError:
            self._unread = False
            raise BodyStalled(self._why(patience)) from None
        self._waited += time.monotonic() - begun
        self._taken += len(message.get("body", b""))
        self._unread = message["type"] == "http.request" and message.get("more_body", False)
        return message

    def _why(self, patience: float) -> str:
        if patience == self._timeout:
            return f"No byte of the request's body arrived for {self._timeout:g} seconds."
        return f"The request's body arrives too slowly: fewer than {self._rate:g} bytes per second."

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._unread and not self._is_small():
            message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        if message["type"] == "http.response.body" and self._unread and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    def _is_small(self) -> bool:
        return self._length is not None and self._length <= _SMALL

    async def _drain(self) -> None:
        """Reads and drops the rest: the whole answer is out already, so the client may stop at any moment."""
        left = MOST_DRAINED
        try:
            async with asyncio.timeout(LONGEST_DRAIN_S):
                while self._unread and left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    self._unread = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            return


def refuse_encoded(request: Request) -> None:
    """A body is never inflated: what unpacks to a thousand times its size must not reach the disk.

    Raises:
        ApiError: 415 when the request has a Content-Encoding.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding '{errors.echo(encoding)}' is not supported; send the body as it is."
        raise ApiError(415, message, code="unsupported_content_encoding")


def declared_length(headers: Headers) -> int | None:
    """The Content-Length, where there is one."""
    text = headers.get("content-length", "")
    return int(text) if _LENGTH.fullmatch(text) else None


async def pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives.

    Raises:
        ClientDisconnect: the client went away before the end.
        BodyStalled: it stopped sending.
    """
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return


async def read_object(request: Request) -> JSONObject:
    """The JSON object in the body.

    Raises:
        ApiError: 415 (not application/json), 413 (more than 1 MiB), 400 (not JSON, or no object).
    """
    body = await read_json_body(request)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.unparsable_json() from error
    if not isinstance(value, dict):
        message = f"Invalid type: expected an object, but got {errors.kind_of(value)} instead."
        raise ApiError(400, message, code="invalid_type")
    return value


async def read_json_body(request: Request) -> bytes:
    """The bytes of a JSON route's body, which may be empty.

    A body must say that it is JSON: a page in a browser can send other kinds to a local server without asking it first.
    """
    refuse_encoded(request)
    if (declared_length(request.headers) or 0) > LARGEST_JSON:
        raise _body_too_large()
    body = bytearray()
    async for piece in pieces(request):
        body += piece
        if len(body) > LARGEST_JSON:
            raise _body_too_large()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise ApiError(415, "This route expects a JSON body with 'Content-Type: application/json'.")
    return bytes(body)


def _body_too_large() -> ApiError:
    return ApiError(413, f"The request's body is larger than {LARGEST_JSON} bytes.", code="request_too_large")
