"""The object store in a local folder, for a machine that has nothing else.

An object is written to a temporary file in `.tmp` of the same folder tree, synced, renamed to its key, and the folder
synced: after `commit` it survives a power cut, and before it nobody sees a byte (invariant 11). A writer holds a lock on
its temporary file, so that whoever opens the store next can tell a dead writer's leavings from work under way in another
process, whatever its pid means there.
"""

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiofiles
from aiofiles.threadpool import wrap

from state.objects import Stored
from state.records import NotFound, OutOfSpace, Unavailable

R = TypeVar("R")

#: Pieces in which objects are read, at most; writes are gathered to a quarter of it.
PIECE = 1024 * 1024
_GATHER = PIECE // 4
_TEMPORARY = ".tmp"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(?:/[A-Za-z0-9][A-Za-z0-9_.-]{0,127}){0,9}")
_PREFIX = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_.-]{0,127}/){0,9}(?:[A-Za-z0-9][A-Za-z0-9_.-]{0,127})?")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class LocalStore:
    """Objects as files under one folder. Threads of its own do the disk's work; safe to share by processes."""

    def __init__(self, folder: Path, *, min_free_bytes: int = 0, threads: int = 8) -> None:
        """Makes the folder (mode 0700) where it is missing and sweeps what dead writers left.

        `min_free_bytes` stops streams (uploads, result files) while less is free on the disk. `put` may use that
        reserve: results of requests that were already run are worth more than new work.
        """
        self.folder = folder.absolute()
        self._min_free = min_free_bytes
        self._temporary = self.folder / _TEMPORARY
        with _as_ours(str(folder), self.free_bytes):
            _make_folders(self._temporary)
            _sweep(self._temporary)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="objects")

    def writer(self, key: str) -> "LocalWriter":
        return self._new_writer(key, self._min_free)

    async def put(self, key: str, data: bytes) -> Stored:
        async with self._new_writer(key, 0) as upload:
            await upload.write(data)
            return await upload.commit()

    def _new_writer(self, key: str, min_free: int) -> "LocalWriter":
        return LocalWriter(
            key, self._path(key), temporary=self._temporary, pool=self._pool, min_free=min_free, free=self.free_bytes
        )

    async def get(self, key: str) -> bytes:
        path = self._path(key)
        with self._errors(key):
            async with aiofiles.open(path, "rb", executor=self._pool) as file:
                return await file.read()

    async def read(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        path = self._path(key)
        with self._errors(key):
            async with aiofiles.open(path, "rb", buffering=0, executor=self._pool) as file:
                await file.seek(start)
                while end is None or start < end:
                    piece = await file.read(PIECE if end is None else min(PIECE, end - start))
                    if not piece:
                        return
                    start += len(piece)
                    yield piece

    async def fetch(self, key: str, path: Path) -> None:
        """A hard link where source and target share a file system, else a copy. Nobody may write to it."""
        source = self._path(key)
        with self._errors(key):
            await self._run(lambda: _link_or_copy(source, path))

    async def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        with self._errors("objects to delete"):
            await self._run(lambda: _delete(paths, self.folder))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"not a prefix of object keys: {prefix!r}")
        folders = [self.folder / prefix.rpartition("/")[0]]
        while folders:
            folder = folders.pop()
            with self._errors(prefix):
                entries = await self._run(functools.partial(_entries, folder))
            for path, is_folder in entries:
                key = path.relative_to(self.folder).as_posix()
                if is_folder and (key.startswith(prefix) or prefix.startswith(f"{key}/")):
                    folders.append(path)
                elif not is_folder and key.startswith(prefix):
                    yield key

    async def check(self) -> None:
        if not await self._run(lambda: os.access(self._temporary, os.W_OK | os.X_OK)):
            raise Unavailable(f"the object folder {self.folder} is missing or cannot be written to")

    def free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None

    async def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _path(self, key: str) -> Path:
        """The file of a key. The pattern admits no empty part, no leading dot and no absolute path, so nothing escapes.

        Raises:
            ValueError: the key is none of ours.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"not an object key: {key!r}")
        return self.folder / key

    async def _run(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """The errors of reading. A missing object is only believed where the store itself is there (no lost mount)."""
        with _as_ours(what, self.free_bytes):
            try:
                yield
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                if not self._temporary.is_dir():
                    raise
                raise NotFound(what) from error


class LocalWriter:
    """An upload into a temporary file. Made by `LocalStore.writer`; the file appears with the first bytes."""

    def __init__(
        self,
        key: str,
        target: Path,
        *,
        temporary: Path,
        pool: ThreadPoolExecutor,
        min_free: int,
        free: Callable[[], int | None],
    ) -> None:
        self._key, self._target, self._temporary, self._pool = key, target, temporary, pool
        self._min_free, self._free = min_free, free
        self._waiting = bytearray()
        self._digest = hashlib.sha256()
        self._size = 0
        self._path: Path | None = None
        self._raw: BufferedWriter | None = None
        self._file: Any = None

    async def __aenter__(self) -> Self:
        self._refuse_if_short()
        with _as_ours(self._key, self._free):
            self._path, self._raw = await self._run(lambda: _create(self._temporary))
            self._file = wrap(self._raw, executor=self._pool)
        return self

    async def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) >= _GATHER:
            await self._flush()

    async def commit(self) -> Stored:
        raw, path = self._raw, self._path
        if raw is None or path is None:
            raise RuntimeError("an object is written within `async with`, and committed once")
        await self._flush()
        self._raw = self._path = None
        with _as_ours(self._key, self._free):
            await self._run(lambda: _publish(raw, path, self._target))
        return Stored(self._size, self._digest.hexdigest())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raw, path = self._raw, self._path
        self._raw = self._path = None
        if raw is not None and path is not None:
            await self._run(lambda: _abandon(raw, path))

    async def _flush(self) -> None:
        if not self._waiting:
            return
        self._refuse_if_short()
        data, self._waiting = self._waiting, bytearray()
        self._size += len(data)
        with _as_ours(self._key, self._free):
            await asyncio.gather(self._run(lambda: self._digest.update(data)), self._file.write(data))

    def _refuse_if_short(self) -> None:
        free = self._free()
        if self._min_free and free is not None and free < self._min_free:
            raise OutOfSpace(
                f"{free} bytes are free on the disk of the object folder, and {self._min_free} are kept in reserve",
                needed=self._min_free,
                free=free,
            )

    async def _run(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@contextlib.contextmanager
def _as_ours(key: str, free: Callable[[], int | None]) -> Iterator[None]:
    """Turns the system's errors into the store's."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutOfSpace(f"no space left for {key}", needed=0, free=free() or 0) from error
        raise Unavailable(f"the object folder fails for {key}: {error.strerror or error}") from error


def _create(temporary: Path) -> tuple[Path, BufferedWriter]:
    """A new temporary file, locked. A sweep may fall between creation and lock; then the file has no name any more."""
    while True:
        path = temporary / uuid.uuid4().hex
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return path, os.fdopen(handle, "wb")
        os.close(handle)


def _publish(raw: BufferedWriter, path: Path, target: Path) -> None:
    """Makes a written file durable under its key; on failure nothing is left."""
    try:
        raw.flush()
        os.fsync(raw.fileno())
        _move(path, target)
    except BaseException:
        _abandon(raw, path)
        raise
    raw.close()
    _sync_folder(target.parent)


def _move(path: Path, target: Path) -> None:
    """Renames; a deleter may take an empty folder away between its making and the rename, hence again."""
    for attempt in range(10):
        _make_folders(target.parent)
        try:
            os.replace(path, target)
        except FileNotFoundError:
            if attempt == 9 or not path.exists():
                raise
        else:
            return


def _abandon(raw: BufferedWriter, path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # what is buffered may not fit on a full disk; nobody wants it any more
        raw.close()


def _make_folders(folder: Path) -> None:
    """Makes a folder and its parents, mode 0700, each one durable."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            one.mkdir(mode=0o700)
            _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(temporary: Path) -> None:
    """Removes temporary files that no living writer holds the lock of."""
    for path in temporary.iterdir():
        try:
            handle = os.open(path, os.O_WRONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)


def _link_or_copy(source: Path, target: Path) -> None:
    if not target.parent.is_dir():
        raise OSError(errno.EIO, f"there is no folder {target.parent}")
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        with open(source, "rb") as data, open(target, "xb") as copy:
            shutil.copyfileobj(data, copy, PIECE)


def _delete(paths: list[Path], root: Path) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
    for folder in {path.parent for path in paths}:
        with contextlib.suppress(OSError):  # not empty, or gone already
            while folder != root:
                folder.rmdir()
                folder = folder.parent


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    try:
        with os.scandir(folder) as entries:
            return [(Path(e.path), e.is_dir(follow_symlinks=False)) for e in entries if e.name != _TEMPORARY]
    except (FileNotFoundError, NotADirectoryError):
        return []
