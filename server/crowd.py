"""A bound on requests under way, so that a flood costs its senders an error and nobody else the server's memory."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import SERVER, ApiError

MOST_REQUESTS = 512


class Crowd:
    """Pure ASGI middleware; refuses with 503 and Retry-After what comes beyond the bound. Probes always pass."""

    def __init__(self, app: ASGIApp, *, most: int = MOST_REQUESTS) -> None:
        self._app, self._most, self._inside = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._inside >= self._most:
            message = "Too many requests at once; try again in a moment."
            raise ApiError(503, message, kind=SERVER, code="overloaded", headers={"retry-after": "1"})
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
