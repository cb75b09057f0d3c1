"""The database: transactions, what their failures mean, and the commit whose answer was lost.

The one place that knows SQL dialects. Everything above writes SQLAlchemy Core that means the same on SQLite and on
PostgreSQL.

SQLite (ledger rule 7): a transaction that writes says so at its start (BEGIN IMMEDIATE), because one that reads first and
writes then fails at once when somebody wrote in between, whatever the timeout. SQLite serves waiting writers in no order,
so those of one process queue here first; a heartbeat that must not queue has a `Database` of its own.
"""

import asyncio
import contextlib
import errno
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import unquote

from sqlalchemy import Connection, Table, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncTransaction, create_async_engine

from state import migrations
from state import sqlite as sqlite_file
from state.records import OutcomeUnknown, OutOfSpace, OvernightError, SettingsError, Unavailable

T = TypeVar("T")

#: How often a transaction whose commit got no answer is looked up and sent again, and the pause before each look-up.
TRIES = 5
PAUSE_S = 0.2
_IMMEDIATE = "begin_immediate"


class Database:
    """A pool of connections, used by one event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writer = engine.execution_options(**{_IMMEDIATE: True})
        self._turn = asyncio.Lock() if engine.dialect.name == "sqlite" else None
        self._under_way: set[asyncio.Task[Any]] = set()

    @classmethod
    def open(cls, url: str) -> Self:
        """Makes the pool; nothing is read or written, and no connection made, before the first transaction.

        Raises:
            SettingsError: the URL cannot be used.
        """
        return cls(_make_engine(parse(url)))

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that only reads, and on SQLite sees one moment throughout.

        Raises:
            Unavailable: the database does not answer.
        """
        with self._failures():
            async with self._begun(self._engine) as (connection, _):
                yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that writes: committed at the end, rolled back if the body raises.

        Raises:
            Unavailable: the database does not answer; nothing was changed.
            OutcomeUnknown: the commit itself failed; see `settle`.
            OutOfSpace: the disk is full; nothing was changed.
        """
        async with self._its_turn():
            with self._failures():
                async with self._begun(self._writer) as (connection, transaction):
                    yield connection
                    try:
                        await self._commit(transaction)
                    except (OperationalError, InterfaceError, OSError) as error:
                        if _is_full(error):
                            raise
                        raise OutcomeUnknown(f"the commit got no answer: {_first_line(error)}") from error

    @contextlib.asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        """Waits behind this process's other writers, but no longer than for those of other processes.

        While somebody else keeps the file locked, each writer in front waits its whole time before it fails: without a
        bound the hundredth would wait for the best part of an hour.
        """
        if self._turn is None:
            yield
            return
        try:
            async with asyncio.timeout(sqlite_file.BUSY_TIMEOUT_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise Unavailable("the database does not answer: other writers have waited for it too long") from error
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.asynccontextmanager
    async def _begun(self, engine: AsyncEngine) -> AsyncIterator[tuple[AsyncConnection, AsyncTransaction]]:
        """A connection with a transaction, rolled back at the end unless committed.

        Beginning may wait for other writers in the driver's thread, where nothing can call it off. A caller that is
        cancelled meanwhile goes at once; what it began is undone behind it, and `close` waits for that.
        """
        beginning = self._track(_begin(engine))
        try:
            connection, transaction = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self._track(_abandon(beginning))
            raise
        try:
            yield connection, transaction
        finally:
            await asyncio.shield(self._track(connection.close()))

    def _track(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that the end of one whose caller has gone is not reported as forgotten

    async def settle(
        self,
        send: Callable[[AsyncConnection], Awaitable[T]],
        found: Callable[[AsyncConnection], Awaitable[T | None]],
    ) -> T:
        """Runs `send` as a writing transaction and learns its outcome even when the commit's answer is lost.

        Ledger rule 4. Whoever calls has chosen the identity of what is written. When the commit fails, `found` looks that
        identity up in a fresh transaction: what it returns is the result, None means that nothing was committed, and the
        same is sent again. `found` is also asked before a refusal (LeaseLost, a duplicate key) is believed, because what
        stands in the way may be our own earlier attempt; so a caller, too, may repeat a call that ended in
        OutcomeUnknown.

        A cancelled caller goes at once, but the transaction is not torn in the middle: it runs to its end on its own, and
        `close` waits for it.

        Raises:
            OutcomeUnknown: neither the commit nor the look-ups were answered.
            Unavailable: the database did not answer before anything was sent.
            LeaseLost: whatever `send` raises, if nothing of ours is found.
        """
        return await asyncio.shield(self._track(self._settle(send, found)))

    async def _settle(
        self,
        send: Callable[[AsyncConnection], Awaitable[T]],
        found: Callable[[AsyncConnection], Awaitable[T | None]],
    ) -> T:
        unknown: OutcomeUnknown | None = None
        for _ in range(TRIES):
            try:
                if unknown is not None:
                    await asyncio.sleep(PAUSE_S)
                    if (result := await self._look_up(found)) is not None:
                        return result
                async with self.write() as connection:
                    return await send(connection)
            except OutcomeUnknown as error:
                unknown = error
            except Unavailable:
                if unknown is None:
                    raise
            except (OvernightError, IntegrityError):
                if (result := await self._look_up(found)) is not None:
                    return result
                raise
        assert unknown is not None
        raise unknown

    async def _look_up(self, found: Callable[[AsyncConnection], Awaitable[T | None]]) -> T | None:
        async with self.read() as connection:
            return await found(connection)

    async def _commit(self, transaction: AsyncTransaction) -> None:
        await transaction.commit()

    async def check(self) -> None:
        """A cheap sign of life: the database answers and has our tables.

        Raises:
            Unavailable: it does not.
        """
        async with self.read() as connection:
            await connection.execute(text("SELECT version_num FROM alembic_version"))

    async def close(self) -> None:
        """Waits for the transactions under way and closes the connections."""
        while self._under_way:
            await asyncio.wait(self._under_way)
        await self._engine.dispose()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Gives the driver's errors our names; what is a mistake of ours (a duplicate key, bad SQL) passes as it is."""
        try:
            yield
        except (OperationalError, InterfaceError, PoolTimeout, OSError) as error:
            if _is_full(error):
                free = _free_bytes(self._engine.url)
                raise OutOfSpace("the disk of the database is full", needed=0, free=free) from error
            raise Unavailable(f"the database does not answer: {_first_line(error)}") from error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise Unavailable(f"the connection to the database was lost: {_first_line(error)}") from error
            raise


async def _begin(engine: AsyncEngine) -> tuple[AsyncConnection, AsyncTransaction]:
    connection = await engine.connect()
    try:
        return connection, await connection.begin()
    except BaseException:
        await connection.close()
        raise


async def _abandon(beginning: "asyncio.Task[tuple[AsyncConnection, AsyncTransaction]]") -> None:
    await asyncio.wait([beginning])
    if not beginning.cancelled() and beginning.exception() is None:
        await beginning.result()[0].close()


async def upgrade(url: str) -> None:
    """Brings the database to the schema of this version: creates it, migrates it, or leaves a newer one alone.

    A SQLite file with data in it is copied first, to `<file>.bak-<its revision>`. Any number of processes may do this at
    once: the migrations run in one writing transaction, and whoever comes second finds nothing left to do.

    Raises:
        SettingsError: the database cannot be used as it is configured; the message says what to change.
        Unavailable: it does not answer.
    """
    target = parse(url)
    database = Database.open(url)
    try:
        if target.get_backend_name() == "sqlite":
            with database._failures():
                await asyncio.to_thread(_prepare_file, target)
        async with database.write() as connection:
            await connection.run_sync(migrations.run)
    finally:
        await database.close()


def _prepare_file(url: URL) -> None:
    path = sqlite_file.file_of(url)
    try:
        sqlite_file.prepare(path)
        revision = sqlite_file.revision(path)
        if revision is not None and migrations.pending(revision):
            sqlite_file.copy(path, revision)
    except sqlite3.Error as error:
        raise OperationalError(f"opening {path}", None, error) from error


async def upsert(
    connection: AsyncConnection, table: Table, key: str, row: Mapping[str, Any], keep: Sequence[str]
) -> None:
    """Inserts a row, or updates the one with the same key but for its columns `keep`."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(table).values(**row)
    changes: dict[Any, Any] = {name: statement.excluded[name] for name in row if name != key and name not in keep}
    await connection.execute(statement.on_conflict_do_update(index_elements=[key], set_=changes))


def parse(url: str) -> URL:
    """The URL with our driver for its kind of database filled in.

    Raises:
        SettingsError: it is no URL, or names a kind of database that we do not run on.
    """
    try:
        parsed = make_url(url)
        kind = parsed.get_backend_name()
    except ArgumentError as error:
        raise SettingsError(f"not a database URL: {error}") from error
    if kind == "sqlite":
        # Not every SQLAlchemy takes the quotes out of a path; a folder's name may hold `?` and `%`.
        path = unquote(url.partition(":///")[2].partition("?")[0])
        parsed = parsed.set(drivername="sqlite+aiosqlite", database=path)
        sqlite_file.file_of(parsed)
        return parsed
    raise SettingsError(f"no support for {kind} databases: use a SQLite file")


def _make_engine(url: URL) -> AsyncEngine:
    """An engine for SQLite.

    The driver must not begin transactions by itself, as it would begin them deferred; so it is told to leave them alone
    (`isolation_level` None), and every transaction begins here.
    """
    engine = create_async_engine(
        url,
        pool_size=5,
        max_overflow=0,
        pool_timeout=sqlite_file.BUSY_TIMEOUT_S,
        connect_args={"isolation_level": None, "timeout": sqlite_file.BUSY_TIMEOUT_S},
    )
    event.listen(engine.sync_engine, "connect", _set_up_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: DBAPIConnection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_IMMEDIATE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_full(error: BaseException) -> bool:
    return "disk is full" in str(error) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)


def _free_bytes(url: URL) -> int:
    try:
        return shutil.disk_usage(sqlite_file.file_of(url).parent).free
    except (OSError, SettingsError):
        return 0


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
