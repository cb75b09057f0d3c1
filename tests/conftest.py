"""Fixtures for all tests: a real database, and a clock that moves only when told to."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from state.clock import ManualClock
from state.database import Database, upgrade

# No example is timed: a busy machine is no fault of the code. CI runs the same examples every time.
settings.register_profile(
    "overnight", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("overnight")

#: The kinds of database that every test of the state runs on.
DATABASES = ("sqlite",)


@pytest.fixture(params=DATABASES)
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database with the newest schema."""
    assert request.param == "sqlite"
    url = f"sqlite+aiosqlite:///{tmp_path / 'overnight.db'}"
    await upgrade(url)
    return url


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    """That database, opened."""
    database = Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
async def other_db(database_url: str) -> AsyncIterator[Database]:
    """The same database as another process would open it, with connections of its own."""
    database = Database.open(database_url)
    yield database
    await database.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
