"""`overnight serve` and `overnight api` as a whole: the folder, the database, the supervisor, and what a person is told.

This is the embedded default: one machine, a SQLite file and a folder, and no server to install.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from server import logs
from server.roles import folder
from server.roles.supervise import Role, Supervisor
from server.roles.unblock import keep_writable
from state import jobs, models, shards, workers
from state.database import Database, upgrade
from state.models import ANY
from state.records import OvernightError, Unavailable
from state.settings import Settings

log = logging.getLogger(__name__)


class PortTaken(OvernightError):
    """Another program listens there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to supervise. `sole` means that no other `serve` may use the folder, so that all old leases are dead."""

    settings: Settings
    roles: tuple[Role, ...]
    sole: bool


def run(plan: Plan) -> int:
    """Runs the roles until SIGTERM or Ctrl-C, and returns the exit code.

    Raises:
        FolderUnusable, FolderInUse, PortTaken, SettingsError: each with one line that says what to do.
    """
    settings = replace(plan.settings, data=plan.settings.data.expanduser().absolute())
    logs.set_up(settings, role="supervisor")
    folder.prepare(settings.data)
    kept = (folder.lock(settings.data, say=tell),) if plan.sole else ()
    settings = replace(settings, port=free_port(settings.host, settings.port))
    return asyncio.run(_run(replace(plan, settings=settings), kept))


async def _run(plan: Plan, kept: tuple[int, ...]) -> int:
    settings = plan.settings
    await migrate(settings)
    database = Database.open(settings.database)
    announcer = _Announcer(settings, database, with_engine=any(role.kind == "worker" for role in plan.roles))
    try:
        if plan.sole and not settings.database_url:
            await _bury(database, None)  # nobody else can hold one: the lock is ours
        supervisor = Supervisor(
            settings=settings,
            roles=plan.roles,
            kept=kept,
            buried=lambda holder: _bury(database, holder),
            changed=lambda pids: _record(settings, plan, pids),
            ready=announcer.listening,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: _told_to_stop(supervisor))
        well = await _supervised(plan, supervisor, database)
    finally:
        await announcer.close()
        await database.close()
        if plan.sole:
            folder.remove_pids(settings.data)
    return 0 if well else 1


async def _supervised(plan: Plan, supervisor: Supervisor, database: Database) -> bool:
    if not plan.sole or plan.settings.database_url:
        return await supervisor.run()
    beside = [
        asyncio.create_task(keep_writable(plan.settings.data / "overnight.db", supervisor)),
        asyncio.create_task(drop_old_aliases(database, engines=sum(role.kind == "worker" for role in plan.roles))),
    ]
    try:
        return await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def drop_old_aliases(database: Database, *, engines: int) -> None:
    """Once all of this `serve`'s engines have named their models, the aliases of earlier ones are no settings any more.

    Until then they stay: an engine that is still away may be the one that a name is meant for.
    """
    began = time.time()
    while True:
        with contextlib.suppress(Unavailable):
            known = await workers.listed(database, now=time.time())
            if sum(worker.state == "ready" for worker in known) >= engines:
                await models.forget_aliases(database, before=began)
                return
        await asyncio.sleep(1.0)


async def migrate(settings: Settings) -> None:
    """Brings the database to this version's schema; roles that start together take turns."""
    if not settings.sqlite:
        await upgrade(settings.database)
        return
    folder.prepare(settings.data)
    with folder.briefly(settings.data, "migration"):
        await upgrade(settings.database)


def free_port(host: str, port: int) -> int:
    """The port, after a look that it is free; for 0, one that is.

    Raises:
        PortTaken: with what to do about it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "is taken" if port and "in use" in str(error) else f"cannot be used: {error.strerror}"
            raise PortTaken(f"port {port} on {host} {reason}; choose another with --port") from error
        return int(probe.getsockname()[1])


def url_of(host: str, port: int) -> str:
    """The base URL under which a program on this machine reaches what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def tell(text: str) -> None:
    """A line for the person at the terminal."""
    print(f"overnight: {logs.one_line(text)}", file=sys.stderr, flush=True)


def _told_to_stop(supervisor: Supervisor) -> None:
    tell("stopping: what is finished is being committed (again to stop at once)")
    supervisor.stop()


async def _bury(database: Database, holder: str | None) -> None:
    """Ends the leases of one holder, or of all, and forgets it: a dead worker is not ready for batches."""
    await shards.expire_leases(database, holder=holder)
    await jobs.expire_leases(database, holder=holder)
    await workers.forget(database, worker_id=holder)


def _record(settings: Settings, plan: Plan, pids: Mapping[str, int]) -> None:
    if plan.sole:
        folder.write_pids(settings.data, {"supervisor": os.getpid(), **pids})


class _Announcer:
    """Says on stderr where the server is, and then when its engine is ready, or why it is not."""

    def __init__(self, settings: Settings, database: Database, *, with_engine: bool) -> None:
        self._settings, self._database, self._with_engine = settings, database, with_engine
        self._task: asyncio.Task[None] | None = None

    def listening(self) -> None:
        """The roles run: the banner, and the wait for the engine."""
        settings = self._settings
        url = url_of(settings.host, settings.port)
        key = "OPENAI_API_KEY=<one of your keys>" if settings.api_keys else "OPENAI_API_KEY=any"
        lines = [f"Overnight is listening on {url}", f"  data    {settings.data}"]
        if self._with_engine:
            lines.append(f"  engine  {_engine_of(settings)}")
            self._task = asyncio.create_task(self._await_engine())
        for line in (*lines, f"  to use  export OPENAI_BASE_URL={url} {key}"):
            print(logs.one_line(line), file=sys.stderr, flush=True)

    async def _await_engine(self) -> None:
        """Polls the workers' own words until one is ready; a cause of trouble is told once."""
        told = None
        while True:
            try:
                known = await workers.listed(self._database, now=time.time())
            except Unavailable:
                known = []
            if any(worker.state == "ready" for worker in known):
                tell(f"ready for batches: {listed({name for worker in known for name in worker.models})}")
                return
            cause = next((worker.cause for worker in known if worker.cause), None)
            if cause and cause != told:
                tell(f"the engine cannot take work yet: {cause}")
                told = cause
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def listed(names: Set[str]) -> str:
    """The names of models for a person; `*` is said in words."""
    own = ", ".join(sorted(names - {ANY}))
    if ANY in names:
        return f"{own} (and files that name any other model)" if own else "any model"
    return own or "any model"


def _engine_of(settings: Settings) -> str:
    """What answers the requests, in a few words."""
    if settings.engine_kind == "remote":
        return ", ".join(map(_public, settings.upstreams))
    return f"vLLM with {settings.model}" if settings.engine_kind == "vllm" else settings.engine_kind


def _public(url: str) -> str:
    """The URL without a user's name and password."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
