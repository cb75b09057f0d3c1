"""An engine somebody else runs: any OpenAI-compatible server, by its base URL.

Its key goes out in the Authorization header and nowhere else: not into logs, names or errors. A body that asks for an
alias is sent with the server's own name for the model in it, and not a byte else changed.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec
import orjson

from engine.backends.aliases import check_aliases, parse_aliases, with_aliases
from engine.backends.client import Client
from engine.backends.protocol import EngineError, Reply, ServedModel
from engine.splice import splice_model
from state.clock import Clock
from state.records import SettingsError
from state.settings import Settings

#: Endpoints of a batch that an `/openapi.json` is searched for.
ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
    "/v1/moderations",
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `origin` is what stands before `/v1/...`; `name` is for people and holds no credentials."""

    origin: str
    name: str
    socket_path: str | None = None


def parse_address(url: str) -> Address:
    """Understands `http://host:8001/v1`, the same without `/v1` or with a final slash, and `unix:/run/engine.sock`.

    Raises:
        SettingsError: it is neither; the message does not repeat credentials.
    """
    text = url.strip()
    if text.startswith("unix:"):
        path = "/" + text.removeprefix("unix:").lstrip("/").removesuffix("/v1")
        if len(path) < 2:
            raise SettingsError("an upstream unix: needs the path of a socket, such as unix:/run/engine.sock")
        return Address("http://localhost", f"unix:{path}", path)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise SettingsError("an upstream is not a URL; write it like http://host:8001/v1") from None
    _check(parts)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    path = parts.path.rstrip("/")
    root = f"{parts.scheme}://{host}" + (f":{port}" if port else "")
    return Address(root + path.removesuffix("/v1"), root + path)


def _check(parts: SplitResult) -> None:
    if parts.username is not None or parts.password is not None:
        raise SettingsError("an upstream's URL must not hold credentials; give the key as OVERNIGHT_UPSTREAM_API_KEY")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"upstream {parts.geturl()!r} is not a URL; write it like http://host:8001/v1")
    if parts.query or parts.fragment:
        raise SettingsError(f"upstream {parts.hostname!r}: a base URL has no query and no fragment")


class RemoteEngine:
    """A Backend for one base URL."""

    def __init__(self, settings: Settings, *, url: str, clock: Clock) -> None:
        """Makes no contact yet.

        Raises:
            SettingsError: the URL or an alias is malformed.
        """
        address = parse_address(url)
        self.name = address.name
        self._aliases = parse_aliases(settings.model_aliases)
        self._strict = len(settings.upstreams) <= 1  # of several servers, an alias need not concern this one
        self._served: frozenset[str] = frozenset()
        self._endpoints: tuple[str, ...] | None = None
        self._client = Client(
            address.origin,
            wall=clock.wall,
            timeout=settings.request_timeout,
            max_reply_bytes=settings.max_reply_bytes,
            socket_path=address.socket_path,
            key=settings.upstream_api_key,
        )

    async def start(self) -> None:
        """First contact: what the server serves, and whether the aliases fit that.

        Raises:
            SettingsError: an alias stands for a model the server does not serve.
            EngineError: the server does not answer, or not as it should; call again.
        """
        models = await self._list()
        if self._strict:
            check_aliases(models, self._aliases, engine=self.name)
        self._endpoints = await self._read_endpoints()

    async def models(self) -> tuple[ServedModel, ...]:
        models = await self._list()
        return with_aliases(models, self._aliases)

    async def send(self, endpoint: str, body: bytes) -> Reply:
        return await self._client.post(endpoint, self._own_name(body) if self._aliases else body)

    async def died(self) -> str:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._client.close()

    async def _list(self) -> tuple[ServedModel, ...]:
        reply = await self._client.get("/v1/models")
        if reply.status in (401, 403):
            raise EngineError(f"answers {reply.status} to GET /v1/models: is OVERNIGHT_UPSTREAM_API_KEY right?")
        if reply.status != 200:
            raise EngineError(f"answers {reply.status} to GET /v1/models")
        models = read_models(reply.body, self._endpoints)
        self._served = frozenset(m.root for m in models)
        return models

    async def _read_endpoints(self) -> tuple[str, ...] | None:
        try:
            reply = await self._client.get("/openapi.json")
        except EngineError:
            return None
        return read_endpoints(reply.body) if reply.status == 200 else None

    def _own_name(self, body: bytes) -> bytes:
        """The body with the server's name of the model where it asks for an alias."""
        try:
            asked = _decode_asked(body).model
        except (msgspec.DecodeError, RecursionError):
            return body  # the server says what is wrong with it
        if asked is None or asked in self._served:
            return body
        target = target_of(asked, self._aliases)
        return body if target is None else splice_model(body, target)


class _Asked(msgspec.Struct):
    model: str | None = None


_decode_asked = msgspec.json.Decoder(_Asked).decode


def target_of(name: str, aliases: Mapping[str, str]) -> str | None:
    """The model an alias stands for; `*` stands for every name that has no alias of its own."""
    return aliases.get(name) or aliases.get("*")


def read_models(body: bytes, endpoints: tuple[str, ...] | None) -> tuple[ServedModel, ...]:
    """The models of an answer to GET /v1/models.

    Raises:
        EngineError: the answer is no list of models, or an empty one.
    """
    try:
        data = orjson.loads(body)["data"]
        models = [(m["id"], m.get("owned_by")) for m in data if isinstance(m["id"], str)]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise EngineError("answers GET /v1/models with something that is no list of models") from None
    if not models:
        raise EngineError("serves no model")
    return tuple(
        ServedModel(
            root=name, names=(name,), owned_by=owner if isinstance(owner, str) else "upstream", endpoints=endpoints
        )
        for name, owner in models
    )


def read_endpoints(body: bytes) -> tuple[str, ...] | None:
    """The endpoints an `/openapi.json` lists, as vLLM's does; None where it does not tell.

    It does not where none of ours is listed, or where a route takes any path, as a proxy's does.
    """
    try:
        paths: dict[str, Any] = orjson.loads(body)["paths"]
        posts = [path for path, methods in paths.items() if "post" in methods]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    if any(path.startswith(("/{", "/v1/{")) for path in posts):
        return None
    return tuple(e for e in ENDPOINTS if e in posts) or None
