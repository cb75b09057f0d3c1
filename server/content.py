"""GET and HEAD /v1/files/{id}/content: the very bytes, never compressed, whole or one range, in bounded memory."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server import ranges
from server.errors import ApiError
from server.intake import BodyStalled
from state.objects import ObjectStore
from state.records import Corrupt, File, NotFound

#: Purposes whose files the original does not hand out again.
_WITHHELD = frozenset({"assistants", "user_data", "vision"})


async def reply(request: Request, file: File, store: ObjectStore) -> Response:
    """The answer to a download. The first bytes are read before the head goes out, so a failing store is a plain error.

    Raises:
        ApiError: 400 (purpose), 416.
        Unavailable: the store does not answer.
        Corrupt: the row is there and its bytes are not (invariant 11 is broken).
    """
    if file.purpose in _WITHHELD:
        raise ApiError(400, f"Not allowed to download files of purpose: {file.purpose}")
    tag = ranges.etag(file.sha256) if file.sha256 else None
    headers = {"accept-ranges": "bytes", "content-disposition": ranges.attachment(file.filename)}
    if tag:
        headers["etag"] = tag
    if ranges.is_unchanged(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    span = _span(request, file, tag) if request.method == "GET" else None  # RFC 9110, section 14.2
    headers["content-type"] = "application/octet-stream"
    headers["content-length"] = str(file.bytes if span is None else span.length)
    if span is not None:
        headers["content-range"] = span.content_range(file.bytes)
    status = 200 if span is None else 206
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    return await _stream(store, file, span or ranges.Span(0, file.bytes), status, headers)


def _span(request: Request, file: File, tag: str | None) -> ranges.Span | None:
    wanted, condition = request.headers.get("range"), request.headers.get("if-range")
    try:
        return ranges.wanted_span(wanted, condition, size=file.bytes, tag=tag)
    except ranges.Unsatisfiable:
        message = f"The range is not satisfiable: the file has {file.bytes} bytes."
        raise ApiError(416, message, headers={"content-range": f"bytes */{file.bytes}"}) from None


async def _stream(
    store: ObjectStore, file: File, span: ranges.Span, status: int, headers: Mapping[str, str]
) -> Response:
    pieces = store.read(file.object_key, span.start, span.end)
    try:
        first = await anext(pieces, b"")
    except NotFound as error:
        raise Corrupt(f"the bytes of {file.id} are gone") from error
    return _Download(first, pieces, status, headers)


class _Download(Response):
    """A body in pieces, each sent when the client has taken the one before.

    Not Starlette's StreamingResponse: when a client goes away, that one cancels again at every further await, and the
    reader could not even close its file.
    """

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], status: int, headers: Mapping[str, str]) -> None:
        super().__init__(status_code=status, headers=headers)
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_until_gone(receive), name="download")
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for piece in self._rest:
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            if isinstance(self._rest, AsyncGenerator):
                await self._rest.aclose()


async def _until_gone(receive: Receive) -> None:
    """Ends when the client has gone. A download wants no body, so it does not matter how one comes."""
    kind = ""
    while kind != "http.disconnect":
        with contextlib.suppress(BodyStalled):
            kind = (await receive())["type"]
