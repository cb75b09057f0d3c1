"""Fixtures: a farm on a real database and a local store, and a stub of a model server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.worker import drain
from state.database import Database, upgrade
from state.objects.open import open_store
from tests.support.stub import Stub
from tests.worker.farm import Farm, settings_for


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still in flight when a test ends is not waited for."""
    monkeypatch.setattr(drain, "LANDING_S", 0.2)


@pytest.fixture
async def farm(tmp_path: Path) -> AsyncIterator[Farm]:
    settings = settings_for(tmp_path)
    await upgrade(settings.database)
    database, store = Database.open(settings.database), open_store(settings)
    yield Farm(database, store, settings)
    await store.close()
    await database.close()


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with Stub().running() as stub:
        yield stub
