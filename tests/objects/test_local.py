"""What the local store promises beyond the protocol: modes, sweeping, full disks, other file systems."""

import asyncio
import errno
import multiprocessing
import os
import shutil
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from state.objects.local import LocalStore
from state.objects.open import open_store
from state.records import NotFound, OutOfSpace, SettingsError, Unavailable
from state.settings import Settings


def leavings(folder: Path) -> list[Path]:
    return list((folder / ".tmp").iterdir())


async def test_folders_are_0700_and_objects_0600(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "deep" / "objects")
        await store.put("files/file-1", b"secret")
    finally:
        os.umask(old)
    for folder in ("deep", "deep/objects", "deep/objects/.tmp", "deep/objects/files"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep/objects/files/file-1").stat().st_mode) == 0o600
    await store.close()


def _write_until_killed(folder: Path, ready: Connection) -> None:
    async def run() -> None:
        async with LocalStore(folder).writer("files/file-1") as upload:
            await upload.write(b"x" * 1_000_000)
            ready.send(True)
            await asyncio.Event().wait()

    asyncio.run(run())


async def test_opening_sweeps_a_dead_writers_file_but_no_living_ones(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_write_until_killed, args=(tmp_path, there))
    process.start()
    try:
        assert await asyncio.to_thread(here.poll, 30)
        await LocalStore(tmp_path).close()
        assert len(leavings(tmp_path)) == 1
    finally:
        process.kill()
        process.join()
    await LocalStore(tmp_path).close()
    assert leavings(tmp_path) == []


async def test_a_stream_is_refused_below_the_reserve_but_a_small_object_is_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, min_free_bytes=1 << 62)
    with pytest.raises(OutOfSpace) as caught:
        async with store.writer("files/file-1"):
            pass
    assert caught.value.needed == 1 << 62
    assert 0 < caught.value.free < 1 << 62
    await store.put("batches/b1/s0/e1/seg-0", b"result")
    assert leavings(tmp_path) == []
    await store.close()


@pytest.mark.parametrize("call", ["fsync", "replace"])
async def test_a_full_disk_is_out_of_space_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = LocalStore(tmp_path)
    await store.put("files/file-0", b"makes the folder")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutOfSpace):
        await store.put("files/file-1", b"x" * 1_000_000)
    monkeypatch.undo()
    assert leavings(tmp_path) == []
    assert [key async for key in store.list("")] == ["files/file-0"]
    await store.close()


async def test_a_really_full_device_is_out_of_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    real = os.open

    def open_full(path: object, flags: int, mode: int = 0o777) -> int:
        return real("/dev/full", os.O_WRONLY) if flags & os.O_EXCL else real(path, flags, mode)  # type: ignore[arg-type]

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "open", open_full)
    with pytest.raises(OutOfSpace):
        await store.put("files/file-1", b"x" * 1_000_000)
    await store.close()


async def test_fetch_copies_where_it_cannot_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_device(*args: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    store = LocalStore(tmp_path / "objects")
    await store.put("files/file-1", b"copied")
    monkeypatch.setattr(os, "link", other_device)
    await store.fetch("files/file-1", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"copied"
    await store.close()


async def test_a_lost_folder_is_unavailable_and_not_a_missing_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "objects")
    await store.put("files/file-1", b"x")
    shutil.rmtree(tmp_path / "objects")
    with pytest.raises(Unavailable):
        await store.get("files/file-1")
    with pytest.raises(Unavailable):
        await store.put("files/file-2", b"x")
    with pytest.raises(Unavailable):
        await store.check()
    await store.close()


async def test_fetching_into_a_missing_folder_is_not_a_missing_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "objects")
    await store.put("files/file-1", b"x")
    with pytest.raises(Unavailable, match="there is no folder"):
        await store.fetch("files/file-1", tmp_path / "gone" / "copy")
    with pytest.raises(NotFound):
        await store.fetch("files/file-2", tmp_path / "copy")
    await store.close()


async def test_deleting_takes_empty_folders_along(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("batches/b1/e1/shard-0", b"x")
    await store.delete(["batches/b1/e1/shard-0"])
    assert [path.name for path in tmp_path.iterdir()] == [".tmp"]
    await store.close()


async def test_the_setting_names_a_folder(tmp_path: Path) -> None:
    store = open_store(Settings(data=tmp_path))
    await store.put("files/file-1", b"x")
    assert (tmp_path / "objects" / "files" / "file-1").exists()
    await store.close()
    with pytest.raises(SettingsError, match="s3://bucket"):
        open_store(Settings(data=tmp_path, objects_url="s3://bucket/prefix"))
