"""A real API for tests: real SQLite, real local store, real waker; called in process, or listening on a free port."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.app import create_app
from server.listen import serve
from state.clock import ManualClock
from state.database import Database, upgrade
from state.objects.local import LocalStore
from state.settings import Settings
from state.wake import Waker, open_waker

LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","messages":[]}}\n'
CREATE = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


@dataclass
class Api:
    """An application, what it stands on, and a client that calls it as a local program would."""

    client: httpx.AsyncClient
    database: Database
    store: LocalStore
    clock: ManualClock
    orchestrator: Waker
    """Listens as an orchestrator does."""
    settings: Settings

    async def upload(
        self, content: bytes = LINE, *, purpose: str = "batch", filename: str = "in.jsonl", **fields: str
    ) -> httpx.Response:
        return await self.client.post(
            "/v1/files", data={"purpose": purpose, **fields}, files={"file": (filename, content)}
        )

    async def uploaded(self, content: bytes = LINE, **more: Any) -> str:
        reply = await self.upload(content, **more)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    async def create(self, file_id: str, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/batches", json={"input_file_id": file_id, **CREATE, **more})

    async def created(self, file_id: str = "file-none", **more: Any) -> str:
        reply = await self.create(file_id, **more)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])


Opener = Callable[..., AbstractAsyncContextManager[Api]]


@pytest.fixture
def open_api(tmp_path: Path) -> Opener:
    """Opens an API with settings of the test's choice."""

    @contextlib.asynccontextmanager
    async def opened(*, headers: dict[str, str] | None = None, **changes: Any) -> AsyncIterator[Api]:
        settings = Settings(data=tmp_path / "data", **changes)
        settings.data.mkdir(exist_ok=True)
        await upgrade(settings.database)
        database = Database.open(settings.database)
        store = LocalStore(tmp_path / "objects", min_free_bytes=settings.min_free_bytes)
        clock = ManualClock()
        listener, waker = open_waker(settings, "orchestrator"), open_waker(settings)
        app = create_app(settings=settings, database=database, store=store, waker=waker, clock=clock)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            yield Api(client, database, store, clock, listener, settings)
        waker.close()
        listener.close()
        await store.close()
        await database.close()

    return opened


@pytest.fixture
async def api(open_api: Opener) -> AsyncIterator[Api]:
    """An API with the usual settings."""
    async with open_api() as opened:
        yield opened


@dataclass
class Listening:
    """A server that listens."""

    port: int
    data: Path
    stop: asyncio.Event
    done: "asyncio.Task[None]"
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, cut at the end of the test."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        for writer in self.writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
def listening(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Listening]]:
    """Starts the api role on a free port, with settings of the test's choice, and stops it."""

    @contextlib.asynccontextmanager
    async def started(**changes: Any) -> AsyncIterator[Listening]:
        data = tmp_path / "served"
        data.mkdir(exist_ok=True)
        settings = Settings(**{"data": data, "port": 0, "shutdown_timeout": 2.0, **changes})
        stop, ready = asyncio.Event(), asyncio.Event()
        ports: list[int] = []
        task = asyncio.create_task(serve(settings, stop=stop, ready=ready.set, listening=ports.append))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            await task
        server = Listening(ports[0], data, stop, task)
        try:
            yield server
        finally:
            await server.cut()
            stop.set()
            await task

    return started
