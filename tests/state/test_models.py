"""Models and workers: what is known, what is about."""

from dataclasses import replace

import pytest

from state import models, workers
from state.database import Database
from state.jobs import PlanInput, details
from state.records import JobKind, Model, ModelNotFound
from state.workers import WorkerInfo
from tests.state.making import NOW, claim_job, create

SMOL = Model("smol", "smol", "huggingface", int(NOW), NOW, ("/v1/chat/completions", "/v1/completions"))
ALIAS = Model("gpt-4o-mini", "smol", "overnight", int(NOW), NOW)
ANYTHING = Model("*", "smol", "overnight", int(NOW), NOW)


async def test_registered_models_are_listed_by_name_without_the_one_for_any(db: Database) -> None:
    assert not await models.any_known(db)
    await models.register(db, models=[SMOL, ANYTHING, ALIAS], now=NOW)
    assert await models.listed(db) == [ALIAS, SMOL]
    assert await models.get(db, name="smol") == SMOL
    assert await models.any_known(db)


async def test_registering_again_keeps_the_time_of_creation(db: Database) -> None:
    await models.register(db, models=[SMOL], now=NOW)
    await models.register(db, models=[replace(SMOL, created_at=1, owned_by="me", endpoints=None)], now=NOW + 9)
    assert await models.get(db, name="smol") == replace(SMOL, owned_by="me", endpoints=None, last_seen=NOW + 9)


async def test_aliases_of_earlier_days_can_be_forgotten_and_models_cannot(db: Database) -> None:
    await models.register(db, models=[SMOL, ALIAS, ANYTHING], now=NOW)
    await models.register(db, models=[ALIAS], now=NOW + 10)
    await models.forget_aliases(db, before=NOW + 5)
    assert [model.name for model in await models.listed(db)] == ["gpt-4o-mini", "smol"]
    assert await models.resolve(db, name="unknown") is None


async def test_a_name_goes_to_its_own_row_or_to_that_for_any(db: Database) -> None:
    await models.register(db, models=[SMOL, ALIAS], now=NOW)
    assert await models.resolve(db, name="gpt-4o-mini") == ALIAS
    assert await models.resolve(db, name="unknown") is None
    await models.register(db, models=[ANYTHING], now=NOW)
    assert await models.resolve(db, name="gpt-4o-mini") == ALIAS
    assert await models.resolve(db, name="unknown") == ANYTHING


@pytest.mark.parametrize("name", ["unknown", "*"])
async def test_a_name_that_is_not_listed_is_not_found(db: Database, name: str) -> None:
    await models.register(db, models=[SMOL, ANYTHING], now=NOW)
    with pytest.raises(ModelNotFound):
        await models.get(db, name=name)


async def seen(
    db: Database, worker_id: str, *, now: float = NOW, state: str = "ready", cause: str | None = None
) -> None:
    await workers.seen(db, worker_id=worker_id, engine="vllm", state=state, cause=cause, models=["smol"], now=now)


async def test_workers_are_listed_as_they_were_last_seen(db: Database) -> None:
    await seen(db, "w-1", state="starting")
    await seen(db, "w-1", state="failing", cause="401 from the engine", now=NOW + 1)
    await seen(db, "w-2")
    assert await workers.listed(db, now=NOW + 1) == [
        WorkerInfo("w-1", "vllm", "failing", "401 from the engine", ("smol",), NOW + 1),
        WorkerInfo("w-2", "vllm", "ready", None, ("smol",), NOW),
    ]
    assert [w.worker_id for w in await workers.listed(db, now=NOW + 30.5)] == ["w-1"]
    await workers.forget(db, worker_id="w-1")
    assert await workers.listed(db, now=NOW + 30.5) == []


async def test_all_workers_can_be_forgotten_at_once(db: Database) -> None:
    for worker_id in ("w-1", "w-2"):
        await seen(db, worker_id)
    await workers.forget(db)
    assert await workers.listed(db, now=NOW) == []


async def test_a_plan_is_cut_for_the_workers_that_were_seen_together(db: Database) -> None:
    for worker_id, now in (("gone", NOW - 100), ("w-1", NOW - 10), ("w-2", NOW)):
        await seen(db, worker_id, now=now)
    await create(db)
    found = await details(db, job=await claim_job(db, JobKind.PLAN))
    assert isinstance(found, PlanInput)
    assert found.workers == 2
