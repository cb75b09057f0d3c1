"""The server as the client commands see it: the few calls they need, and every way a call fails as one clear line."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import quote

import httpx

from server.cli.exits import FAILED, NO_SERVER, NO_SUCH_OBJECT, WRONG_KEY, Failure

DEFAULT_URL = "http://127.0.0.1:8000/v1"

#: Seconds: to connect, and between two bytes of an answer. Uploads may take as long as they move.
TIMEOUT = httpx.Timeout(60.0, connect=5.0)


class Remote:
    """A connection to one server. Use as a context."""

    def __init__(self, base_url: str | None, key: str | None, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = (base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
        key = key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT, transport=transport)
        except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
            raise Failure(f"{self.url} is no usable server URL, or the key no usable key: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._http.close()

    def upload(self, path: Path, moved: Callable[[int], None]) -> dict[str, Any]:
        """Sends the file for a batch; `moved` is told the bytes that have left, from time to time."""
        with opened(path) as stream, self._explained(path.name):
            part = (path.name, _Counted(stream, moved), "application/jsonl")
            reply = self._http.post("/files", data={"purpose": "batch"}, files={"file": part})  # type: ignore[dict-item]
            return self._json(reply, path.name)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Starts a batch."""
        return self._call("POST", "/batches", "the batch", json=body)

    def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch as it stands."""
        return self._call("GET", f"/batches/{quote(batch_id, safe='')}", batch_id)

    def file(self, file_id: str) -> dict[str, Any]:
        """A file's object."""
        return self._call("GET", f"/files/{quote(file_id, safe='')}", file_id)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Stops a batch."""
        return self._call("POST", f"/batches/{quote(batch_id, safe='')}/cancel", batch_id)

    def models(self) -> list[dict[str, Any]]:
        """The models one can ask for."""
        return list(self._call("GET", "/models", "models").get("data") or [])

    def readiness(self) -> dict[str, Any]:
        """What `/readyz/engine` says, which stands beside `/v1`; empty where there is no such thing, or no answer."""
        try:
            body = self._http.get(f"{self.url.removesuffix('/v1')}/readyz/engine").json()
        except (httpx.HTTPError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    def batches(self) -> Iterator[dict[str, Any]]:
        """All batches, newest first, page by page."""
        after: dict[str, str] = {}
        while True:
            page = self._call("GET", "/batches", "batches", params={"limit": "100", **after})
            items = page.get("data") or []
            yield from items
            if not page.get("has_more") or not items:
                return
            after = {"after": str(items[-1]["id"])}

    @contextmanager
    def content(self, file_id: str, start: int) -> Iterator[httpx.Response]:
        """A file's bytes from `start` on, as a reply to read from; its status may be 200, 206 or 416."""
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        request = f"/files/{quote(file_id, safe='')}/content"
        with self._explained(file_id), self._http.stream("GET", request, headers=headers) as reply:
            if reply.status_code not in (200, 206, 416):
                reply.read()
                self._json(reply, file_id)
            yield reply

    def _call(self, method: str, path: str, what: str, **kw: Any) -> dict[str, Any]:
        with self._explained(what):
            return self._json(self._http.request(method, path, **kw), what)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """A call that gets no answer becomes `Unreachable`."""
        try:
            yield
        except httpx.UnsupportedProtocol as error:
            raise Failure(f"{self.url} is no usable server URL") from error
        except httpx.ConnectError as error:
            raise Unreachable(
                f"no server answers at {self.url}; start one with `overnight serve`, or set OPENAI_BASE_URL"
            ) from error
        except httpx.TransportError as error:
            raise Unreachable(f"the connection to {self.url} broke over {what} ({type(error).__name__})") from error

    def _json(self, reply: httpx.Response, what: str) -> dict[str, Any]:
        """The reply's object, or the failure it stands for."""
        try:
            body = reply.json()
        except ValueError:
            body = None
        if reply.is_success and isinstance(body, dict):
            return body
        said = _message(body) or f"{self.url} answered {reply.status_code} {reply.reason_phrase}, and no JSON"
        if reply.status_code == 401:
            hint = "OPENAI_API_KEY is not one of its keys" if self._http.headers.get("Authorization") else _NO_KEY
            raise Failure(f"the server at {self.url} refuses: {hint} ({said})", WRONG_KEY)
        if reply.status_code == 404:
            if _message(body) is None or said.startswith("Invalid URL"):  # OpenAI's words for a route that is none
                said = f"{self.url} knows no {what}: is it the right URL? Most end in /v1"
            raise Failure(said, NO_SUCH_OBJECT)
        if reply.status_code >= 500:
            raise Unreachable(f"the server is in trouble ({reply.status_code}): {said}", FAILED)
        raise Failure(said)


_NO_KEY = "it wants a key, so set OPENAI_API_KEY"


class Unreachable(Failure):
    """No usable answer, which may be another in a moment: `watch` and `download` try again for a while."""

    def __init__(self, message: str, code: int = NO_SERVER) -> None:
        super().__init__(message, code)


def patiently(call: Callable[[], Any], *, within: float, noticed: Callable[[Failure], None]) -> Any:
    """Calls again while the server cannot be reached, for `within` seconds; `noticed` is told of each vain attempt."""
    until = time.monotonic() + within
    pause = 0.2
    while True:
        try:
            return call()
        except Unreachable as trouble:
            if time.monotonic() + pause > until:
                raise
            noticed(trouble)
        time.sleep(pause)
        pause = min(pause * 2, 5.0)


class _Counted:
    """A file that tells how much of it has been read."""

    def __init__(self, stream: IO[bytes], moved: Callable[[int], None]) -> None:
        self._stream, self._moved = stream, moved

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._moved(len(data))
        return data

    def fileno(self) -> int:
        return self._stream.fileno()

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read(1 << 18):
            yield data


def opened(path: Path) -> IO[bytes]:
    """The file, to read bytes from; a Failure with the reason if it cannot be opened.

    A pipe is refused: it can be read once only, and what one look at it takes would be missing from the upload.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise Failure(f"cannot read {path}: it is a pipe or a device; write its contents to a file first")
    try:
        return path.open("rb")
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from error


def _message(body: Any) -> str | None:
    """The message of an OpenAI error envelope, if it is one."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None
