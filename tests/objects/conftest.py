"""Every store passes the same tests; a new one is one more parameter here."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from state.objects import ObjectStore
from state.objects.local import LocalStore


@pytest.fixture(params=["local"])
async def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    store = {"local": LocalStore}[request.param](tmp_path / "objects")
    yield store
    await store.close()
