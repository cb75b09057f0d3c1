"""Commands run in this process, against a server that a test scripts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from server.cli import main, watch
from tests.cli.fake import Fake


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with Fake().running() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        monkeypatch.setattr(watch, "FIRST_LOOK_S", 0.01)
        yield server


@pytest.fixture
def overnight(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `overnight ARGS` and returns its exit code and what it printed."""

    def run(*args: object) -> Ran:
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
