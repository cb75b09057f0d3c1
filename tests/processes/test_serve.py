"""`overnight serve`: starts, serves, refuses a second one, stops in time, and leaves nothing behind."""

import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes.books import assert_all_answered, lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess
from tests.support.waiting import eventually_sync

pytestmark = pytest.mark.processes


def test_a_batch_runs_and_the_stop_is_clean(server: Overnight) -> None:
    lines = lines_of("plain", 20)
    batch = server.ended(server.submit(lines).id)
    assert_all_answered(server, batch, lines)
    assert stat.S_IMODE(server.data.stat().st_mode) == 0o700
    assert set(server.pids()) == {"supervisor", "api", "orchestrator", "worker"}
    assert server.stop() == 0
    server.nothing_left()  # invariant 15


def test_the_banner_says_where_and_how(server: Overnight, stub: StubProcess) -> None:
    eventually_sync(lambda: "ready for batches: stub-model" in server.text)
    assert f"Overnight is listening on {server.base_url}" in server.text
    assert str(server.data) in server.text
    assert stub.url in server.text
    assert f"export OPENAI_BASE_URL={server.base_url}" in server.text


def test_a_second_serve_on_the_same_folder_is_refused(server: Overnight) -> None:
    second = Overnight(server.data.parent, engine="echo")
    second.log = server.log.with_name("second.log")
    second.start(wait=False)
    assert second.process is not None
    assert second.process.wait(15) == 1
    assert f"is in use by overnight serve, process {server.pids()['supervisor']} on " in second.text
    assert second.text.count("\n") == 1
    server.ready()  # and the first did not notice


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Overnight(tmp_path, port=port, engine="echo")
        server.start(wait=False)
        assert server.process is not None
        assert server.process.wait(15) == 1
    assert server.text == f"overnight: port {port} on 127.0.0.1 is taken; choose another with --port\n"
    server.nothing_left()


def test_another_interface_without_keys_is_refused_and_nothing_keeps_running(tmp_path: Path) -> None:
    server = Overnight(tmp_path, engine="echo", host="0.0.0.0")
    server.start(wait=False)
    assert server.process is not None
    assert server.process.wait(20) in (1, 2)
    assert "OVERNIGHT_API_KEYS" in server.text
    assert "Traceback" not in server.text
    server.nothing_left()


def test_keys_are_demanded_and_are_on_no_command_line(tmp_path: Path) -> None:
    with Overnight(tmp_path, engine="echo", api_keys=["sk-very-secret"], upstream_api_key="up-secret") as server:
        lines = lines_of("keyed", 2, model="echo")
        assert server.ended(server.submit(lines).id).status == "completed"
        assert not [line for line in server.processes().values() if "secret" in line]
        server.key = "wrong"
        command = [sys.executable, "-m", "server.cli", "ls", f"--base-url={server.base_url}"]
        environ = {**server.environment(), "OPENAI_API_KEY": "wrong"}
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == 5, ran
    assert "secret" not in server.text


def test_sigterm_drains_within_ten_seconds_and_the_rest_runs_after_a_restart(
    server: Overnight, stub: StubProcess
) -> None:
    # prompts run in lexicographic order, so the slow ones are under way while the quick ones pass
    quick, slow = lines_of("quick", 30), lines_of("a-slow", 3, "[[stub latency=60 times=1]]")
    batch = server.submit([*slow, *quick])
    server.until(batch.id, lambda seen: seen.request_counts.completed >= 10)
    asked_at = time.monotonic()
    assert server.stop(within=12) == 0
    assert time.monotonic() - asked_at < 10.5
    server.nothing_left()
    server.start()
    assert_all_answered(server, server.ended(batch.id), [*slow, *quick])


def test_a_second_signal_kills_at_once(server: Overnight, stub: StubProcess) -> None:
    server.submit(lines_of("slow", 4, "[[stub latency=60]]"))
    eventually_sync(lambda: stub.stats()["in_flight"] == 4)
    server.kill("worker", number=signal.SIGSTOP)  # one that will not drain
    assert server.process is not None
    server.process.send_signal(signal.SIGINT)
    eventually_sync(lambda: "stopping" in server.text)
    server.process.send_signal(signal.SIGINT)
    server.process.wait(5)
    server.nothing_left()
