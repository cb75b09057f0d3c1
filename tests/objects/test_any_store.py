"""What every object store promises."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from state.objects import ObjectStore
from state.records import NotFound

MIB = 1024 * 1024


async def keys(store: ObjectStore, prefix: str) -> list[str]:
    return sorted([key async for key in store.list(prefix)])


async def test_what_was_put_is_what_is_got(any_store: ObjectStore) -> None:
    stored = await any_store.put("batches/batch_1/e1/shard-0", b"bytes\x00\xff")
    assert await any_store.get("batches/batch_1/e1/shard-0") == b"bytes\x00\xff"
    assert (stored.size, stored.sha256) == (7, hashlib.sha256(b"bytes\x00\xff").hexdigest())


async def test_an_empty_object_is_an_object(any_store: ObjectStore) -> None:
    assert (await any_store.put("files/file-empty", b"")).size == 0
    assert await any_store.get("files/file-empty") == b""
    assert [piece async for piece in any_store.read("files/file-empty")] == []


async def test_a_stream_of_odd_pieces_arrives_whole_with_its_digest(any_store: ObjectStore) -> None:
    data = os.urandom(3 * MIB + 17)
    async with any_store.writer("files/file-1") as upload:
        for start in range(0, len(data), 70_001):
            await upload.write(data[start : start + 70_001])
        stored = await upload.commit()
    assert (stored.size, stored.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert await any_store.get("files/file-1") == data


async def test_nothing_is_visible_before_the_commit(any_store: ObjectStore) -> None:
    async with any_store.writer("files/file-1") as upload:
        await upload.write(b"x" * MIB)
        with pytest.raises(NotFound):
            await any_store.get("files/file-1")
        assert await keys(any_store, "") == []
        await upload.commit()
    assert await keys(any_store, "") == ["files/file-1"]


async def test_leaving_without_commit_leaves_nothing(any_store: ObjectStore) -> None:
    async def upload_and_fail() -> None:
        async with any_store.writer("files/file-1") as upload:
            await upload.write(b"x" * MIB)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await upload_and_fail()
    with pytest.raises(NotFound):
        await any_store.get("files/file-1")
    assert await keys(any_store, "files") == []


async def test_a_cancelled_upload_leaves_nothing(any_store: ObjectStore) -> None:
    started = asyncio.Event()

    async def upload_for_ever() -> None:
        async with any_store.writer("files/file-1") as upload:
            while True:
                await upload.write(b"x" * MIB)
                started.set()

    task = asyncio.create_task(upload_for_ever())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await keys(any_store, "") == []


@pytest.mark.parametrize(
    ("start", "end"), [(0, None), (0, 0), (0, 1), (5, 5), (5, 2 * MIB), (MIB - 1, None), (3 * MIB, None)]
)
async def test_a_range_is_read_exactly(any_store: ObjectStore, start: int, end: int | None) -> None:
    data = os.urandom(2 * MIB + 9)
    await any_store.put("files/file-1", data)
    pieces = [piece async for piece in any_store.read("files/file-1", start, end)]
    assert b"".join(pieces) == data[start:end]
    assert all(0 < len(piece) <= MIB for piece in pieces)


async def test_a_missing_object_is_not_found(any_store: ObjectStore, tmp_path: Path) -> None:
    await any_store.put("files/file-2", b"x")
    for key in ("files/file-1", "files/file-2/deeper", "files", "nowhere/at/all"):
        with pytest.raises(NotFound):
            await any_store.get(key)
        with pytest.raises(NotFound):
            _ = [piece async for piece in any_store.read(key)]
        with pytest.raises(NotFound):
            await any_store.fetch(key, tmp_path / "copy")


async def test_fetch_places_a_readable_file(any_store: ObjectStore, tmp_path: Path) -> None:
    await any_store.put("files/file-1", b"fetched")
    await any_store.fetch("files/file-1", tmp_path / "spooled")
    await any_store.delete(["files/file-1"])
    assert (tmp_path / "spooled").read_bytes() == b"fetched"


async def test_delete_removes_what_is_there_and_does_not_mind_the_rest(any_store: ObjectStore) -> None:
    for key in ("batches/b1/a", "batches/b1/b", "batches/b2/a"):
        await any_store.put(key, b"x")
    await any_store.delete(["batches/b1/a", "batches/b1/b", "batches/b1/never", "batches/b3/x"])
    assert await keys(any_store, "") == ["batches/b2/a"]
    await any_store.put("batches/b1/a", b"again")
    assert await any_store.get("batches/b1/a") == b"again"


async def test_list_gives_the_keys_below_a_prefix(any_store: ObjectStore) -> None:
    for key in ("batches/b1/e1/shard-0", "batches/b1/e1/shard-1", "batches/b1/e2/shard-0", "batches/b10/e1/index"):
        await any_store.put(key, b"x")
    assert await keys(any_store, "batches/b1/") == [
        "batches/b1/e1/shard-0",
        "batches/b1/e1/shard-1",
        "batches/b1/e2/shard-0",
    ]
    assert len(await keys(any_store, "batches/b1")) == 4
    assert await keys(any_store, "batches/b1/e1/shard-1") == ["batches/b1/e1/shard-1"]
    assert await keys(any_store, "batches/b2/") == []
    assert await keys(any_store, "no") == []


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        ".tmp/x",
        "a/.hidden",
        "a\\b",
        "a\x00b",
        "a b",
        "é",
        "a\n",
        "a" * 200,
    ],
)
async def test_a_key_that_is_none_of_ours_is_refused(any_store: ObjectStore, key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        any_store.writer(key)
    with pytest.raises(ValueError):
        await any_store.put(key, b"x")
    with pytest.raises(ValueError):
        await any_store.get(key)
    with pytest.raises(ValueError):
        await any_store.delete([key])
    with pytest.raises(ValueError):
        await any_store.fetch(key, tmp_path / "copy")


async def test_many_writers_at_once_do_not_meet(any_store: ObjectStore) -> None:
    async def one(n: int) -> None:
        await any_store.put(f"batches/b{n % 5}/shard-{n}", b"%d" % n * 1000)
        if n % 3 == 0:
            await any_store.delete([f"batches/b{n % 5}/shard-{n}"])

    await asyncio.gather(*(one(n) for n in range(60)))
    assert len(await keys(any_store, "batches/")) == 40


async def test_a_living_store_passes_its_check(any_store: ObjectStore) -> None:
    await any_store.check()
    free = any_store.free_bytes()
    assert free is None or free > 0
