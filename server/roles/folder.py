"""The data folder of an embedded Overnight: private, on a disk, and held by one `serve` at a time.

The lock is a `flock` on a descriptor that the children inherit. So it is held until the last of them has ended, and a
`serve` that starts right after another was killed cannot declare leases dead that are not.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from state.records import OvernightError

#: How long the children of a killed `serve` may take to end, in seconds: their drain, and a little.
ORPHANS_S = 15.0

#: How long the holder of a folder may take to be seen as gone: the kernel needs a moment to end a killed process.
DYING_S = 1.0


#: What is in every data folder that was in use.
_OURS = ("overnight.lock", "overnight.db")


class FolderInUse(OvernightError):
    """Another `serve` has this data folder."""


class FolderUnusable(OvernightError):
    """The data folder cannot be made, or written to."""


def prepare(folder: Path) -> None:
    """Makes the folder, for this user alone (mode 0700), and writes to it once.

    A folder that was there is made private if it is empty or Overnight's own. Any other (somebody's home, `/tmp`) keeps its
    mode: what Overnight puts there is private by itself.

    Raises:
        FolderUnusable: with the reason in one line.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not any(folder.iterdir()) or any((folder / name).exists() for name in _OURS):
            folder.chmod(0o700)
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        probe = folder / "run" / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise FolderUnusable(
            f"the data folder {folder} cannot be used: {error.strerror}; choose another with --data"
        ) from error


def lock(folder: Path, *, say: Callable[[str], None] = lambda text: None) -> int:
    """Takes the folder and returns the descriptor that holds it.

    When the `serve` that took it is gone and only its children are left, they are given `ORPHANS_S` to end.

    Raises:
        FolderInUse: says who has it.
    """
    descriptor = os.open(folder / "overnight.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    began = time.monotonic()
    told = False
    while not _try(descriptor, folder):
        owner = _owner(descriptor)
        gone = _gone(owner)
        if time.monotonic() > began + (ORPHANS_S if gone else DYING_S):
            os.close(descriptor)
            raise FolderInUse(_who(folder, owner))
        if gone and not told:
            say("waiting for the processes of an earlier serve to end")
            told = True
        time.sleep(0.05)
    os.ftruncate(descriptor, 0)
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": int(time.time())})
    os.pwrite(descriptor, text.encode(), 0)
    return descriptor


@contextlib.contextmanager
def briefly(folder: Path, name: str) -> Iterator[None]:
    """Holds a lock of this name while the context lasts, after waiting for it: for migrations at the start of a role."""
    descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_pids(folder: Path, pids: dict[str, int]) -> None:
    """Records which process is which, in `run/pids.json`, for people and for tests."""
    target = folder / "run" / "pids.json"
    temporary = target.with_suffix(".new")
    temporary.write_text(json.dumps(pids, indent=2) + "\n")
    temporary.replace(target)


def remove_pids(folder: Path) -> None:
    """There are no such processes any more."""
    (folder / "run" / "pids.json").unlink(missing_ok=True)


def _try(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise FolderUnusable(f"the data folder {folder} cannot be locked: {error.strerror}") from error
    return True


def _owner(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        owner = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(owner, dict):
            return owner
    return {}


def _gone(owner: dict[str, Any]) -> bool:
    """Whether the owner certainly lives no more: on another machine nobody can tell.

    A zombie is gone: it only waits for a parent that may never ask.
    """
    if owner.get("host") != socket.gethostname() or not isinstance(owner.get("pid"), int):
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(OSError):  # no /proc on this system: it lives as far as we know
        state = Path(f"/proc/{owner['pid']}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("Z", "X")
    return False


def _who(folder: Path, owner: dict[str, Any]) -> str:
    if not owner:
        return f"the data folder {folder} is in use by another overnight serve"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.get("started", 0)))
    return (
        f"the data folder {folder} is in use by overnight serve, process {owner.get('pid')} on {owner.get('host')}, "
        f"since {since}; stop that one, or choose another folder with --data"
    )
