"""The supervisor behind `overnight serve`: starts the roles as processes, keeps them running, ends them all.

Each child hangs on a socket pair, its lifeline: it says "ready" there, and ends by itself when the supervisor is gone
(invariant 15). A child that dies is started again, after its leases have been ended: it is certainly dead, so its work
need not wait for a ttl. A child that ends as misconfigured stops everything, because starting it again changes nothing.
"""

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from server.roles.child import MISCONFIGURED
from server.roles.handover import Orders, environment
from state.settings import Settings

#: The whole stop must be done within ten seconds; what is left after this many is killed.
DRAIN_S = 9.5

#: Pauses before a dead child is started again, in seconds: the first, and the longest they double up to.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0

#: A child that lived so many seconds was well; the next pause is the first again.
WELL_AFTER_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Role:
    """A process to keep running. `kind` is the command that runs it: api, orchestrator or worker."""

    name: str
    kind: str
    upstream: str | None = None


@dataclass(slots=True)
class Child:
    """A role's present process. `holder` is the id under which it takes leases: a new one at every start."""

    role: Role
    holder: str
    process: asyncio.subprocess.Process
    heard: float
    """When it last gave a sign of life, on the loop's clock."""
    lifeline: asyncio.Task[None] | None = None


def roles_for(settings: Settings) -> tuple[Role, ...]:
    """One of each role, and a worker for every upstream."""
    upstreams: tuple[str | None, ...] = settings.upstreams if settings.engine_kind == "remote" else (None,)
    names = ("worker",) if len(upstreams) == 1 else tuple(f"worker-{n + 1}" for n in range(len(upstreams)))
    workers = tuple(Role(name, "worker", upstream) for name, upstream in zip(names, upstreams, strict=True))
    return (Role("api", "api"), Role("orchestrator", "orchestrator"), *workers)


class Supervisor:
    """Keeps `roles` running until it is told to stop.

    `buried` is called with the holder id of every child that has ended, before its successor starts; `changed` with the
    process ids whenever they change; `ready` once, when every role has said so.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        roles: Iterable[Role],
        buried: Callable[[str], Awaitable[None]],
        changed: Callable[[Mapping[str, int]], None],
        ready: Callable[[], None],
        kept: tuple[int, ...] = (),
    ) -> None:
        self._settings, self._roles, self._kept = settings, tuple(roles), kept
        self._buried, self._changed, self._ready = buried, changed, ready
        self._children: dict[str, Child] = {}
        self._seen_ready: set[str] = set()
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._misconfigured = False

    def stop(self) -> None:
        """The first call drains: every role commits what is finished and ends. The second kills."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    def end_silent(self, seconds: float) -> None:
        """Kills the children that have given no sign of life for so long: stopped, or stuck in the kernel."""
        now = asyncio.get_running_loop().time()
        for child in self._children.values():
            if now - child.heard > seconds:
                log.warning("killing %s, which is stopped and keeps the others from working", child.role.name)
                _signal(child, signal.SIGKILL)

    async def run(self) -> bool:
        """Runs until stopped; False if a child could not work as configured (it has said why)."""
        ending = asyncio.create_task(self._end_all())
        async with asyncio.TaskGroup() as group:
            for role in self._roles:
                group.create_task(self._keep(role), name=role.name)
        ending.cancel()
        return not self._misconfigured

    async def _keep(self, role: Role) -> None:
        """One role's life: start, wait, bury, pause, again."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_S
        while not self._stop.is_set():
            started = loop.time()
            try:
                child = await self._start(role)
            except OSError as error:  # no memory, no process ids: it may pass
                log.warning("%s cannot be started: %s", role.name, error.strerror)
                await self._sleep(LONGEST_PAUSE_S)
                continue
            code = await child.process.wait()
            del self._children[role.name]
            self._tell_pids()
            await self._bury(child)
            if self._stop.is_set():
                return
            if code == MISCONFIGURED:
                self._misconfigured = True
                self._stop.set()
                return
            pause = FIRST_PAUSE_S if loop.time() - started > WELL_AFTER_S else pause
            log.warning("%s ended (%s), starting it again in %.1f s", role.name, _how(code), pause)
            await self._sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _start(self, role: Role) -> Child:
        ours, theirs = socket.socketpair()
        holder = f"{role.name}-{secrets.token_hex(4)}"
        orders = Orders(self._settings, holder, theirs.fileno(), self._kept, role.upstream)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                # -P: a folder named `server` where the user stands must not be taken for ours
                *(sys.executable, "-P", "-m", "server.cli", role.kind),
                env=environment(orders, os.environ),
                pass_fds=(theirs.fileno(), *self._kept),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                start_new_session=True,  # Ctrl-C is the supervisor's to hear, and to pass on in order
            )
        child = Child(role, holder, process, asyncio.get_running_loop().time())
        self._children[role.name] = child
        self._tell_pids()
        if self._stop.is_set():  # told to stop while starting: after `_end_all` has signalled the others
            _signal(child, signal.SIGTERM)
        child.lifeline = asyncio.create_task(self._listen(child, ours))
        return child

    async def _listen(self, child: Child, ours: socket.socket) -> None:
        """Holds our end of the lifeline open for as long as the child lives, and hears it say that it is ready."""
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        with ours, suppress(ConnectionError):
            while said := await loop.sock_recv(ours, 64):
                child.heard = loop.time()
                if b"ready" in said:
                    self._note_ready(child.role.name)

    def _note_ready(self, name: str) -> None:
        before = len(self._seen_ready)
        self._seen_ready.add(name)
        if before < len(self._seen_ready) == len(self._roles):
            self._ready()

    async def _bury(self, child: Child) -> None:
        try:
            await self._buried(child.holder)
        except Exception:
            log.warning("could not end the leases of %s; they end by themselves", child.holder, exc_info=True)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    async def _end_all(self) -> None:
        """Waits for the word to stop; then SIGTERM to all at once, for no role needs another to end well."""
        await self._stop.wait()
        for child in self._children.values():
            _signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._kill.wait()
        except TimeoutError:
            pass
        for child in self._children.values():
            log.warning("killing %s, which has not ended", child.role.name)
            _signal(child, signal.SIGKILL)

    def _tell_pids(self) -> None:
        try:
            self._changed({name: child.process.pid for name, child in self._children.items()})
        except OSError as error:  # a full disk, say: the roles go on without the list (invariant 13)
            log.warning("the process ids cannot be written down: %s", error.strerror)


def _signal(child: Child, number: signal.Signals) -> None:
    try:
        child.process.send_signal(number)
    except ProcessLookupError:
        return  # it has just ended


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
