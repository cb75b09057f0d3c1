"""Fake engines, and what is known of processes."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.backends import guard
from state.settings import Settings

HERE = Path(__file__).parent
NAMES = ("engine", "core", "worker")


class Traces:
    """The folder into which a fake engine writes its process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[int, int] = {}

    def pid(self, name: str) -> int:
        """0 while it has written none."""
        try:
            pid = int((self.folder / name).read_text() or 0)
        except FileNotFoundError:
            return 0
        process = guard.read_process(pid)
        if process is not None:
            self._seen.setdefault(pid, process.start)
        return pid

    def up(self) -> bool:
        """Whether all three processes of the fake engine run."""
        return all(self.pid(name) for name in NAMES)

    def alive(self) -> list[int]:
        """Which of the processes ever seen still live."""
        found = {p.pid: p for p in guard.read_processes() if not p.zombie}
        return [pid for pid, start in self._seen.items() if pid in found and found[pid].start == start]

    def end(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Traces]:
    folder = tmp_path / "traces"
    folder.mkdir()
    traces = Traces(folder)
    yield traces
    traces.end()


@pytest.fixture
def fake_python(tmp_path: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that behaves as an engine's python does; how, is said by the variable FAKE_VLLM."""
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable} -S\n" + (HERE / "fake_vllm.py").read_text())
    program.chmod(0o700)
    monkeypatch.setenv("FAKE_FOLDER", str(traces.folder))
    monkeypatch.setenv("FAKE_VLLM", "")
    return program


@pytest.fixture
def settings(tmp_path: Path, fake_python: Path) -> Any:
    """Makes settings of a worker that runs the fake vLLM."""

    def make(**more: Any) -> Settings:
        return Settings(**{"data": tmp_path / "data", "engine_python": str(fake_python), "model": "org/model", **more})

    return make
