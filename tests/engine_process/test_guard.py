"""No process of an engine outlives its owner, whichever of them is killed (invariant 15)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends import guard
from tests.engine_process.conftest import HERE, Traces
from tests.support.waiting import eventually_sync

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into the process table of Linux")


class Guarded:
    """A fake engine under a guard, of which this test is the owner."""

    def __init__(self, traces: Traces, record: Path, *how: str, stop: float = 3.0) -> None:
        self.traces, self.record = traces, record
        command = [sys.executable, "-I", "-S", guard.__file__, "--record", str(record), "--stop", str(stop), "--"]
        self.process = subprocess.Popen(
            [*command, sys.executable, "-S", str(HERE / "fake_engine.py"), str(traces.folder), *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        eventually_sync(traces.up)

    def lose_owner(self) -> None:
        """What the guard sees of a killed worker: the pipe ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


@pytest.fixture
def guarded(traces: Traces, record: Path) -> Iterator[Guarded]:
    running = Guarded(traces, record)
    yield running
    running.lose_owner()
    running.process.wait(10)


def test_when_the_owner_is_gone_the_whole_engine_ends(guarded: Guarded) -> None:
    guarded.lose_owner()
    assert guarded.process.wait(5) == 128 + signal.SIGTERM
    assert guarded.traces.alive() == []
    assert not guarded.record.exists()


def test_sigterm_ends_the_whole_engine(guarded: Guarded) -> None:
    guarded.process.send_signal(signal.SIGTERM)
    guarded.process.wait(5)
    assert guarded.traces.alive() == []


def test_when_the_engines_first_process_is_killed_the_others_end(guarded: Guarded) -> None:
    os.kill(guarded.traces.pid("engine"), signal.SIGKILL)
    assert guarded.process.wait(5) == 128 + signal.SIGKILL
    assert guarded.traces.alive() == []


def test_a_core_that_dies_is_not_the_engines_end(guarded: Guarded) -> None:
    """Its server says what is the matter; the guard only follows the first process."""
    os.kill(guarded.traces.pid("core"), signal.SIGKILL)
    eventually_sync(lambda: guarded.traces.pid("core") not in guarded.traces.alive())
    assert guarded.process.poll() is None


def test_an_engine_that_ignores_sigterm_is_killed_within_the_bound(traces: Traces, record: Path) -> None:
    guarded = Guarded(traces, record, "stubborn", stop=1.0)
    began = time.monotonic()
    guarded.lose_owner()
    assert guarded.process.wait(10) == 128 + signal.SIGKILL
    assert traces.alive() == []
    assert time.monotonic() - began < 8  # far above the bound of 1 s: the machine may be busy


def test_a_stray_that_left_the_session_and_lost_its_parents_is_found(traces: Traces, record: Path) -> None:
    guarded = Guarded(traces, record, "stray", "stubborn", stop=1.0)
    os.kill(traces.pid("core"), signal.SIGKILL)
    os.kill(traces.pid("engine"), signal.SIGKILL)
    guarded.process.wait(10)
    guarded.lose_owner()
    assert traces.alive() == []


def test_the_killed_guard_takes_the_engines_first_process_along(guarded: Guarded) -> None:
    guarded.process.kill()
    eventually_sync(lambda: guarded.traces.pid("engine") not in guarded.traces.alive())


def test_the_record_says_what_was_started(guarded: Guarded) -> None:
    eventually_sync(guarded.record.exists)
    facts = json.loads(guarded.record.read_text())
    engine, own = guard.read_process(facts["engine"]), guard.read_process(os.getpid())
    assert engine is not None
    assert own is not None
    assert facts["engine"] == guarded.traces.pid("engine") == engine.session
    assert facts["engine_start"] == engine.start
    assert (facts["owner"], facts["owner_start"]) == (os.getpid(), own.start)
    assert facts["boot_id"] == guard.boot_id()


def test_an_engine_that_has_started_runs_its_own_program_and_not_the_guards_any_more() -> None:
    """What the record says of it: by that its processes are known once the first of them is dead."""
    for _ in range(5):
        pid = guard.start_engine(["/bin/sleep", "60"])
        program = guard.executable(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert program == str(Path("/bin/sleep").resolve())


def test_an_engine_runs_also_where_no_record_can_be_written(traces: Traces, tmp_path: Path) -> None:
    """As on a full disk (invariant 13)."""
    guarded = Guarded(traces, tmp_path / "no such folder" / "record.json")
    guarded.lose_owner()
    assert guarded.process.wait(5) == 128 + signal.SIGTERM
    assert traces.alive() == []


def test_a_program_that_is_not_there_is_said_so(tmp_path: Path, record: Path) -> None:
    command = [sys.executable, "-I", "-S", guard.__file__, "--record", str(record), "--stop", "1", "--", "/no/such"]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "cannot start /no/such: No such file or directory\n")


def test_the_name_of_a_process_may_hold_anything() -> None:
    tail = " ".join(str(n) for n in range(6, 21))
    line = f"42 (a) b) c) S 1 2 3 0 -1 {tail} 777 0 0"
    fields = line.rpartition(")")[2].split()
    process = guard.parse_stat(line)
    assert (process.pid, process.parent, process.group, process.session) == (42, 1, 2, 3)
    assert process.start == int(fields[19])


def test_descendants_are_found_however_deep_and_zombies_are_none() -> None:
    def process(pid: int, parent: int, *, zombie: bool = False) -> guard.Process:
        return guard.Process(pid, parent, 0, 0, 0, zombie)

    table = [process(2, 1), process(3, 2), process(4, 3, zombie=True), process(5, 4), process(6, 9), process(1, 0)]
    assert sorted(p.pid for p in guard.descendants(table, 1)) == [2, 3, 5]
