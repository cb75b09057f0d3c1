"""The door: who may come in, and into which project.

With keys, a request needs one of them. Without keys the server listens on loopback only and serves this machine's
programs, whatever key they send; but a browser is a local program too, and runs strangers' pages. So then a request must
name a loopback host (a page that rebinds its own name to 127.0.0.1 cannot), and must not come from a page at all.
"""

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

#: The one project of this release; every row carries it, so that keys of other projects change no table.
DEFAULT_PROJECT = "default"

#: Open to probes without a key. `/readyz/engine` is not: causes may name machines of the inside.
OPEN_PATHS = frozenset({"/healthz", "/readyz"})

_HOST = re.compile(r"\[([^\]]*)\](?::[0-9]*)?|([^:\[\]]*)(?::[0-9]*)?")
_CHALLENGE = {"www-authenticate": "Bearer"}


class Door:
    """Pure ASGI middleware that lets a request in and writes its project into the request's state, or refuses it."""

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str], allowed_hosts: Iterable[str]) -> None:
        self._app = app
        self._projects = {_digest(key.encode()): DEFAULT_PROJECT for key in api_keys}
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            project = self._admit(Headers(scope=scope), scope["path"])
            scope.setdefault("state", {})["project_id"] = project
        await self._app(scope, receive, send)

    def _admit(self, headers: Headers, path: str) -> str:
        if not self._projects:
            refuse_strangers(headers, self._allowed)
            return DEFAULT_PROJECT
        if path in OPEN_PATHS:
            return DEFAULT_PROJECT
        return project_of_key(headers, self._projects)


def project_of(request: Request) -> str:
    """The project a request was let into."""
    project: str = request.state.project_id
    return project


def project_of_key(headers: Mapping[str, str], projects: Mapping[bytes, str]) -> str:
    """The project a bearer key opens. Keys are looked up by digest, so the time taken tells nothing about them.

    Raises:
        ApiError: 401.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        message = "Missing bearer or basic authentication in header"
        raise ApiError(401, message, headers=_CHALLENGE)
    project = projects.get(_digest(key.encode("latin-1")))
    if project is None:
        message = f"Incorrect API key provided: {masked(key)}. The keys of this server are in its settings (api_keys)."
        raise ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)
    return project


def refuse_strangers(headers: Headers, allowed: Iterable[str]) -> None:
    """Lets only local programs in, no pages.

    Raises:
        ApiError: 403.
    """
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not (is_loopback_name(hosts[0]) or _without_port(hosts[0]) in allowed):
        message = (
            "Without API keys this server answers only to loopback host names. "
            "Use http://127.0.0.1, add the name to allowed_hosts, or configure api_keys."
        )
        raise ApiError(403, message, code="host_not_allowed")
    if "origin" in headers or headers.get("sec-fetch-site", "none").lower() not in ("none", "same-origin"):
        message = "Without API keys this server does not answer to web pages."
        raise ApiError(403, message, code="origin_not_allowed")


def is_loopback_name(host: str) -> bool:
    """Whether a Host header (with or without a port) names this machine's loopback interface."""
    name = _without_port(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def masked(key: str) -> str:
    """Enough of a key to recognise it by."""
    shown = "".join(c if "!" <= c <= "~" else "?" for c in key)
    return f"{shown[:3]}****{shown[-4:]}" if len(shown) >= 16 else "****"


def _without_port(host: str) -> str:
    """The name or address in a Host header; nothing where the header is none."""
    found = _HOST.fullmatch(host.strip().lower())
    return (found[1] or found[2] or "").removesuffix(".") if found else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
