"""For tests in which processes die: an object that holds its reader up, and whether a process lives."""

import contextlib
import os
from pathlib import Path

import pytest

from state.objects.local import LocalStore

#: For tests that look at processes where Linux shows them.
needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


class StuckObject:
    """Replaces an object by a pipe that nobody writes to, so that whoever reads it is caught in the middle of its work."""

    def __init__(self, store: LocalStore, key: str) -> None:
        self._path = store.folder / key
        self._aside = self._path.with_name(self._path.name + ".aside")
        self._path.rename(self._aside)
        os.mkfifo(self._path)
        self._pipe: int | None = None

    def has_begun(self) -> bool:
        """Whether somebody is reading. The pipe opens for writing only then."""
        if self._pipe is None:
            with contextlib.suppress(OSError):
                self._pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        return self._pipe is not None

    def mend(self) -> None:
        """The object is as it was before."""
        self._aside.replace(self._path)
        if self._pipe is not None:
            os.close(self._pipe)


def lives(pid: int) -> bool:
    """Whether a process runs. One that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> list[int]:
    """The processes that this one started."""
    listed = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in listed for child in text.split()]


def peak_bytes(pid: int) -> int:
    """The most memory a process ever held."""
    (line,) = (s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
