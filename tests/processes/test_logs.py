"""A record is one line, whatever it holds; and no key is in it."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server import logs
from state.settings import Settings

Logged = Callable[[str], str]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Logged]:
    """Sets logging up in a format, logs one record that is full of traps, and returns what was written."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def log(form: str) -> str:
        written = io.StringIO()
        monkeypatch.setattr("sys.stderr", written)
        logs.set_up(Settings(data=tmp_path, log_format=form, api_keys=("sk-secret", 'sk"two')), role="api")
        try:
            raise ValueError("line one\n2026 forged line")
        except ValueError:
            fields = {
                "request_id": "req_1",
                "filename_sent": "a\nb\x1b[31m.jsonl",
                "key": "sk-secret",
                "other": 'sk"two',
            }
            logging.getLogger("server.files").warning("refused %s", "x\ny", extra=fields, exc_info=True)
        return written.getvalue()

    yield log
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_json_is_one_object_a_line_with_the_fields(logged: Logged) -> None:
    (line,) = logged("json").splitlines()
    record = json.loads(line)
    assert (record["level"], record["role"], record["logger"]) == ("warning", "api", "server.files")
    assert (record["message"], record["request_id"]) == ("refused x\ny", "req_1")
    assert record["filename_sent"] == "a\nb\x1b[31m.jsonl"
    assert "forged line" in record["exception"]
    assert record["time"].endswith("Z")


def test_text_cannot_be_made_to_look_like_another_record(logged: Logged) -> None:
    first, *rest = logged("text").splitlines()
    assert "refused x\\ny" in first
    assert 'request_id=req_1 filename_sent="a\\nb\\u001b[31m.jsonl"' in first
    assert all(line.startswith("    ") for line in rest)  # the traceback, set in
    assert "\x1b" not in first


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_key_is_blotted_out(form: str, logged: Logged) -> None:
    text = logged(form)
    assert "sk-secret" not in text
    assert "two" not in text
    assert "***" in text
