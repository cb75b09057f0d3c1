"""What a worker does with its leases: it stops when told, commits nothing it may not, and repeats nothing committed."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.worker import claims, commit, role
from state import shards
from state.objects import Stored
from state.objects.local import LocalStore
from state.records import NotFound, OutcomeUnknown, OutOfSpace, Unavailable
from tests.support.stub import Stub, chat
from tests.support.waiting import eventually
from tests.worker.farm import Farm

pytestmark = pytest.mark.asyncio

SLOW = "[[stub latency=60]] slow"


async def test_a_cancelled_batch_is_aborted_at_the_engine_and_keeps_what_is_finished(farm: Farm, stub: Stub) -> None:
    """Invariant 7."""
    batch = await farm.plan(["fast 1", f"{SLOW} 1", f"{SLOW} 2", "fast 2"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.in_flight == 2 and stub.calls == 4)
        await farm.cancel(batch)
        await eventually(lambda: farm.ended(batch))
        assert stub.aborted == 2
    assert sorted(await farm.lines(batch)) == [0, 3]
    assert (await farm.batch(batch)).counts.completed == 2


async def test_a_cancel_is_heard_without_waiting_for_the_next_heartbeat(farm: Farm, stub: Stub) -> None:
    farm.tell(lease_heartbeat=1000.0, lease_ttl=3000.0)
    batch = await farm.plan([SLOW])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.in_flight == 1)
        await farm.cancel(batch)
        await eventually(lambda: farm.ended(batch), within=5.0)


async def test_a_worker_that_lost_its_lease_commits_nothing_and_aborts_its_requests(farm: Farm, stub: Stub) -> None:
    """Invariant 4."""
    batch = await farm.plan(["fast", f"{SLOW} 1", f"{SLOW} 2"])
    farm.tell(lease_heartbeat=0.1, segment_interval=1000.0)
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.in_flight == 2 and stub.calls == 3)
        await shards.expire_leases(farm.db)
        other = await farm.claim("worker-2")
        assert other is not None
        assert other.epoch == 2
        await eventually(lambda: stub.aborted == 2)
    assert await farm.segments(batch) == []
    assert (await farm.batch(batch)).counts.completed == 0


async def test_a_takeover_does_not_ask_again_what_is_committed(farm: Farm, stub: Stub) -> None:
    """Invariant 3."""
    batch = await farm.plan(["a", "b", SLOW, "c"])
    async with farm.worker(upstream=stub.url, worker_id="worker-1"):
        await eventually(lambda: farm.segments(batch))
        await shards.expire_leases(farm.db, holder="worker-1")
        lease = await farm.claim("ghost")
        assert lease is not None
        await eventually(lambda: stub.aborted == 1)
    await shards.expire_leases(farm.db)
    farm.tell(lease_grace=0.0)
    committed = set(await farm.lines(batch))
    async with farm.worker(upstream=stub.url, worker_id="worker-2"):
        await eventually(lambda: stub.calls_of(chat(SLOW)) == 2)
    again = {i for i, text in enumerate(["a", "b", SLOW, "c"]) if stub.calls_of(chat(text)) == 2}
    assert again.isdisjoint(committed)
    assert 2 in again


async def test_a_shard_whose_every_answer_is_committed_is_closed_without_asking(farm: Farm, stub: Stub) -> None:
    batch = await farm.plan(["a", "b"])
    original = commit.shards.append

    async def without_closing(*args: Any, close: bool = False, **more: Any) -> Any:
        return await original(*args, close=False, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit.shards, "append", without_closing)
        async with farm.worker(upstream=stub.url, worker_id="worker-1"):
            await eventually(lambda: farm.segments(batch))
            await shards.expire_leases(farm.db)
    assert len(await farm.open_shards(batch)) == 1
    farm.tell(lease_grace=0.0)
    await shards.expire_leases(farm.db)
    async with farm.worker(upstream=stub.url, worker_id="worker-2"):
        await eventually(lambda: farm.ended(batch))
    assert stub.calls == 2


def failing_first(step: Callable[..., Awaitable[Any]], errors: list[Exception], *, after: bool = False) -> Any:
    """A step that fails with these errors before it does what it should; with `after`, it has done it then."""

    async def call(*args: Any, **more: Any) -> Any:
        if errors:
            if after:
                await step(*args, **more)
            raise errors.pop(0)
        return await step(*args, **more)

    return call


@pytest.mark.parametrize("error", [Unavailable("away"), OutOfSpace("full", needed=1, free=0)])
async def test_results_are_kept_while_the_database_is_away(
    farm: Farm, stub: Stub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Invariant 13."""
    monkeypatch.setattr(commit.shards, "append", failing_first(shards.append, [error, error]))
    batch = await farm.plan([f"q{i}" for i in range(10)])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert sorted(await farm.lines(batch)) == list(range(10))
    assert stub.calls == 10


async def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    farm: Farm, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ledger rule 4."""
    monkeypatch.setattr(
        commit.shards, "append", failing_first(shards.append, [OutcomeUnknown("no answer")], after=True)
    )
    batch = await farm.plan([f"q{i}" for i in range(10)])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
        await eventually(lambda: farm.worker_state())
    assert sorted(await farm.lines(batch)) == list(range(10))
    assert (await farm.batch(batch)).counts.completed == 10


class AwayStore(LocalStore):
    """A store that does not answer the first few calls."""

    def __init__(self, folder: Path, *, puts: int = 0, gets: int = 0) -> None:
        super().__init__(folder)
        self.puts, self.gets = puts, gets

    async def put(self, key: str, data: bytes) -> Stored:
        self.puts -= 1
        if self.puts >= 0:
            raise Unavailable("the store is away")
        return await super().put(key, data)

    async def get(self, key: str) -> bytes:
        self.gets -= 1
        if self.gets >= 0:
            raise Unavailable("the store is away")
        return await super().get(key)


async def test_a_store_that_is_away_for_a_while_costs_nothing_but_time(
    farm: Farm, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "STORE_PAUSE_S", 0.05)
    monkeypatch.setattr(role, "open_store", lambda settings: AwayStore(Path(settings.objects), puts=2, gets=1))
    batch = await farm.plan(["a", "b"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(batch))
    assert stub.calls == 2


async def test_a_shard_that_cannot_be_read_is_put_off_and_others_run(farm: Farm, stub: Stub) -> None:
    broken = await farm.plan(["lost"], write_objects=False)
    whole = await farm.plan(["fine"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: farm.ended(whole))

        async def given_back() -> bool:
            return [s.state for s in await shards.shard_list(farm.db, batch_id=broken)] == ["ready"]

        await eventually(given_back)
    with pytest.raises(NotFound):
        await farm.store.get(f"batches/{broken}/e1/shard-0")


async def test_a_worker_that_is_stopped_commits_what_is_finished_and_gives_the_rest_back(
    farm: Farm, stub: Stub
) -> None:
    farm.tell(segment_interval=1000.0, max_in_flight=4)
    batch = await farm.plan(["a", "b", f"{SLOW} 1", f"{SLOW} 2", f"{SLOW} 3", f"{SLOW} 4", *"cdefgh"], per_shard=8)
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.in_flight == 4 and stub.calls == 6)
    assert sorted(await farm.lines(batch)) == [0, 1]
    assert stub.in_flight == 0
    assert stub.aborted == 4
    assert [s.state for s in await shards.shard_list(farm.db, batch_id=batch)] == ["ready", "ready"]
    lease = await farm.claim("worker-2")
    assert lease is not None
    assert lease.claims_since_progress == 1, "a shard that was given back in order is no sign of poison"


async def test_a_request_that_lands_while_the_worker_stops_is_kept(
    farm: Farm, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.drain.LANDING_S", 5.0)
    batch = await farm.plan(["[[stub latency=0.3]] nearly there"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.in_flight == 1)
    assert sorted(await farm.lines(batch)) == [0]
    assert await farm.ended(batch)


async def test_a_worker_that_cannot_commit_ends_all_the_same_and_leaves_its_lease_to_run_out(
    farm: Farm, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.drain.COMMIT_S", 0.2)
    monkeypatch.setattr(commit.shards, "append", failing_first(shards.append, [Unavailable("away")] * 1000))
    batch = await farm.plan(["a"])
    async with farm.worker(upstream=stub.url):
        await eventually(lambda: stub.calls == 1 and stub.in_flight == 0)
    assert await farm.segments(batch) == []
    assert [s.state for s in await shards.shard_list(farm.db, batch_id=batch)] == ["leased"]
