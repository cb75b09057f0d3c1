"""Fixtures of the orchestrator's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.orchestrator.janitor import Janitor
from state.clock import ManualClock
from state.database import Database
from state.objects.local import LocalStore
from state.settings import Settings
from tests.orchestrator.house import House, InProcess, parts


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=tmp_path, min_free_bytes=0)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[LocalStore]:
    opened = LocalStore(Path(settings.objects))
    yield opened
    await opened.close()


@pytest.fixture
async def house(db: Database, store: LocalStore, clock: ManualClock, settings: Settings) -> House:
    """Everything but processes."""
    children = InProcess(store, settings.spool_folder)
    jobs, sweep, notices = parts(database=db, children=children, clock=clock, settings=settings)
    janitor = Janitor(database=db, store=store, clock=clock, settings=settings)
    return House(
        db=db,
        store=store,
        clock=clock,
        settings=settings,
        children=children,
        jobs=jobs,
        sweep=sweep,
        notices=notices,
        janitor=janitor,
    )
