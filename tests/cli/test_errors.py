"""What goes wrong is one line on stderr, with an exit code that a script can branch on, and never a traceback."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ran
from tests.cli.fake import Fake, envelope
from tests.support.overnight import free_port

Overnight = Callable[..., Ran]


def one_line(text: str) -> bool:
    return text.count("\n") == 1 and text.startswith("overnight: ") and "Traceback" not in text


def test_no_server_is_4_and_says_how_to_start_one(overnight: Overnight, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    ran = overnight("ls")
    assert ran.code == 4
    assert one_line(ran.err)
    assert url in ran.err
    assert "overnight serve" in ran.err


def test_a_wrong_key_is_5_and_is_not_shown(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /batches/batch_1", (401, envelope("Incorrect API key provided.", "invalid_api_key")))
    ran = overnight("get", "batch_1")
    assert ran.code == 5
    assert one_line(ran.err)
    assert "OPENAI_API_KEY is not one of its keys" in ran.err
    assert "sk-test" not in ran.err


def test_a_missing_key_is_5_and_says_where_to_put_it(
    overnight: Overnight, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    fake.answer("GET /models", (401, envelope("You didn't provide an API key.")))
    ran = overnight("models")
    assert ran.code == 5
    assert "set OPENAI_API_KEY" in ran.err


@pytest.mark.parametrize("command", ["get", "watch", "download"])
def test_an_unknown_batch_is_3_with_the_servers_words(command: str, overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /batches/batch_9", (404, envelope("No batch found with id 'batch_9'.")))
    ran = overnight(command, "batch_9")
    assert ran.code == 3
    assert ran.err == "overnight: No batch found with id 'batch_9'.\n"


def test_a_page_that_is_no_api_is_explained_by_its_url(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /models", (404, b"<html>Not Found</html>"))
    ran = overnight("models")
    assert ran.code == 3
    assert "is it the right URL?" in ran.err
    fake.answer("GET /models", (404, envelope("Invalid URL (GET /models)")))
    assert "is it the right URL? Most end in /v1" in overnight("models").err


def test_a_batch_that_cannot_be_cancelled_is_1(overnight: Overnight, fake: Fake) -> None:
    refusal = envelope("Cannot cancel a batch with status 'completed'.")
    fake.answer("POST /batches/batch_1/cancel", (409, refusal))
    ran = overnight("cancel", "batch_1")
    assert ran.code == 1
    assert ran.err == "overnight: Cannot cancel a batch with status 'completed'.\n"


def test_a_server_in_trouble_is_1_with_its_words(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /models", (507, envelope("The disk is nearly full.")))
    ran = overnight("models")
    assert ran.code == 1
    assert one_line(ran.err)
    assert "The disk is nearly full." in ran.err


@pytest.mark.parametrize("command", ["submit", "validate"])
def test_an_unreadable_file_is_1_and_named(command: str, overnight: Overnight, fake: Fake, tmp_path: Path) -> None:
    ran = overnight(command, tmp_path / "none.jsonl")
    assert ran.code == 1
    assert one_line(ran.err)
    assert "none.jsonl: No such file or directory" in ran.err
    assert overnight(command, tmp_path).code == 1  # a folder


@pytest.mark.parametrize("command", ["submit", "validate"])
def test_a_pipe_is_refused_because_a_look_at_it_would_take_its_first_lines(
    command: str, overnight: Overnight, fake: Fake, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    ran = overnight(command, tmp_path / "pipe")
    assert ran.code == 1
    assert one_line(ran.err)
    assert "is a pipe or a device" in ran.err
    assert fake.seen == []


@pytest.mark.parametrize("flags", [[], ["--endpoint", "/v1/embeddings"]])
def test_an_empty_file_is_said_to_be_empty(flags: list[str], overnight: Overnight, fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    ran = overnight("submit", tmp_path / "empty.jsonl", *flags)
    assert ran.code == 1
    assert ran.err == f"overnight: {tmp_path}/empty.jsonl is empty: there is nothing to run\n"
    assert fake.seen == []


def test_two_dashes_end_the_flags_of_a_client_command(overnight: Overnight, fake: Fake) -> None:
    assert "-odd.jsonl: No such file or directory" in overnight("validate", "--", "-odd.jsonl").err


def test_closed_streams_are_no_bug(fake: Fake) -> None:
    fake.answer("GET /models", (200, {"data": [{"id": "m"}]}))
    for redirection in (">&-", "2>&-", ">&- 2>&-"):
        command = f"{sys.executable} -P -m server.cli models {redirection}"
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, ""), redirection


@pytest.mark.parametrize(
    "args",
    [
        ["sumbit", "x"],
        ["watch"],
        ["ls", "--limit", "0"],
        ["ls", "--", "--flag"],
        ["submit", "x", "--metadata", "novalue"],
        ["engine", "install"],
        ["serve", "--engine", "magic"],
        ["serve", "--port", "many"],
        ["serve"],
        ["serve", "--engine", "remote"],
        ["serve", "--model", "demo", "--upstream", "http://a/v1"],
        ["serve", "--engine", "echo", "--port", "70000"],
        ["ls", "--status", "done"],
        ["worker", "--upstream", "http://a/v1", "--upstream", "http://b/v1"],
    ],
)
def test_wrong_use_is_2(args: list[str], overnight: Overnight, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OVERNIGHT_MODEL", "OVERNIGHT_UPSTREAMS", "OVERNIGHT_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    ran = overnight(*args)
    assert ran.code == 2
    assert one_line(ran.err)


def test_serve_without_an_engine_says_what_to_do(overnight: Overnight) -> None:
    ran = overnight("serve")
    assert "--model demo" in ran.err
    assert "--upstream URL" in ran.err


def test_a_url_that_is_none_is_1(overnight: Overnight) -> None:
    for url in ("ftp://x/v1", "no url", "http://[::1/v1"):
        ran = overnight("models", "--base-url", url)
        assert ran.code == 1, url
        assert one_line(ran.err), ran.err


def test_hostile_text_reaches_the_terminal_as_escapes(overnight: Overnight, fake: Fake) -> None:
    fake.answer("GET /models", (200, {"data": [{"id": "a\x1b[2J\x9b31m[red]b\u202e\nc"}]}))
    assert overnight("models").out == "a\\x1b[2J\\x9b31m[red]b\\u202e\\nc\n"
    fake.answer("GET /models", (400, envelope("boo\x1b]0;title\x07")))
    assert overnight("models").err == "overnight: boo\\x1b]0;title\\x07\n"


def test_a_bug_is_one_line_too_and_a_traceback_only_on_request(
    overnight: Overnight, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answer("GET /models", (200, {"data": 5}))
    ran = overnight("models")
    assert ran.code == 1
    assert one_line(ran.err)
    monkeypatch.setenv("OVERNIGHT_DEBUG", "1")
    assert "Traceback" in overnight("models").err
