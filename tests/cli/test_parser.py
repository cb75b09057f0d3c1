"""What can be typed: the help is complete and quick, and flags become settings."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from server.cli import parser
from server.cli.serve import settings_from
from state.settings import Settings
from tests.cli.conftest import Ran

Overnight = Callable[..., Ran]

COMMANDS = (
    *("serve", "api", "orchestrator", "worker", "engine", "engine install", "submit", "watch", "ls", "get"),
    *("download", "cancel", "models", "validate"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, overnight: Overnight) -> None:
    ran = overnight(*command.split(), "--help")
    assert ran.code == 0
    assert ran.out.startswith("usage: overnight")


def test_help_imports_nothing_that_takes_time() -> None:
    check = "import sys\nfrom server.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    check += "print(sorted({'asyncio', 'httpx', 'sqlalchemy', 'rich', 'uvicorn', 'aiohttp'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_distribution(overnight: Overnight) -> None:
    from importlib.metadata import version

    assert overnight("--version").out == f"overnight {version('overnight')}\n"


def test_flags_are_settings_and_no_secret_is_a_flag() -> None:
    known = {item.name for item in fields(Settings)}
    flags = {name for names in parser.FLAGS.values() for name in names}
    assert flags <= known
    assert not [name for name in flags if re.search("key|secret|database", name)]


def test_flags_win_over_variables_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "overnight.toml"
    config.write_text('port = 1\nhost = "::1"\nmax_in_flight = 3\n')
    monkeypatch.setenv("OVERNIGHT_PORT", "2")
    monkeypatch.setenv("OVERNIGHT_HOST", "127.0.0.2")
    line = ["serve", "--config", str(config), "--port", "4", "--data", str(tmp_path), "--lease-ttl", "1.5"]
    line += ["--upstream", "http://a/v1", "--upstream", "http://b/v1", "--model-alias", "*=m", "--strict-window"]
    settings = settings_from(parser.parse([*line, "--", "--max-model-len", "16384", "--", "--port"]))
    assert (settings.port, settings.host, settings.max_in_flight) == (4, "127.0.0.2", 3)
    assert (settings.data, settings.lease_ttl, settings.strict_window) == (tmp_path, 1.5, True)
    assert (settings.upstreams, settings.model_aliases) == (("http://a/v1", "http://b/v1"), ("*=m",))
    assert settings.engine_args == ("--max-model-len", "16384", "--", "--port")


def test_a_line_without_flags_leaves_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for item in fields(Settings):
        monkeypatch.delenv(f"OVERNIGHT_{item.name.upper()}", raising=False)
    assert settings_from(parser.parse(["serve"])) == Settings()
