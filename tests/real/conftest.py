"""One real vLLM on the CPU for all tests that need no other: starting one takes half a minute.

The environment lies where `make engine` puts it (or in OVERNIGHT_ENGINE_HOME) and is installed if it is not there. These
tests are never skipped: without an engine they fail.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from engine.backends.protocol import Reply
from engine.backends.vllm import ManagedVLLM
from engine.environment import python_in
from engine.install import install
from state.settings import Settings

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]

#: Seconds for an installation and a start on a busy machine.
PATIENCE_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real_engine)
            item.add_marker(pytest.mark.timeout(PATIENCE_S))


@pytest.fixture(scope="session")
def engine_home() -> Path:
    """The folder of the engine's environment and of the demo model."""
    home = Path(os.environ.get("OVERNIGHT_ENGINE_HOME") or ROOT / ".demo" / "engine")
    install("cpu", folder=home, python=None, echo=print)
    return home


class Loop:
    """An event loop in a thread of its own, so that an engine outlives the test that started it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="real engine")
        self._thread.start()

    def wait(self, work: Awaitable[T], *, within: float = PATIENCE_S) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(_finish(work), self.loop)
        return future.result(within)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _finish(work: Awaitable[T]) -> T:
    return await work


class RealEngine:
    """A running vLLM, as a test uses it: by calls that return when they are done."""

    def __init__(self, loop: Loop, settings: Settings) -> None:
        self._loop, self.settings = loop, settings
        self.backend = ManagedVLLM(settings)

    def start(self) -> None:
        self._loop.wait(self.backend.start())

    def close(self) -> None:
        self._loop.wait(self.backend.close(), within=30)

    def died(self) -> str:
        return self._loop.wait(self.backend.died(), within=60)

    def models(self) -> Any:
        return self._loop.wait(self.backend.models())

    def ask(self, endpoint: str, **body: Any) -> Reply:
        return self._loop.wait(self.backend.send(endpoint, orjson.dumps({"model": "demo", **body})))

    def chat(self, text: str, **more: Any) -> Reply:
        return self.ask("/v1/chat/completions", messages=[{"role": "user", "content": text}], **more)


@pytest.fixture(scope="session")
def start_engine(engine_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RealEngine]]:
    """Starts engines; what still runs at the end of the session is ended."""
    loop, started = Loop(), []

    def start(**more: Any) -> RealEngine:
        data = tmp_path_factory.mktemp("data")
        (data / "engine").symlink_to(engine_home.absolute())
        engine = RealEngine(loop, Settings(data=data, engine_python=str(python_in(engine_home.absolute())), **more))
        started.append(engine)
        engine.start()
        return engine

    yield start
    for engine in started:
        engine.close()
    loop.close()


@pytest.fixture(scope="session")
def engine(start_engine: Callable[..., RealEngine]) -> RealEngine:
    """The demo model, with an alias and a star."""
    return start_engine(model="demo", model_aliases=("gpt-4o-mini=demo", "*=demo"))
