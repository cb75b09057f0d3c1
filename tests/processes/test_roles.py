"""The roles alone: an api with an orchestrator beside it, and workers that come and go, on one folder."""

import os
import signal
from pathlib import Path

import pytest

from tests.processes.books import assert_all_answered, lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess
from tests.support.waiting import eventually_sync

pytestmark = pytest.mark.processes


def _pid_of(server: Overnight, words: str) -> int:
    """The process whose command line ends so, once it is there."""
    return int(
        eventually_sync(
            lambda: next((pid for pid, line in server.processes().items() if line.strip().endswith(words)), None)
        )
    )


def test_an_api_accepts_batches_that_a_later_worker_runs(stub: StubProcess, tmp_path: Path) -> None:
    api = Overnight(tmp_path, command="api")
    worker = Overnight(tmp_path, command="worker", upstreams=[stub.url])
    worker.log = tmp_path / "worker.log"
    try:
        api.start(engine=False)
        lines = lines_of("patient", 10)
        batch = api.submit(lines)
        assert api.batch(batch.id).status == "validating"  # no model is known yet
        worker.start(wait=False)
        assert_all_answered(api, api.ended(batch.id), lines)
        assert worker.stop() == 0
        assert api.stop() == 0
        worker.nothing_left()
        api.nothing_left()
    finally:
        worker.destroy()
        api.destroy()


def test_the_orchestrator_beside_an_api_is_kept_running_and_ends_with_it(tmp_path: Path) -> None:
    api = Overnight(tmp_path, command="api")
    try:
        api.start(engine=False)
        before = _pid_of(api, "server.cli orchestrator")
        os.kill(before, signal.SIGKILL)
        eventually_sync(lambda: _pid_of(api, "server.cli orchestrator") != before)
        assert api.process is not None
        api.process.kill()
        api.process.wait()
        api.nothing_left()  # invariant 15
    finally:
        api.destroy()


def test_a_role_that_a_person_runs_ends_at_once_when_told_twice(stub: StubProcess, tmp_path: Path) -> None:
    api, worker = Overnight(tmp_path, command="api"), Overnight(tmp_path, command="worker", upstreams=[stub.url])
    worker.log = tmp_path / "worker.log"
    try:
        api.start(engine=False)
        worker.start(wait=False)
        api.submit(lines_of("slow", 4, "[[stub latency=60]]"))
        eventually_sync(lambda: stub.stats()["in_flight"] == 4)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGSTOP)  # both wait for it to go on: then it hears one after the other
        for number in (signal.SIGINT, signal.SIGTERM):
            worker.process.send_signal(number)
        worker.process.send_signal(signal.SIGCONT)
        assert worker.process.wait(5) == 130
    finally:
        worker.destroy()
        api.destroy()


def test_an_api_without_an_orchestrator_plans_nothing(tmp_path: Path) -> None:
    api = Overnight(tmp_path, command="api", args=["--no-orchestrator"])
    try:
        api.start(engine=False)
        assert len(api.processes()) == 1
        assert api.stop() == 0
    finally:
        api.destroy()
