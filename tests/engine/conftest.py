import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from engine.backends.client import Client
from tests.support.stub import Stub, chat


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with Stub(models=("stub-model", "other-model")).running() as running:
        yield running


def ask(text: str, **more: Any) -> bytes:
    """The body of a chat request to the stub."""
    return orjson.dumps({"model": "stub-model", "messages": chat(text), **more})


def client_of(stub: Stub, **more: Any) -> Client:
    settings: dict[str, Any] = {"wall": time.time, "timeout": 30.0, "max_reply_bytes": 1 << 20}
    return Client(f"http://127.0.0.1:{stub.port}", **settings | more)
