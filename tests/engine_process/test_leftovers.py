"""A new worker ends what a dead one left behind, and nothing else (invariant 15)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.backends import guard, leftovers
from engine.backends.leftovers import Record, end_leftovers, members, parse_record
from tests.engine_process.conftest import HERE, Traces
from tests.support.waiting import eventually_sync

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into the process table of Linux")

#: A process id above what Linux gives by default, so that nothing has it.
NOBODY = 2**22 + 1


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "TERM_S", 0.5)
    monkeypatch.setattr(leftovers, "GUARD_ENDS_IN_S", 0.5)


@pytest.fixture
def orphan(traces: Traces) -> Iterator[Record]:
    """An engine that nobody guards, and the record that tells of it; its owner and guard are dead."""
    process = subprocess.Popen(
        [sys.executable, "-S", str(HERE / "fake_engine.py"), str(traces.folder)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    eventually_sync(traces.up)
    found = guard.read_process(process.pid)
    assert found is not None
    yield Record(
        boot_id=guard.boot_id(),
        engine=process.pid,
        engine_start=found.start,
        executable=guard.executable(process.pid),
        guard=NOBODY,
        guard_start=1,
        owner=NOBODY,
        owner_start=1,
        folder="",
    )
    traces.end()
    process.wait(5)


def write(place: Path, record: Record, **changes: Any) -> Path:
    place.mkdir(exist_ok=True)
    path = place / "engine.json"
    path.write_bytes(orjson.dumps(asdict(replace(record, **changes))))
    return path


async def test_a_left_over_engine_is_ended_and_its_record_removed(
    orphan: Record, traces: Traces, tmp_path: Path
) -> None:
    path = write(tmp_path / "engines", orphan)
    await end_leftovers(tmp_path / "engines")
    assert traces.alive() == []
    assert not path.exists()


async def test_also_when_its_first_process_is_dead_already(orphan: Record, traces: Traces, tmp_path: Path) -> None:
    os.kill(orphan.engine, signal.SIGKILL)
    os.waitpid(orphan.engine, 0)
    write(tmp_path / "engines", orphan)
    await end_leftovers(tmp_path / "engines")
    assert traces.alive() == []


async def test_an_engine_whose_worker_lives_is_left_alone(orphan: Record, traces: Traces, tmp_path: Path) -> None:
    other = guard.read_process(os.getppid())
    assert other is not None
    path = write(tmp_path / "engines", orphan, owner=other.pid, owner_start=other.start)
    await end_leftovers(tmp_path / "engines")
    assert len(traces.alive()) == 3
    assert path.exists()


async def test_what_we_have_started_ourselves_is_a_left_over_too(
    orphan: Record, traces: Traces, tmp_path: Path
) -> None:
    own = guard.read_process(os.getpid())
    assert own is not None
    write(tmp_path / "engines", orphan, owner=own.pid, owner_start=own.start)
    await end_leftovers(tmp_path / "engines")
    assert traces.alive() == []


async def test_the_folder_with_its_sockets_goes_too(orphan: Record, tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    (sockets / "s").touch()
    write(tmp_path / "engines", orphan, folder=str(sockets))
    await end_leftovers(tmp_path / "engines")
    assert not sockets.exists()


@pytest.mark.parametrize(
    "changes", [{"engine_start": 1}, {"boot_id": "another"}], ids=["another start time", "another boot"]
)
async def test_a_process_that_only_has_the_same_id_is_left_alone(
    orphan: Record, traces: Traces, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write(tmp_path / "engines", orphan, **changes)
    await end_leftovers(tmp_path / "engines")
    assert len(traces.alive()) == 3
    assert not path.exists()


def test_members_of_a_session_whose_leader_is_dead_must_look_like_the_engines() -> None:
    record = Record("boot", 10, 500, "/engine/python", 1, 1, 2, 1, "")
    table = [
        guard.Process(11, 1, 10, 10, 600, False),
        guard.Process(12, 1, 10, 10, 400, False),  # older than the engine
        guard.Process(13, 1, 10, 10, 600, False),  # another program
        guard.Process(14, 1, 99, 99, 600, False),  # another session
        guard.Process(15, 1, 10, 10, 600, True),  # a zombie
    ]
    executables = dict.fromkeys((11, 12, 14, 15), "/engine/python") | {13: "/bin/sh"}
    assert members(table, record, executables) == [11]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"engine": 1}', "null"])
def test_what_is_no_record_is_none(text: str) -> None:
    assert parse_record(text) is None


async def test_a_torn_record_is_removed(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text("{")
    await end_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []
