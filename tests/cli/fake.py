"""A server that says what a test tells it to: for what the real one cannot be made to do on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Fake(ThreadingHTTPServer):
    """`routes` maps "METHOD /path" to what is answered: a list is used up but for its last entry.

    An entry is (status, object), or (status, bytes) for contents; contents know ranges, and `cut_after` breaks a reply
    off after so many bytes, once.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.routes: dict[str, list[tuple[int, Any]]] = {}
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.cut_after: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, route: str, *replies: tuple[int, Any]) -> None:
        self.routes[route] = list(replies)

    @contextmanager
    def running(self) -> Iterator["Fake"]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None  # a client that hangs up is part of the tests


class _Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.removeprefix("/v1")
        self.server.seen.append((f"{self.command} {path}", dict(self.headers), body))
        replies = self.server.routes.get(f"{self.command} {path}") or [(404, envelope(f"nothing at {path}"))]
        status, what = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(what, bytes) and status == 200:
            self._content(what)
        else:
            self._send(status, what if isinstance(what, bytes) else json.dumps(what).encode())

    do_POST = do_GET

    def _content(self, data: bytes) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if start >= len(data) and start:
            self._send(416, b"", {**tag, "Content-Range": f"bytes */{len(data)}"})
        else:
            self._send(206 if start else 200, data[start:], tag)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        cut, self.server.cut_after = self.server.cut_after, None
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *unused: Any) -> None:
        return None


def envelope(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


def batch(status: str, *, completed: int = 0, failed: int = 0, total: int = 0, **fields: Any) -> dict[str, Any]:
    counts = {"total": total, "completed": completed, "failed": failed}
    base = {"id": "batch_1", "object": "batch", "endpoint": "/v1/chat/completions", "status": status}
    return {**base, "request_counts": counts, "created_at": 1_800_000_000, "errors": None, **fields}
