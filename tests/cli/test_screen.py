"""Bars on a terminal, lines elsewhere; data on stdout alone."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from server.cli import screen
from tests.cli.fake import Fake, batch


def _watched_on_a_terminal(fake: Fake, more: Mapping[str, str]) -> tuple[str, str]:
    """stdout (a pipe) and stderr (a terminal) of `overnight watch`."""
    running = [(200, batch("in_progress", completed=n, total=4)) for n in range(4)]
    fake.answer("GET /batches/batch_1", *running, (200, batch("completed", completed=4, total=4)))
    ours, theirs = pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    environ = {**inherited, "TERM": "xterm-256color", "COLUMNS": "120", "OPENAI_BASE_URL": fake.url, **more}
    command = [sys.executable, "-m", "server.cli", "watch", "batch_1"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 4096):
                seen += piece
        except OSError:
            pass  # the terminal's other end has closed: Linux says EIO
        os.close(ours)
        assert process.stdout is not None
        return process.stdout.read(), seen.decode()


def test_a_terminal_sees_a_bar_with_counts_and_the_time_left(fake: Fake) -> None:
    out, err = _watched_on_a_terminal(fake, {})
    assert out == "batch_1 completed: 4 of 4 answered, 0 failed\n"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    assert re.search(r"\bin_progress [━╺╸]+ +[1-3]/4 .*ETA", plain)
    assert re.search(r"\x1b\[3[0-9]", err)  # in colour


@pytest.mark.parametrize(
    ("columns", "shows"),
    [
        ("80", r"in_progress [━╺╸]+ +2/4 +\S+/s +\d:\d\d:\d\d ETA \S\S:\S\S"),
        ("60", r"in_progress [━╺╸]+ +2/4 +\S+/s +\d:\d\d:\d\d ETA \S\S:\S\S"),
        ("20", r"2/4 in_progress"),
    ],
)
def test_the_numbers_are_whole_however_narrow_the_terminal(columns: str, shows: str, fake: Fake) -> None:
    _, err = _watched_on_a_terminal(fake, {"NO_COLOR": "1", "COLUMNS": columns})
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    assert re.search(shows, plain), plain
    assert "…" not in plain


def test_no_color_is_respected(fake: Fake) -> None:
    _, err = _watched_on_a_terminal(fake, {"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[3[0-9]", err)


def test_a_table_is_aligned_and_cannot_be_broken_by_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    screen.table(("ID", "NAME"), [("1", "a\nb"), ("22", "\x1b[1m")])
    assert capsys.readouterr().out == "ID  NAME\n1   a\\nb\n22  \\x1b[1m\n"


def test_times_are_the_persons_and_nothing_is_a_dash() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", screen.when(1_800_000_000))
    assert screen.when(None) == "-"
