"""`overnight download`: whole files under their names, or none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from server.cli import download
from tests.cli.conftest import Ran
from tests.cli.fake import Fake, batch

Overnight = Callable[..., Ran]

OUTPUT = b'{"id":"batch_req_1"}\n' * 60_000
ERRORS = b'{"id":"batch_req_2"}\n'


@pytest.fixture
def done(fake: Fake) -> Fake:
    """A server with a completed batch and its two files."""
    files = {"output_file_id": "file-out", "error_file_id": "file-err"}
    fake.answer("GET /batches/batch_1", (200, batch("completed", completed=2, total=2, **files)))
    for file_id, data in (("file-out", OUTPUT), ("file-err", ERRORS)):
        fake.answer(f"GET /files/{file_id}", (200, {"id": file_id, "bytes": len(data)}))
        fake.answer(f"GET /files/{file_id}/content", (200, data))
    return fake


def test_both_files_arrive_and_their_paths_are_printed(overnight: Overnight, done: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    ran = overnight("download", "batch_1", "-o", folder)
    output, errors = folder / "batch_1_output.jsonl", folder / "batch_1_error.jsonl"
    assert (ran.code, ran.out) == (0, f"{output}\n{errors}\n")
    assert output.read_bytes() == OUTPUT
    assert errors.read_bytes() == ERRORS
    assert len(list(folder.iterdir())) == 2


def test_a_partial_file_is_completed_with_a_range(overnight: Overnight, done: Fake, tmp_path: Path) -> None:
    (tmp_path / ".batch_1_output.jsonl.file-out.part").write_bytes(OUTPUT[:1000])
    assert overnight("download", "batch_1", "-o", tmp_path).code == 0
    assert (tmp_path / "batch_1_output.jsonl").read_bytes() == OUTPUT
    ranges = [headers.get("Range") for call, headers, _ in done.seen if call == "GET /files/file-out/content"]
    assert ranges == ["bytes=1000-"]


def test_a_partial_file_that_is_complete_is_only_renamed(overnight: Overnight, done: Fake, tmp_path: Path) -> None:
    (tmp_path / ".batch_1_output.jsonl.file-out.part").write_bytes(OUTPUT)
    assert overnight("download", "batch_1", "-o", tmp_path).code == 0
    assert (tmp_path / "batch_1_output.jsonl").read_bytes() == OUTPUT


def test_a_broken_connection_is_taken_up_where_it_broke(overnight: Overnight, done: Fake, tmp_path: Path) -> None:
    real, calls = download._fetch_rest, 0

    def cutting(*args: object) -> str | None:
        nonlocal calls
        calls += 1
        done.cut_after = 500_000 if calls == 1 else None
        return real(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "_fetch_rest", cutting)
        ran = overnight("download", "batch_1", "-o", tmp_path)
    assert ran.code == 0
    assert (tmp_path / "batch_1_output.jsonl").read_bytes() == OUTPUT
    ranges = [headers.get("Range") for call, headers, _ in done.seen if call == "GET /files/file-out/content"]
    assert ranges[0] is None
    assert ranges[1] is not None


def test_bytes_that_differ_from_the_servers_checksum_are_thrown_away(
    overnight: Overnight, done: Fake, tmp_path: Path
) -> None:
    (tmp_path / ".batch_1_output.jsonl.file-out.part").write_bytes(b"x" * 1000)
    ran = overnight("download", "batch_1", "-o", tmp_path)
    assert ran.code == 1
    assert "came damaged" in ran.err
    assert list(tmp_path.iterdir()) == []
    assert overnight("download", "batch_1", "-o", tmp_path).code == 0


def test_a_batch_under_way_has_no_files_yet(overnight: Overnight, fake: Fake, tmp_path: Path) -> None:
    fake.answer("GET /batches/batch_1", (200, batch("in_progress", total=3)))
    ran = overnight("download", "batch_1", "-o", tmp_path)
    assert ran.code == 1
    assert "overnight watch batch_1" in ran.err


def test_a_batch_that_failed_has_faults_instead_of_files(overnight: Overnight, fake: Fake, tmp_path: Path) -> None:
    faults = [{"code": "empty_file", "message": "Nothing in it.", "param": None, "line": None}]
    fake.answer("GET /batches/batch_1", (200, batch("failed", errors={"data": faults})))
    ran = overnight("download", "batch_1", "-o", tmp_path)
    assert ran.code == 6
    assert "Nothing in it." in ran.err


def test_an_id_that_would_leave_the_folder_is_refused(overnight: Overnight, fake: Fake, tmp_path: Path) -> None:
    hostile = batch("completed", output_file_id="../../x")
    fake.answer("GET /batches/batch_1", (200, hostile))
    ran = overnight("download", "batch_1", "-o", tmp_path)
    assert ran.code == 2
    assert list(tmp_path.iterdir()) == []
