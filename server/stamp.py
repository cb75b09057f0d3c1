"""Every reply carries OpenAI's headers, every failure becomes an envelope, and every request leaves one line in the log."""

import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import errors
from server.wire import JSON
from state.records import Unavailable

_QUIET = ("/healthz", "/readyz")
_METHOD = re.compile(r"[A-Z]{1,16}")

log = logging.getLogger(__name__)


class Stamp:
    """Pure ASGI middleware, around all that refuse: request id, headers, log line; turns what was raised inside into an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reply = _Reply(scope, send)
        try:
            await self._app(scope, receive, reply.send)
        except ClientDisconnect:
            reply.status = 499  # nobody is left to answer; the log says so in nginx's way
        except Exception as error:
            if reply.status:  # the head is out: only a broken connection can tell the client
                raise
            await self._answer(error, scope, receive, reply)
        finally:
            reply.record()

    async def _answer(self, error: Exception, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        told = errors.from_exception(error, method=scope["method"], path=scope["path"], request_id=reply.request_id)
        if isinstance(error, Unavailable):
            log.warning("a store fails", extra={"request_id": reply.request_id, "cause": str(error)})
        elif told.status == 500:
            log.error("a request failed", exc_info=error, extra={"request_id": reply.request_id})
        await JSON(told.body(), told.status, told.headers)(scope, receive, reply.send)


class _Reply:
    """One reply on its way out."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.request_id = f"req_{uuid.uuid4().hex}"
        self.status = 0
        self._scope, self._send = scope, send
        self._begun = time.perf_counter()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["openai-version"] = "2020-10-01"
            headers["openai-processing-ms"] = str(self._ms())
            headers["x-content-type-options"] = "nosniff"
        await self._send(message)

    def record(self) -> None:
        """The log line. It holds no text of the client's: the route's template stands for the path."""
        route = self._scope.get("route")
        template = getattr(route, "path", "-")
        method = self._scope["method"]
        polled = template.startswith(_QUIET) or (method in ("GET", "HEAD") and self.status < 400)
        level = logging.DEBUG if polled else logging.INFO  # clients that poll would drown everything else
        fields = {
            "request_id": self.request_id,
            "method": method if _METHOD.fullmatch(method) else "-",
            "route": template,
            "status": self.status,
            "ms": self._ms(),
        }
        log.log(level, "request", extra=fields)

    def _ms(self) -> int:
        return round((time.perf_counter() - self._begun) * 1000)
