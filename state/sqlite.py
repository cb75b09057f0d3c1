"""What is particular to SQLite as a file on this machine: where it may lie, its journal, its copy before an upgrade.

Ledger rule 7: the journal is a WAL, whose index is memory shared between processes. Network and user-space file systems do
not share memory faithfully, so a file there could be damaged without a sign; such folders are refused.
"""

import contextlib
import os
import re
import sqlite3
from pathlib import Path

from sqlalchemy.engine import URL

from state.records import SettingsError

#: The first version with UPDATE .. RETURNING.
OLDEST = (3, 35, 0)
#: How long a connection waits for another one's transaction, in seconds.
BUSY_TIMEOUT_S = 30.0
_MOUNTS = Path("/proc/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how a mount point's spaces are written there
_REFUSED = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse", "fuseblk"})


def file_of(url: URL) -> Path:
    """The file that a URL such as `sqlite+aiosqlite:////var/lib/overnight/overnight.db` names.

    Raises:
        SettingsError: the URL names no file: a database in memory would be another one for every connection.
    """
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise SettingsError(f"{url}: the database must be a file, such as sqlite+aiosqlite:////path/to/overnight.db")
    return Path(url.database).absolute()


def check_version(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    """Refuses a SQLite library without UPDATE .. RETURNING.

    Raises:
        SettingsError: it is older than 3.35.
    """
    if version < OLDEST:
        found = ".".join(str(part) for part in version)
        raise SettingsError(f"SQLite {found} is too old: Overnight needs 3.35 or newer; use a newer Python build")


def prepare(path: Path) -> None:
    """Creates the file if need be, for its owner only, and switches its journal to WAL. Blocking.

    Raises:
        SettingsError: the library is too old, or the file system cannot be trusted with a WAL.
    """
    check_version()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kind = file_system(path, _read_mounts())
    if kind in _REFUSED or kind.startswith("fuse."):
        raise SettingsError(
            f"{path.parent} is on a {kind} file system, where SQLite's journal can be damaged; "
            "choose a folder on a local disk, or use PostgreSQL (OVERNIGHT_DATABASE_URL)"
        )
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with contextlib.closing(_connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")


def revision(path: Path) -> str | None:
    """The migration that an existing file is at; None for a new one. Blocking."""
    with contextlib.closing(_connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone() if tables else None
        return str(row[0]) if row else None


def copy(path: Path, suffix: str) -> Path:
    """Copies the database beside itself, as `<name>.bak-<suffix>`, through SQLite's own backup. Blocking.

    The copy appears under its name only when it is whole; a disk that is too full for it is given back its room.
    """
    target = path.with_name(f"{path.name}.bak-{suffix}")
    draft = path.with_name(f"{target.name}.{os.getpid()}")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        with contextlib.closing(_connect(path)) as source, contextlib.closing(_connect(draft)) as copied:
            source.backup(copied)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return target


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that `path` lies on, by the text of /proc/mounts; empty where that is not known.

    The deepest mount point above the path counts, and of several at the same point the last.
    """
    real, best, kind = path.resolve(), -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        if real.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def _read_mounts() -> str:
    try:
        return _MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:  # macOS has no such list
        return ""


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
