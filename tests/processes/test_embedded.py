"""What `overnight serve` does around its roles: the leases of the dead, and what it says of where it is."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from server.roles import embedded, unblock
from state import models, workers
from state.database import Database, upgrade
from state.records import Model
from state.settings import Settings


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("gpu.lan", "http://gpu.lan:8000/v1"),
    ],
)
def test_the_url_can_be_used_as_it_is_told(host: str, url: str) -> None:
    assert embedded.url_of(host, 8000) == url


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"smol", "demo"}, "demo, smol"),
        ({"smol", "*"}, "smol (and files that name any other model)"),
        ({"*"}, "any model"),
        (set(), "any model"),
    ],
)
def test_the_names_a_file_may_ask_for_are_told(names: set[str], told: str) -> None:
    assert embedded.listed(names) == told


async def test_the_workers_of_a_killed_serve_are_not_ready_for_the_next_ones_batches(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, engine="echo")
    await upgrade(settings.database)
    database = Database.open(settings.database)
    now = time.time()
    await workers.seen(
        database, worker_id="worker-dead", engine="vllm", state="ready", cause=None, models=["m"], now=now
    )
    plan = embedded.Plan(settings, roles=(), sole=True)
    await embedded._run(plan, kept=())
    assert await workers.listed(database, now=now) == []
    await database.close()


async def test_aliases_of_an_earlier_serve_go_once_every_engine_has_named_its_models(tmp_path: Path) -> None:
    database_url = Settings(data=tmp_path).database
    await upgrade(database_url)
    database = Database.open(database_url)
    old = Model("*", "old-model", "overnight", 1, 1.0)
    await models.register(database, models=[old], now=time.time() - 60)
    dropping = asyncio.create_task(embedded.drop_old_aliases(database, engines=2))
    for number in (1, 2):
        assert await models.resolve(database, name="any") is not None
        seen = {"engine": "vllm", "state": "ready", "cause": None, "models": ["m"], "now": time.time()}
        await workers.seen(database, worker_id=f"worker-{number}", **seen)
    await dropping
    assert await models.resolve(database, name="any") is None
    await database.close()


def test_looking_whether_a_database_is_locked_makes_none(tmp_path: Path) -> None:
    assert not unblock.is_locked(tmp_path / "none?.db")
    assert os.listdir(tmp_path) == []
