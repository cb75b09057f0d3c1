"""HTTP to an engine: ready bytes out, bytes in, and a failure that says whether the request may have run.

The only module that knows aiohttp (3.11 to 3.x). What each of its errors means here:

==============================================================================  ======================================
ClientConnectorError and its kin (refused, no such socket or name, TLS),        NotSent: nothing had been written yet
ConnectionTimeoutError, InvalidURL
ServerDisconnectedError, ClientOSError, ClientConnectionResetError,             OutcomeUnknown
ClientPayloadError, ClientResponseError (no HTTP), any other OSError
SocketTimeoutError, TimeoutError                                                TimedOut, an OutcomeUnknown
==============================================================================  ======================================

A kept-alive connection that the server closed while it was idle surfaces as ServerDisconnectedError or
ClientConnectionResetError at the next request: unknown, although most probably not run. aiohttp sends a request a
second time by itself only for idempotent methods (`IDEMPOTENT_METHODS`; in 3.14 GET, HEAD, OPTIONS, TRACE, PUT and
DELETE), so a POST is never sent twice behind our back; a test holds it to that.
"""

import io
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from engine.backends.protocol import NotSent, OutcomeUnknown, Reply, ReplyTooLarge, TimedOut
from state.settings import MIB

#: Seconds to connect in.
CONNECT_TIMEOUT: Final = 5.0
#: A kept-alive connection is not used again after so many idle seconds: uvicorn, hence vLLM, closes it after 5.
KEEP_ALIVE: Final = 4.0
#: Believable values of `Retry-After` end here, in seconds.
LONGEST_RETRY_AFTER: Final = 3600.0

_NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)


class Client:
    """A pool of connections to one engine. Made anywhere, used in one event loop; `close` ends every call."""

    def __init__(
        self,
        origin: str,
        *,
        wall: Callable[[], float],
        timeout: float,
        max_reply_bytes: int,
        socket_path: str | None = None,
        key: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`origin` is scheme, host and port, and the path in front of `/v1` if there is one; no credentials in it.

        `wall` reads the time for a `Retry-After` that is a date; `timeout` bounds one call, in seconds; the number of
        connections is bounded by the caller's number of calls. `key` is sent as a bearer token.
        """
        self._origin, self._socket_path, self._wall = origin, socket_path, wall
        self._max_reply_bytes = max_reply_bytes
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "overnight"}
        self._headers |= dict(headers or {})
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def post(self, path: str, body: bytes) -> Reply:
        """Sends a body of JSON. Cancelling closes the connection, which aborts the request at the engine.

        Raises:
            NotSent, OutcomeUnknown, TimedOut, ReplyTooLarge.
        """
        # aiohttp warns of large bytes, because it copies them; a file object is written in pieces.
        data = body if len(body) < MIB else io.BytesIO(body)
        return await self._call("POST", path, data)

    async def get(self, path: str, *, within: float = 10.0) -> Reply:
        """Asks for something small, such as the list of models; raises what `post` raises."""
        return await self._call("GET", path, None, aiohttp.ClientTimeout(total=within, sock_connect=CONNECT_TIMEOUT))

    async def close(self) -> None:
        """Closes every connection; calls under way fail with OutcomeUnknown."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _call(
        self, method: str, path: str, data: bytes | io.BytesIO | None, timeout: aiohttp.ClientTimeout | None = None
    ) -> Reply:
        url = self._urls.get(path) or self._urls.setdefault(path, URL(self._origin + path, encoded=True))
        if self._closed:
            raise NotSent("the connections to the engine were closed")
        session = self._session or self._open()
        try:
            response = await session.request(
                method, url, data=data, allow_redirects=False, timeout=timeout or self._timeout
            )
            try:
                body = await self._read(response)
            except BaseException:
                response.close()  # not released: the rest of the answer must not be read by the next call
                raise
        except _NOT_SENT as error:
            raise NotSent(f"cannot connect: {_reason(error)}") from error
        except TimeoutError as error:
            raise TimedOut("no reply within the time allowed") from error
        except (aiohttp.ClientError, OSError) as error:
            raise OutcomeUnknown(f"the connection broke: {_reason(error)}") from error
        headers = response.headers
        return Reply(response.status, body, _request_id(headers), self._retry_after(headers))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body, as long as it is within the limit."""
        content, limit = response.content, self._max_reply_bytes
        if (response.content_length or 0) > limit:
            raise ReplyTooLarge(f"the reply is larger than {limit} bytes")
        chunks: list[bytes] = []
        size = 0
        while not content.at_eof():
            chunk = await content.readany()
            size += len(chunk)
            if size > limit:
                raise ReplyTooLarge(f"the reply is larger than {limit} bytes")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _open(self) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self._socket_path is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        else:
            connector = aiohttp.UnixConnector(self._socket_path, limit=0, keepalive_timeout=KEEP_ALIVE)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            timeout=self._timeout,
        )
        return self._session

    def _retry_after(self, headers: CIMultiDictProxy[str]) -> float | None:
        value = headers.get("Retry-After")
        return None if value is None else parse_retry_after(value, now=self._wall())


def parse_retry_after(value: str, *, now: float) -> float | None:
    """Seconds to wait, from a `Retry-After` header: a number or an HTTP date (RFC 9110, 10.2.3). None if it is neither.

    `now` is wall time in seconds.
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    if seconds != seconds:  # NaN
        return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def _request_id(headers: CIMultiDictProxy[str]) -> str | None:
    """The engine's own id of a request, if it is one that may stand in a result line."""
    value = headers.get("x-request-id")
    return value if value and len(value) <= 256 and value.isascii() and value.isprintable() else None


def _reason(error: BaseException) -> str:
    """What happened, without the address: aiohttp's texts hold URLs and keys of its pool."""
    os_error = getattr(error, "os_error", error)
    if isinstance(os_error, OSError) and os_error.strerror:
        return os_error.strerror
    return {
        aiohttp.ServerDisconnectedError: "the engine closed it",
        aiohttp.ClientPayloadError: "the reply was cut short",
        aiohttp.ConnectionTimeoutError: f"not within {CONNECT_TIMEOUT:g} s",
    }.get(type(error), type(error).__name__)
