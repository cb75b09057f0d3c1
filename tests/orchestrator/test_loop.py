"""A background loop goes on whatever its step does, and wakes when it is rung."""

import asyncio
import logging

import pytest

from engine.orchestrator import loop
from engine.orchestrator.loop import Bell, keep
from state.records import Unavailable
from tests.support.waiting import eventually


@pytest.fixture
def steps() -> list[str]:
    return []


def start(outcomes, steps: list[str], *, every: float = 3600.0, bell: Bell | None = None) -> asyncio.Task[None]:
    """A loop whose step returns or raises these, then returns False for ever."""
    left = list(outcomes)

    async def step() -> bool:
        outcome = left.pop(0) if left else False
        steps.append(str(outcome))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return asyncio.create_task(keep(step, name="the test", every=every, bell=bell or Bell()))


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_step_with_more_to_do_is_called_at_once_again(steps):
    task = start([True, True, False], steps)
    await eventually(lambda: steps == ["True", "True", "False"])
    await end(task)


async def test_a_ring_wakes_the_loop_and_rings_meanwhile_count_as_one(steps):
    bell = Bell()
    task = start([], steps, bell=bell)
    await eventually(lambda: len(steps) == 1)
    bell.ring()
    bell.ring()
    await eventually(lambda: len(steps) == 2)
    await end(task)
    assert len(steps) == 2


async def test_without_a_ring_the_loop_looks_by_itself(steps):
    task = start([], steps, every=0.01)
    await eventually(lambda: len(steps) >= 3)
    await end(task)


async def test_a_step_that_fails_is_logged_and_tried_again(steps, caplog, monkeypatch):
    monkeypatch.setattr(loop, "pause", lambda failures: 0.0)
    with caplog.at_level(logging.INFO):
        task = start([Unavailable("away"), KeyError("bug"), True], steps)
        await eventually(lambda: len(steps) == 4)
    await end(task)
    assert [(record.levelname, record.exc_info is not None) for record in caplog.records] == [
        ("WARNING", False),
        ("ERROR", True),
    ]
