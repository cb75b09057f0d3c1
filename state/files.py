"""The files' rows. A visible row implies readable bytes of that length and digest (invariant 11).

A row is reserved as PENDING before the first byte is written, and becomes visible in one step when the last is durable. A
deleted row names its object until the bytes are gone (ledger rule 5): garbage is what rows say, never what looks old.
"""

from collections.abc import Sequence
from typing import Literal

from sqlalchemy import ColumnElement, Row, and_, asc, desc, exists, or_, select, update
from sqlalchemy import delete as delete_from
from sqlalchemy.ext.asyncio import AsyncConnection

from state.database import Database
from state.records import BatchStatus, File, FileInUse, FileNotFound, FileStatus, Page
from state.tables import batches, files

#: All columns but the serial number: what `record` reads.
COLUMNS = [column for column in files.c if column.name != "n"]


async def reserve(
    db: Database,
    *,
    file_id: str,
    project_id: str,
    purpose: str,
    filename: str,
    object_key: str,
    now: float,
    expires_at: int | None,
) -> None:
    """Inserts the invisible row of an upload that is about to begin."""
    row = {
        "id": file_id,
        "project_id": project_id,
        "purpose": purpose,
        "filename": filename,
        "status": FileStatus.PENDING,
        "object_key": object_key,
        "created_at": int(now),
        "expires_at": expires_at,
    }

    async def send(conn: AsyncConnection) -> bool:
        await conn.execute(files.insert().values(row))
        return True

    async def found(conn: AsyncConnection) -> bool | None:
        same = and_(files.c.id == file_id, files.c.object_key == object_key)
        return (await conn.scalar(select(files.c.n).where(same))) is not None or None

    await db.settle(send, found)


async def publish(
    db: Database,
    *,
    file_id: str,
    size: int,
    sha256: str,
    purpose: str | None = None,
    expires_at: int | None = None,
) -> File:
    """Makes a finished upload visible.

    `purpose`, where it is given, and with it `expires_at`, take the place of what was reserved: a form may name them after
    the file itself.

    Raises:
        FileNotFound: the row is not pending: discarded, deleted, or published with other bytes.
    """
    late = {} if purpose is None else {"purpose": purpose, "expires_at": expires_at}

    async def send(conn: AsyncConnection) -> File:
        change = (
            update(files)
            .where(files.c.id == file_id, files.c.status == FileStatus.PENDING)
            .values(status=FileStatus.PROCESSED, bytes=size, sha256=sha256, **late)
            .returning(*COLUMNS)
        )
        row = (await conn.execute(change)).one_or_none()
        if row is None:
            raise FileNotFound(file_id)
        return record(row)

    async def found(conn: AsyncConnection) -> File | None:
        same = (files.c.id == file_id, files.c.status == FileStatus.PROCESSED, files.c.sha256 == sha256)
        row = (await conn.execute(select(*COLUMNS).where(*same))).one_or_none()
        return None if row is None else record(row)

    return await db.settle(send, found)


async def discard(db: Database, *, file_id: str) -> None:
    """Gives up an upload that will not be finished; its bytes become garbage. Any other row is left alone."""
    async with db.write() as conn:
        await conn.execute(
            update(files)
            .where(files.c.id == file_id, files.c.status == FileStatus.PENDING)
            .values(status=FileStatus.DELETED)
        )


async def get(db: Database, *, project_id: str, file_id: str) -> File:
    """A visible file.

    Raises:
        FileNotFound: unknown, of another project, still uploading, or deleted.
    """
    async with db.read() as conn:
        row = (await conn.execute(select(*COLUMNS).where(*_visible(project_id, file_id)))).one_or_none()
    if row is None:
        raise FileNotFound(file_id)
    return record(row)


async def page(
    db: Database,
    *,
    project_id: str,
    limit: int,
    after: str | None,
    order: Literal["asc", "desc"],
    purpose: str | None,
) -> Page[File]:
    """Visible files by time of creation, and within a second in the order they were made in.

    `after` may also name a file that was deleted since: who deletes while paging goes on where they were.

    Raises:
        FileNotFound: `after` is no file of this project.
    """
    wanted: list[ColumnElement[bool]] = [
        files.c.project_id == project_id,
        files.c.status == FileStatus.PROCESSED,
    ]
    if purpose is not None:
        wanted.append(files.c.purpose == purpose)
    direction = asc if order == "asc" else desc
    async with db.read() as conn:
        if after is not None:
            cursor = (
                await conn.execute(
                    select(files.c.created_at, files.c.n).where(
                        files.c.id == after,
                        files.c.project_id == project_id,
                        files.c.status != FileStatus.PENDING,
                    )
                )
            ).one_or_none()
            if cursor is None:
                raise FileNotFound(after)
            wanted.append(_beyond(cursor.created_at, cursor.n, newer=order == "asc"))
        query = (
            select(*COLUMNS)
            .where(*wanted)
            .order_by(direction(files.c.created_at), direction(files.c.n))
            .limit(limit + 1)
        )
        rows = (await conn.execute(query)).all()
    return Page(tuple(record(row) for row in rows[:limit]), has_more=len(rows) > limit > 0)


async def delete(db: Database, *, project_id: str, file_id: str, now: float) -> None:
    """Makes a file invisible; the janitor removes the bytes.

    Raises:
        FileInUse: a batch that is still validating reads it. Afterwards the batch has its own copy (invariant 11).
        FileNotFound: unknown, of another project, still uploading, or deleted.
    """

    async def send(conn: AsyncConnection) -> None:
        change = update(files).where(*_visible(project_id, file_id)).values(status=FileStatus.DELETED)
        if (await conn.execute(change)).rowcount != 1:
            raise FileNotFound(file_id)
        reader = await conn.scalar(
            select(batches.c.id)
            .where(batches.c.input_file_id == file_id, batches.c.status == BatchStatus.VALIDATING)
            .limit(1)
        )
        if reader is not None:
            raise FileInUse(file_id, reader)  # rolls the change back

    async with db.write() as conn:
        await send(conn)


async def expire(db: Database, *, now: float, limit: int = 100) -> int:
    """Deletes files whose time has come, except inputs of batches that are still validating. How many."""
    being_read = exists().where(
        batches.c.input_file_id == files.c.id,
        batches.c.status == BatchStatus.VALIDATING,
    )
    due = (
        select(files.c.n)
        .where(files.c.status == FileStatus.PROCESSED, files.c.expires_at <= int(now), ~being_read)
        .order_by(files.c.expires_at)
        .limit(limit)
    )
    async with db.write() as conn:
        change = (
            update(files)
            .where(files.c.n.in_(due), files.c.status == FileStatus.PROCESSED)
            .values(status=FileStatus.DELETED)
        )
        return (await conn.execute(change)).rowcount


async def garbage(db: Database, *, limit: int = 100) -> list[tuple[str, str]]:
    """Deleted files whose bytes are still there: (file id, object key)."""
    query = select(files.c.id, files.c.object_key).where(files.c.status == FileStatus.DELETED).limit(limit)
    async with db.read() as conn:
        return [(row.id, row.object_key) for row in await conn.execute(query)]


async def forget(db: Database, *, file_ids: Sequence[str]) -> None:
    """Removes the rows of deleted files, once their bytes are gone."""
    async with db.write() as conn:
        await conn.execute(
            delete_from(files).where(files.c.id.in_(list(file_ids)), files.c.status == FileStatus.DELETED)
        )


async def stale_pending(db: Database, *, created_before: int, limit: int) -> list[str]:
    """Uploads that began before this time (seconds) and were never finished."""
    query = (
        select(files.c.id)
        .where(files.c.status == FileStatus.PENDING, files.c.created_at < created_before)
        .order_by(files.c.created_at)
        .limit(limit)
    )
    async with db.read() as conn:
        return list((await conn.scalars(query)).all())


def record(row: "Row[tuple[object, ...]]") -> File:
    """The record of a row of all columns but `n`."""
    values = row._asdict()
    return File(**{**values, "status": FileStatus(values["status"])})


def _visible(project_id: str, file_id: str) -> tuple[ColumnElement[bool], ...]:
    return (files.c.id == file_id, files.c.project_id == project_id, files.c.status == FileStatus.PROCESSED)


def _beyond(created_at: int, n: int, *, newer: bool) -> ColumnElement[bool]:
    at, number = files.c.created_at, files.c.n
    if newer:
        return or_(at > created_at, and_(at == created_at, number > n))
    return or_(at < created_at, and_(at == created_at, number < n))
