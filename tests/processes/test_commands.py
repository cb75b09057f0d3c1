"""The command line against a real server, as one types it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes.books import lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess
from tests.support.waiting import eventually_sync

pytestmark = pytest.mark.processes


@pytest.fixture
def stub(shared_stub: StubProcess) -> StubProcess:
    return shared_stub


@pytest.fixture
def server(shared_server: Overnight) -> Overnight:
    return shared_server


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _command(server: Overnight, *args: object) -> tuple[list[str], dict[str, str]]:
    environ = {**server.environment(), "OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": server.key}
    return [sys.executable, "-P", "-m", "server.cli", *map(str, args)], environ


@pytest.fixture
def overnight(server: Overnight) -> Run:
    def run(*args: object) -> "subprocess.CompletedProcess[str]":
        command, environ = _command(server, *args)
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of("typed", 12)))
    return path


def test_from_a_file_to_its_results(overnight: Run, file: Path, tmp_path: Path) -> None:
    submitted = overnight("submit", file, "--metadata", "by=hand", "--watch", "--json")
    assert submitted.returncode == 0, submitted.stderr
    batch = json.loads(submitted.stdout)
    assert batch["metadata"] == {"by": "hand"}
    assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    fetched = overnight("download", batch["id"], "-o", tmp_path / "results")
    assert fetched.returncode == 0, fetched.stderr
    (path,) = fetched.stdout.splitlines()
    ids = [json.loads(line)["custom_id"] for line in Path(path).read_text().splitlines()]
    assert ids == [f"typed-{n}" for n in range(12)]
    assert overnight("ls").stdout.splitlines()[1].split()[:5] == [batch["id"], "completed", "12", "0", "12"]
    assert overnight("models").stdout == "stub-model\n"
    refused = overnight("cancel", batch["id"])
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)


def test_a_bad_file_fails_with_its_faults(overnight: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(lines_of("bad", 1)[0]) + "\n{]\n")
    ran = overnight("submit", path, "--watch")
    assert ran.returncode == 6
    assert "invalid_json_line" in ran.stderr


def test_ctrl_c_in_watch_only_detaches(server: Overnight, overnight: Run, stub: StubProcess, tmp_path: Path) -> None:
    batch = server.submit(lines_of("slow", 4, "[[stub latency=2]]"))
    command, environ = _command(server, "watch", batch.id)
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background starts deaf to it
    ) as watching:
        assert watching.stderr is not None
        eventually_sync(lambda: stub.stats()["in_flight"] > 0)
        assert watching.stderr.readline().startswith(batch.id)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130
        assert f"overnight watch {batch.id}" in watching.stderr.read()
    assert server.ended(batch.id).status == "completed"


def test_unknown_objects_are_3(overnight: Run) -> None:
    for args in (("get", "batch_0"), ("watch", "batch_0"), ("download", "batch_0"), ("get", "file-0")):
        ran = overnight(*args)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (3, "", 1), ran
