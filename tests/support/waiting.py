"""Waiting with a deadline: tests poll for what they expect and never sleep a guessed time."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any


async def eventually(probe: Callable[[], Any | Awaitable[Any]], *, within: float = 10.0, every: float = 0.02) -> Any:
    """Calls `probe` until it returns something true, and returns that; an AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        value = probe()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {inspect.getsource(probe).strip()} (last: {value!r})")
        await asyncio.sleep(every)


def eventually_sync(probe: Callable[[], Any], *, within: float = 10.0, every: float = 0.02) -> Any:
    """The same for code without an event loop."""
    deadline = time.monotonic() + within
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s (last: {value!r})")
        time.sleep(every)
