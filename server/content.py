"""GET and HEAD /v1/files/{id}/content: the very bytes, never compressed, whole or one range, in bounded memory."""

import contextlib
from collections.abc import AsyncIterator, Mapping

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server import ranges
from server.errors import ApiError
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
    span = _span(request, file, tag)
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
    return StreamingResponse(_rest(first, pieces), status, headers)


async def _rest(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, and the end of the reader with them, also when the client goes away in the middle."""
    try:
        yield first
        async for piece in pieces:
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            with contextlib.suppress(RuntimeError):  # already being closed by the event loop
                await close()
