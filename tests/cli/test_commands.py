"""The client commands, one by one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from server.cli import watch
from tests.cli.conftest import Ran
from tests.cli.fake import Fake, batch, envelope
from tests.support.overnight import request_line

Overnight = Callable[..., Ran]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request_line("a", "hello")) + "\n")
    return path


def test_submit_uploads_creates_and_prints_the_id(overnight: Overnight, fake: Fake, file: Path) -> None:
    fake.answer("POST /files", (200, {"id": "file-1"}))
    fake.answer("POST /batches", (200, batch("validating")))
    ran = overnight("submit", file, "--window", "90m", "--metadata", "team=a=b", "--metadata", "run=1")
    assert (ran.code, ran.out) == (0, "batch_1\n")
    assert "overnight watch batch_1" in ran.err
    (_, headers, upload), (_, _, create) = fake.seen
    assert headers["Authorization"] == "Bearer sk-test"
    assert upload.index(b'name="purpose"') < upload.index(b'filename="in.jsonl"')
    assert file.read_bytes() in upload
    assert json.loads(create) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "90m",
        "metadata": {"team": "a=b", "run": "1"},
    }


def test_submit_takes_the_endpoint_from_the_flag_or_asks_for_it(
    overnight: Overnight, fake: Fake, tmp_path: Path
) -> None:
    fake.answer("POST /files", (200, {"id": "file-1"}))
    fake.answer("POST /batches", (200, batch("validating")))
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\n not json\n")
    ran = overnight("submit", path)
    assert ran.code == 2
    assert "--endpoint" in ran.err
    assert fake.seen == []  # nothing was uploaded in vain
    assert overnight("submit", path, "--endpoint", "/v1/embeddings").code == 0
    assert json.loads(fake.seen[-1][2])["endpoint"] == "/v1/embeddings"


def test_a_refused_upload_is_one_line(overnight: Overnight, fake: Fake, file: Path) -> None:
    fake.answer("POST /files", (400, envelope("File is too large.")))
    ran = overnight("submit", file)
    assert ran.code == 1
    assert ran.err.endswith("overnight: File is too large.\n")


def test_submit_watch_follows_to_the_end(overnight: Overnight, fake: Fake, file: Path) -> None:
    fake.answer("POST /files", (200, {"id": "file-1"}))
    fake.answer("POST /batches", (200, batch("validating")))
    running = batch("in_progress", completed=1, total=2)
    fake.answer("GET /batches/batch_1", (200, running), (200, batch("completed", completed=2, total=2)))
    ran = overnight("submit", file, "--watch")
    assert (ran.code, ran.out) == (0, "batch_1 completed: 2 of 2 answered, 0 failed\n")
    assert ran.err.splitlines()[-2:] == ["batch_1 in_progress", "batch_1 completed"]


@pytest.mark.parametrize("status", ["failed", "expired", "cancelled"])
def test_watch_ends_with_6_when_the_batch_ends_otherwise(status: str, overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /batches/batch_1", (200, batch(status, completed=3, failed=1, total=10)))
    ran = overnight("watch", "batch_1")
    assert (ran.code, ran.out) == (6, f"batch_1 {status}: 3 of 10 answered, 1 failed, 6 never run\n")


def test_watch_lists_the_faults_of_a_failed_batch(overnight: Overnight, fake: Fake) -> None:
    faults = [{"code": "invalid_url", "message": "The URL.", "param": "url", "line": 7}]
    fake.answer("GET /batches/batch_1", (200, batch("failed", errors={"object": "list", "data": faults})))
    ran = overnight("watch", "batch_1")
    assert "7     invalid_url  url    The URL." in ran.err


def test_watch_outlives_a_restart_of_the_server(overnight: Overnight, fake: Fake) -> None:
    down = (503, envelope("The server is starting."))
    end = batch("completed", completed=1, total=1)
    fake.answer("GET /batches/batch_1", (200, batch("in_progress", total=1)), down, down, (200, end))
    ran = overnight("watch", "batch_1", "--json")
    assert ran.code == 0
    assert json.loads(ran.out) == end
    assert "trying again" in ran.err


def test_watch_gives_up_on_a_server_that_stays_away(
    overnight: Overnight, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.3)
    fake.answer("GET /batches/batch_1", (200, batch("in_progress", total=1)), (503, envelope("No.")))
    assert overnight("watch", "batch_1").code == 1


def test_interrupting_watch_detaches_and_says_how_to_come_back(
    overnight: Overnight, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupted)
    fake.answer("GET /batches/batch_1", (200, batch("in_progress", total=1)))
    ran = overnight("watch", "batch_1")
    assert ran.code == 130
    assert "overnight watch batch_1" in ran.err
    assert all(call.startswith("GET") for call, _, _ in fake.seen)


def test_ls_is_a_table_or_json_over_all_pages(overnight: Overnight, fake: Fake) -> None:
    first, second = batch("completed", completed=2, total=2), batch("failed") | {"id": "batch_0"}
    fake.answer("GET /batches?limit=100", (200, {"data": [first], "has_more": True}))
    fake.answer("GET /batches?limit=100&after=batch_1", (200, {"data": [second], "has_more": False}))
    lines = overnight("ls").out.splitlines()
    assert lines[0].split() == ["ID", "STATUS", "DONE", "FAILED", "TOTAL", "CREATED", "ENDPOINT"]
    assert lines[1].split()[:5] == ["batch_1", "completed", "2", "0", "2"]
    assert json.loads(overnight("ls", "--json").out) == [first, second]
    assert json.loads(overnight("ls", "--json", "--status", "failed").out) == [second]
    assert json.loads(overnight("ls", "--json", "--limit", "1").out) == [first]


def test_get_shows_a_batch_or_a_file(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /batches/batch_1", (200, batch("in_progress", completed=1, total=2, metadata={"a": "b"})))
    fake.answer("GET /files/file-1", (200, {"id": "file-1", "bytes": 12}))
    shown = dict(line.split(maxsplit=1) for line in overnight("get", "batch_1").out.splitlines())
    assert shown["status"] == "in_progress"
    assert shown["request_counts"] == "total=2 completed=1 failed=0"
    assert shown["metadata"] == "a=b"
    assert json.loads(overnight("get", "file-1", "--json").out) == {"id": "file-1", "bytes": 12}


def test_an_id_cannot_leave_its_route(overnight: Overnight, fake: Fake) -> None:
    overnight("get", "../files?limit=1")
    assert fake.seen[0][0] == "GET /batches/..%2Ffiles%3Flimit%3D1"


def test_cancel_prints_where_the_batch_stands(overnight: Overnight, fake: Fake) -> None:
    fake.answer("POST /batches/batch_1/cancel", (200, batch("cancelling", completed=1, total=3)))
    assert overnight("cancel", "batch_1").out == "batch_1 cancelling: 1 of 3 answered, 0 failed\n"
