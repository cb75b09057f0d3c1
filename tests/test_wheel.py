"""What is installed is the built wheel: it holds everything that the code reads beside itself."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as an installer would."""
    place = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    source = place / "source"
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(source)]
    subprocess.run(command, check=True)
    installed = place / "installed"
    with zipfile.ZipFile(next(place.glob("overnight-*.whl"))) as archive:
        archive.extractall(installed)
    return installed


def run(wheel: Path, code: str, cwd: Path) -> str:
    """Runs code that imports from the unpacked wheel and not from the checkout."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(wheel)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_only_our_three_packages_are_installed(wheel: Path) -> None:
    names = {entry.name for entry in wheel.iterdir() if not entry.name.endswith(".dist-info")}
    assert names == {"engine", "server", "state"}


def test_the_installed_code_is_the_wheels(wheel: Path, tmp_path: Path) -> None:
    assert run(wheel, "import state; print(state.__file__)", tmp_path).startswith(str(wheel))


def test_the_migrations_are_in_it(wheel: Path, tmp_path: Path) -> None:
    code = f"import asyncio; from state.database import upgrade; asyncio.run(upgrade('sqlite:///{tmp_path}/o.db'))"
    run(wheel, code, tmp_path)
    assert (tmp_path / "o.db").exists()


def test_the_engines_constraints_are_in_it(wheel: Path) -> None:
    assert (wheel / "engine" / "constraints-cpu.txt").read_text()


def test_the_command_says_its_version(wheel: Path, tmp_path: Path) -> None:
    assert run(wheel, "from server.cli import main; main(['--version'])", tmp_path).startswith("overnight ")
