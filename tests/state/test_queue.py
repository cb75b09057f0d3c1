"""Writers of one process queue, and none of them for ever."""

import pytest

from state import sqlite
from state.database import Database
from state.records import Unavailable


async def test_a_writer_waits_for_others_no_longer_than_the_database_may_be_locked(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    async with db.write():
        with pytest.raises(Unavailable, match="other writers"):
            async with db.write():
                raise AssertionError
    async with db.write():
        pass
