"""Wake-ups between the processes of one machine, so that a small batch need not wait for the next poll.

A wake-up is a hint and never carries truth: losing one costs a poll interval (`POLL_S`), nothing else. Each listener binds
a Unix datagram socket in a private folder; a notice is an empty datagram to every listener of a topic.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import Literal, Protocol

from state.records import SettingsError
from state.settings import Settings

#: A Unix socket's path has 107 bytes at most (103 on macOS); the name in the folder needs 28 of them.
_LONGEST_FOLDER = 75

Topic = Literal["orchestrator", "worker"]

#: How often a listener looks by itself, in seconds: the longest a lost wake-up can cost.
POLL_S = 1.0


class Waker(Protocol):
    """Tells the other processes that there is something to do."""

    def notify(self, topic: Topic) -> None:
        """Wakes every listener of the topic. Never blocks, never raises."""
        ...

    async def wait(self, timeout: float) -> bool:
        """Waits for a notice to this listener; False when the time ran out. Notices meanwhile count as one."""
        ...

    def close(self) -> None:
        """Stops listening."""
        ...


class LocalWaker:
    """Datagram sockets in a folder of mode 0700. `topic` None makes a waker that only notifies."""

    def __init__(self, folder: Path, topic: Topic | None = None, *, temporary: bool = False) -> None:
        """`temporary`: the folder goes with the last listener."""
        self._temporary = temporary
        self._folder = folder
        _make_private(folder)
        self._out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._in: socket.socket | None = None
        self._path: Path | None = None
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        if topic is not None:
            self._path = folder / f"{topic}-{os.getpid()}-{secrets.token_hex(3)}"
            self._in = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            try:
                self._in.bind(str(self._path))
            except FileNotFoundError:  # another one closed just now and took the folder with it
                _make_private(folder)
                self._in.bind(str(self._path))

    def notify(self, topic: Topic) -> None:
        for path in self._folder.glob(f"{topic}-*"):
            try:
                self._out.sendto(b"", str(path))
            except BlockingIOError:
                pass  # its queue is full: it has notices enough
            except ConnectionRefusedError:  # its process is gone
                path.unlink(missing_ok=True)
            except OSError:
                pass

    async def wait(self, timeout: float) -> bool:
        if self._in is None:
            await asyncio.sleep(timeout)
            return False
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._in.fileno(), self._drain)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._woken.wait()
        woken = self._woken.is_set()
        self._woken.clear()
        return woken

    def _drain(self) -> None:
        assert self._in is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._in.recv(1)
                self._woken.set()

    def close(self) -> None:
        if self._in is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._in.fileno())
            self._in.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            if self._temporary:
                with contextlib.suppress(OSError):  # not empty: others still listen
                    self._folder.rmdir()
        self._out.close()


def _make_private(folder: Path) -> None:
    """Makes the folder, or checks that the one there is ours alone: in a shared temporary folder it may be another's.

    Raises:
        SettingsError: it is not.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SettingsError(
            f"{folder} belongs to somebody else, or is open to others; remove it or choose another data folder"
        )


class PollingWaker:
    """For processes that share no folder: nobody is told, everybody looks every `POLL_S`."""

    def notify(self, topic: Topic) -> None:
        return None

    async def wait(self, timeout: float) -> bool:
        await asyncio.sleep(timeout)
        return False

    def close(self) -> None:
        return None


def open_waker(settings: Settings, topic: Topic | None = None) -> Waker:
    """The waker for this deployment: datagrams where the processes share a data folder, else polling.

    A socket's path may be no longer than 107 bytes, so a deep data folder gets a short one of its own in the temporary
    folder, named by a digest of the data folder and the user.
    """
    if not settings.sqlite:
        return PollingWaker()
    folder = settings.data.absolute() / "run"
    deep = len(os.fsencode(folder)) > _LONGEST_FOLDER
    if deep:
        digest = hashlib.sha256(f"{os.getuid()}:{folder}".encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"overnight-{digest}"
    return LocalWaker(folder, topic, temporary=deep)
