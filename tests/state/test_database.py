"""Transactions, upgrades, and what failures of the database turn into."""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import func, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from state import database as database_module
from state import migrations, sqlite
from state.database import Database, upgrade
from state.records import OutcomeUnknown, OutOfSpace, SettingsError, Unavailable
from state.settings import Settings
from state.tables import metadata, workers
from tests.state.making import NOW
from tests.support.waiting import eventually


async def insert(conn: AsyncConnection, name: str) -> None:
    await conn.execute(workers.insert().values(id=name, engine="echo", state="ready", models="[]", seen_at=NOW))


async def names(db: Database) -> set[str]:
    async with db.read() as conn:
        return set((await conn.scalars(select(workers.c.id))).all())


async def test_an_error_inside_a_transaction_leaves_nothing(db: Database) -> None:
    async def fail() -> None:
        async with db.write() as conn:
            await insert(conn, "w")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await names(db) == set()


async def test_a_writer_waits_for_another_process_and_then_reads_what_it_wrote(
    db: Database, other_db: Database
) -> None:
    """Ledger rule 7: reading first and writing then, with a writer in between, must not fail at once."""
    inside = asyncio.Event()

    async def add(database: Database, name: str, *, until: Callable[[], object]) -> int:
        async with database.write() as conn:
            count = await conn.scalar(select(func.count()).select_from(workers))
            inside.set()
            await eventually(until)
            await insert(conn, name)
            return count or 0

    first = asyncio.create_task(add(db, "a", until=lambda: other_db._under_way))  # the other one has come
    await inside.wait()
    assert await add(other_db, "b", until=lambda: True) == 1
    assert await first == 0


async def test_a_reader_sees_one_moment_throughout(db: Database, other_db: Database) -> None:
    async with db.read() as conn:
        assert await conn.scalar(select(func.count()).select_from(workers)) == 0
        async with other_db.write() as writer:
            await insert(writer, "w")
        assert await conn.scalar(select(func.count()).select_from(workers)) == 0
    assert await names(db) == {"w"}


async def test_sqlite_is_set_up_for_durability(db: Database) -> None:
    async with db.read() as conn:
        wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}
        found = {name: (await conn.exec_driver_sql(f"PRAGMA {name}")).scalar() for name in wanted}
    assert found == wanted


async def test_a_transaction_cancelled_while_it_waits_leaves_no_lock_behind(db: Database, other_db: Database) -> None:
    async with db.write():
        waiting = asyncio.create_task(_add(other_db, "cancelled"))
        await eventually(lambda: other_db._under_way)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await _add(db, "after")
    await _add(other_db, "and again")
    assert await names(db) == {"after", "and again"}


@pytest.mark.parametrize("steps", range(12))
async def test_a_transaction_cancelled_at_any_step_leaves_no_lock_behind(
    db: Database, other_db: Database, steps: int
) -> None:
    task = asyncio.create_task(_add(other_db, "w"))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(5):
        await _add(db, "after")


async def _add(db: Database, name: str) -> None:
    async with db.write() as conn:
        await insert(conn, name)


# The commit whose answer is lost (ledger rule 4)


class Lossy(Database):
    """Loses the answers of commits, as told: each step says whether the commit happens before it fails."""

    steps: list[bool]

    async def _commit(self, transaction: AsyncTransaction) -> None:
        if not self.steps:
            await super()._commit(transaction)
            return
        if self.steps.pop(0):
            await super()._commit(transaction)
        else:
            await transaction.rollback()
        raise OperationalError("COMMIT", None, Exception("the connection was lost"))


@pytest.fixture
async def lossy(database_url: str, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(database_module, "PAUSE_S", 0.0)
    made = Lossy.open(database_url)
    made.steps = []
    yield made
    await made.close()


@pytest.mark.parametrize(
    "steps",
    [[True], [False], [False, False], [False, True]],
    ids=["committed", "not committed", "twice not committed", "committed at the second try"],
)
async def test_a_commit_without_an_answer_is_looked_up_and_done_exactly_once(lossy: Lossy, steps: list[bool]) -> None:
    sent = 0

    async def send(conn: AsyncConnection) -> str:
        nonlocal sent
        sent += 1
        await insert(conn, "w")
        return "sent"

    lossy.steps = list(steps)
    assert await lossy.settle(send, _find) == ("found" if steps[-1] else "sent")
    assert await names(lossy) == {"w"}
    assert sent == len(steps) + (not steps[-1])


async def _find(conn: AsyncConnection) -> str | None:
    return "found" if await conn.scalar(select(workers.c.id)) else None


async def test_a_commit_that_never_gets_an_answer_ends_in_outcome_unknown(lossy: Lossy) -> None:
    lossy.steps = [False] * database_module.TRIES
    with pytest.raises(OutcomeUnknown):
        await lossy.settle(lambda conn: insert(conn, "w"), _find)
    assert await lossy.settle(lambda conn: insert(conn, "w"), _find) is None


async def test_a_caller_may_repeat_what_ended_in_outcome_unknown(lossy: Lossy) -> None:
    """The repetition runs into its own row, and knows it."""
    await _add(lossy, "w")
    assert await lossy.settle(lambda conn: _refused(conn), _find) == "found"


async def _refused(conn: AsyncConnection) -> str:
    await insert(conn, "w")
    return "never"


async def test_a_refusal_for_another_reason_is_passed_on(lossy: Lossy) -> None:
    await _add(lossy, "w")

    async def nothing(conn: AsyncConnection) -> str | None:
        return None

    with pytest.raises(IntegrityError):
        await lossy.settle(_refused, nothing)


async def test_a_settled_write_outlives_its_cancelled_caller(db: Database) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def send(conn: AsyncConnection) -> str:
        begun.set()
        await go_on.wait()
        await insert(conn, "w")
        return "sent"

    caller = asyncio.create_task(db.settle(send, _find))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await db.close()
    assert await names(db) == {"w"}


# What failures turn into


async def test_a_database_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    db = Database.open(f"sqlite+aiosqlite:///{tmp_path / 'no such folder' / 'overnight.db'}")
    threads = set(threading.enumerate())
    with pytest.raises(Unavailable):
        await db.check()
    await db.close()
    await eventually(lambda: set(threading.enumerate()) <= threads)  # the driver does not wait for its thread's end


async def test_a_database_without_our_tables_is_not_ready(tmp_path: Path) -> None:
    db = Database.open(f"sqlite+aiosqlite:///{tmp_path / 'overnight.db'}")
    with pytest.raises(Unavailable):
        await db.check()
    await db.close()


async def test_a_full_disk_is_out_of_space_and_changes_nothing(db: Database) -> None:
    """A page limit makes SQLite fail as a full disk does."""

    async def fill() -> None:
        async with db.write() as conn:
            pages = (await conn.exec_driver_sql("PRAGMA page_count")).scalar()
            await conn.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            for i in range(2000):
                await insert(conn, f"worker-{i:0200d}")

    with pytest.raises(OutOfSpace) as caught:
        await fill()
    assert caught.value.free > 0
    assert await names(db) == set()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "nonsense", "mysql://u:p@host/db"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        Database.open(url)


# Upgrades


async def test_the_migrations_make_exactly_the_tables(db: Database) -> None:
    async with db.read() as conn:
        differences = await conn.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync, opts={"compare_type": True}), metadata)
        )
    assert differences == []


async def test_the_migrations_make_the_same_constraints_as_the_tables(db: Database, tmp_path: Path) -> None:
    """The comparison above does not look at CHECK constraints."""
    made = await _check_constraints(db)
    plain = tmp_path / "plain.db"
    sqlite.prepare(plain)
    other = Database.open(f"sqlite+aiosqlite:///{plain}")
    async with other.write() as conn:
        await conn.run_sync(metadata.create_all)
    assert made == await _check_constraints(other)
    assert made == {"ck_batches_open_shards", "ck_batches_counts", "ck_shards_counts"}
    await other.close()


async def _check_constraints(db: Database) -> set[str]:
    async with db.read() as conn:
        sources = (await conn.exec_driver_sql("SELECT sql FROM sqlite_master WHERE type = 'table'")).scalars().all()
    words = " ".join(sources).replace('"', " ").split()
    return {word for word in words if word.startswith("ck_")}


async def test_a_new_database_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "overnight.db"
    await upgrade(f"sqlite+aiosqlite:///{path}")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.glob("data/*.bak-*")) == []


async def test_any_number_of_processes_may_upgrade_at_once(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'overnight.db'}"
    await asyncio.gather(*(upgrade(url) for _ in range(5)))
    db = Database.open(url)
    await db.check()
    await db.close()


async def test_the_file_is_copied_before_a_migration_changes_it(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = Database.open(database_url)
    await _add(db, "kept")
    await db.close()
    monkeypatch.setattr(migrations, "pending", lambda revision: True)
    await upgrade(database_url)
    copy = tmp_path / "overnight.db.bak-0001"
    assert copy.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT id FROM workers").fetchall() == [("kept",)]
    connection.close()


async def test_a_copy_that_does_not_fit_leaves_the_disk_as_it_was(database_url: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    path = sqlite.file_of(make_url(database_url))
    (tmp_path / "overnight.db.bak-0001").mkdir()  # in the way of the copy
    with pytest.raises(IsADirectoryError):
        sqlite.copy(path, "0001")
    (tmp_path / "overnight.db.bak-0001").rmdir()
    assert sorted(tmp_path.iterdir()) == before


async def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "what?mode=ro&%41 #1 日本")
    await upgrade(settings.database)
    db = Database.open(settings.database)
    await db.check()
    await db.close()
    assert [path.name for path in tmp_path.iterdir()] == [settings.data.name]
    assert (settings.data / "overnight.db").stat().st_size > 0


def test_a_revision_of_a_newer_version_is_left_alone() -> None:
    """Invariant 14: versions N and N+1 run side by side."""
    assert migrations.pending(None)
    assert not migrations.pending(migrations.head())
    assert not migrations.pending("9999")


def test_an_old_sqlite_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"3\.34\.1 is too old"):
        sqlite.check_version((3, 34, 1))


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local\\040disk ext4 rw 0 0
//nas/share /mnt/nas cifs rw 0 0
server:/data /mnt/データ nfs rw 0 0
me@host: /mnt/ssh fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/overnight/overnight.db", "ext4"),
        ("/home/me/overnight.db", "nfs4"),
        ("/home/local disk/overnight.db", "ext4"),
        ("/homework/overnight.db", "ext4"),
        ("/mnt/nas/deep/down/overnight.db", "cifs"),
        ("/mnt/データ/overnight.db", "nfs"),
        ("/mnt/ssh/overnight.db", "fuse.sshfs"),
    ],
)
def test_the_deepest_mount_says_what_file_system_a_path_is_on(path: str, kind: str) -> None:
    assert sqlite.file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse", "fuseblk", "fuse.sshfs"])
async def test_a_network_folder_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_read_mounts", lambda: f"x {tmp_path} {kind} rw 0 0\n")
    with pytest.raises(SettingsError, match=kind):
        await upgrade(f"sqlite+aiosqlite:///{tmp_path / 'overnight.db'}")
    assert os.listdir(tmp_path) == []


async def test_upserting_twice_keeps_what_it_is_told_to(db: Database) -> None:
    row: dict[str, object] = {"id": "w", "engine": "echo", "state": "starting", "cause": None, "models": "[]"}
    for state, seen_at in (("starting", 1.0), ("ready", 2.0)):
        async with db.write() as conn:
            await database_module.upsert(
                conn, workers, "id", row | {"state": state, "seen_at": seen_at}, keep=("seen_at",)
            )
    async with db.read() as conn:
        found = (await conn.execute(select(workers))).one()
    assert (found.state, found.seen_at) == ("ready", 1.0)
