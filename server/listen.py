"""The api role: opens the stores, listens, serves until it is told to stop, closes what it opened."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import resource
import socket
from collections.abc import Callable, Generator, Sequence

import uvicorn
from starlette.applications import Starlette

from server.app import create_app
from server.protocol import guarded
from state.clock import SystemClock
from state.database import Database, upgrade
from state.objects.open import open_store
from state.records import SettingsError
from state.settings import Settings
from state.wake import open_waker

#: An idle connection is kept so long, in seconds: longer than the usual pause between two polls of a client.
KEEP_ALIVE_S = 75
_BACKLOG = 1024
#: As many files as are worth being allowed to open.
_MANY_FILES = 65_536

log = logging.getLogger(__name__)


async def serve(
    settings: Settings,
    *,
    stop: asyncio.Event,
    ready: Callable[[], None],
    listening: Callable[[int], None] | None = None,
) -> None:
    """Serves until `stop`, then lets requests under way finish for `shutdown_timeout` seconds.

    `ready` is called once, when connections are accepted; before it `listening`, with the port (the real one where the
    settings say 0).

    Raises:
        SettingsError: the address cannot be listened on, or would be open to everybody without a key.
        Unavailable: the database does not answer.
    """
    sockets = bind(settings)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await upgrade(settings.database)
            database = Database.open(settings.database)
            stack.push_async_callback(database.close)
            store = open_store(settings)
            stack.push_async_callback(store.close)
            waker = open_waker(settings)
            stack.callback(waker.close)
            app = create_app(settings=settings, database=database, store=store, waker=waker, clock=SystemClock())
            await _run(app, settings, sockets, stop=stop, ready=ready, listening=listening)
    finally:
        for one in sockets:
            one.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: whoever runs the role decides when it stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _run(
    app: Starlette,
    settings: Settings,
    sockets: Sequence[socket.socket],
    *,
    stop: asyncio.Event,
    ready: Callable[[], None],
    listening: Callable[[int], None] | None,
) -> None:
    server = _Server(_config(app, settings))
    serving = asyncio.create_task(server.serve(sockets=list(sockets)), name="uvicorn")
    accepting = asyncio.create_task(server.accepting.wait(), name="accepting")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((serving, accepting), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            _announce(settings, sockets[0].getsockname()[1], listening)
            ready()
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        accepting.cancel()
        stopping.cancel()
        server.should_exit = True
        await serving
        await _let_go(server)


def _announce(settings: Settings, port: int, listening: Callable[[int], None] | None) -> None:
    log.info("listening", extra={"host": settings.host, "port": port})
    if listening is not None:
        listening(port)


def _config(app: Starlette, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=guarded(header_timeout=settings.header_timeout, most_connections=_open_files() // 2),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # it warns of every malformed request, and a stranger shall not fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout),
    )


def _open_files() -> int:
    """How many files this process may have open, after asking for more. Connections may take half: uploads need some too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def _let_go(server: uvicorn.Server) -> None:
    """Waits for requests that were cancelled at the end of the grace, so that they give back what they hold."""
    if server.server_state.tasks:
        await asyncio.wait(set(server.server_state.tasks), timeout=2.0)


def bind(settings: Settings) -> list[socket.socket]:
    """The listening sockets: one for each address of the host.

    Raises:
        SettingsError: the name has no address, the port is taken or not allowed, or the door would stand open.
    """
    addresses = _addresses(settings.host)
    if not settings.api_keys and not all(ipaddress.ip_address(address).is_loopback for _, address in addresses):
        raise SettingsError(
            f"listening on {settings.host} without a key would open the server to everybody who can reach it: "
            "set OVERNIGHT_API_KEYS, or listen on 127.0.0.1"
        )
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, address in addresses:
            sockets.append(_bound(family, address, port))
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for one in sockets:
            one.close()
        raise SettingsError(_why_not_bound(error, settings)) from error
    return sockets


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"the host {host!r} has no address on this machine: choose another --host") from error
    wanted = {(family, str(where[0]).partition("%")[0]) for family, _, _, _, where in found}
    return sorted((pair for pair in wanted if pair[0] in (socket.AF_INET, socket.AF_INET6)), key=lambda pair: pair[0])


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _why_not_bound(error: OSError, settings: Settings) -> str:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken by another program: stop that one, or choose another --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where} is not allowed for this user: choose a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{settings.host} is no address of this machine: choose another --host"
    return f"cannot listen on {where}: {error.strerror}"
