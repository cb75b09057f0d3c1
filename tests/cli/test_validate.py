"""`overnight validate` says what the server would, without one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.support.overnight import request_line

Overnight = Callable[..., Ran]


def test_a_good_file_is_0(overnight: Overnight, tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps(request_line(f"r{n}", "hello")) + "\n" for n in range(3)))
    ran = overnight("validate", path)
    assert (ran.code, ran.out) == (0, f"{path}: 3 requests for /v1/chat/completions, no faults\n")


def test_every_fault_is_listed_with_its_line(overnight: Overnight, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps(request_line("a", "hello"))
    path.write_text(f"{good}\n\nnot json\n{good}\n")
    ran = overnight("validate", path)
    assert ran.code == 1
    assert [line.split()[:3] for line in ran.out.splitlines()[1:]] == [
        ["3", "invalid_json_line", "-"],
        ["4", "duplicate_custom_id", "custom_id"],
    ]
    told = json.loads(overnight("validate", path, "--json").out)
    assert [(entry["line"], entry["code"]) for entry in told["errors"]] == [
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
    ]
    assert told["valid"] is False


def test_the_endpoint_may_be_given(overnight: Overnight, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request_line("a", "hello")) + "\n")
    ran = overnight("validate", path, "--endpoint", "/v1/embeddings")
    assert ran.code == 1
    assert "invalid_url" in ran.out


def test_a_file_larger_than_an_upload_may_be_is_a_fault(
    overnight: Overnight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERNIGHT_MAX_FILE_BYTES", "10")
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(request_line("a", "hello")) + "\n")
    assert "file_too_large" in overnight("validate", path).out
