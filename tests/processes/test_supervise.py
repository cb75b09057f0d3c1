"""The supervisor: every role is started, restarted after its burial, and ended; a misconfigured one ends everything."""

import asyncio
import dataclasses
import errno
from pathlib import Path

import pytest

from server.roles import folder
from server.roles.supervise import Role, Supervisor, roles_for
from state.database import upgrade
from state.settings import Settings
from tests.support.waiting import eventually


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    folder.prepare(tmp_path)
    return Settings(data=tmp_path, engine="echo", port=0)


class Events:
    """What the supervisor has told."""

    def __init__(self) -> None:
        self.buried: list[str] = []
        self.pids: dict[str, int] = {}
        self.ready = False

    async def bury(self, holder: str) -> None:
        self.buried.append(holder)
        raise RuntimeError("the database is away")  # which must not keep the successor from starting

    def changed(self, pids: object) -> None:
        self.pids = dict(pids)  # type: ignore[call-overload]

    def is_ready(self) -> None:
        self.ready = True


def supervisor_of(settings: Settings, *roles: Role) -> tuple[Supervisor, Events]:
    events = Events()
    return (
        Supervisor(settings=settings, roles=roles, buried=events.bury, changed=events.changed, ready=events.is_ready),
        events,
    )


def test_there_is_a_worker_for_each_upstream(tmp_path: Path) -> None:
    one = roles_for(Settings(data=tmp_path, model="demo"))
    assert [(role.name, role.kind, role.upstream) for role in one] == [
        ("api", "api", None),
        ("orchestrator", "orchestrator", None),
        ("worker", "worker", None),
    ]
    two = roles_for(Settings(data=tmp_path, upstreams=("http://a/v1", "http://b/v1")))
    assert [(role.name, role.upstream) for role in two[2:]] == [
        ("worker-1", "http://a/v1"),
        ("worker-2", "http://b/v1"),
    ]


async def test_a_role_that_dies_is_buried_and_started_again_under_another_id(settings: Settings) -> None:
    supervisor, events = supervisor_of(settings, Role("worker-1", "no-such-command"))
    task = asyncio.create_task(supervisor.run())
    await eventually(lambda: len(events.buried) == 3)
    supervisor.stop()
    assert await task is True
    assert len(set(events.buried)) == len(events.buried)
    assert all(holder.startswith("worker-1-") for holder in events.buried)
    assert events.pids == {}


async def test_a_list_of_process_ids_that_cannot_be_written_stops_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: a full disk."""

    def full(pids: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Events, "changed", lambda self, pids: full(pids))
    supervisor, events = supervisor_of(settings, Role("worker", "no-such-command"))
    task = asyncio.create_task(supervisor.run())
    await eventually(lambda: len(events.buried) == 2)
    supervisor.stop()
    assert await task is True


async def test_a_misconfigured_role_ends_everything(settings: Settings) -> None:
    await upgrade(settings.database)
    open_door = dataclasses.replace(settings, host="0.0.0.0")
    supervisor, events = supervisor_of(open_door, Role("api", "api"), Role("orchestrator", "orchestrator"))
    assert await supervisor.run() is False
    assert len(events.buried) == 2
    assert not events.ready


async def test_it_is_ready_when_every_role_is(settings: Settings) -> None:
    await upgrade(settings.database)
    supervisor, events = supervisor_of(settings, Role("api", "api"), Role("orchestrator", "orchestrator"))
    task = asyncio.create_task(supervisor.run())
    await eventually(lambda: events.ready)
    assert set(events.pids) == {"api", "orchestrator"}
    supervisor.stop()
    assert await task is True
