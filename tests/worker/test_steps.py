"""The worker's steps one by one, on a clock that moves only when told to."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.backends.echo import EchoEngine
from engine.worker.feed import Fixed
from engine.worker.outcome import EngineFailure, History, Scope
from engine.worker.shard import NO_HISTORY
from engine.worker.worker import IDLE_S, SHUN_S, Worker
from state import shards
from state.clock import ManualClock
from state.objects import Stored
from state.shards import Renewal
from state.wake import PollingWaker
from tests.support.waiting import eventually
from tests.worker.farm import Farm

pytestmark = pytest.mark.asyncio


@pytest.fixture
def hands(farm: Farm) -> ManualClock:
    return ManualClock(now=farm.clock.wall())


@pytest.fixture
async def worker(farm: Farm, hands: ManualClock) -> AsyncIterator[Worker]:
    farm.tell(engine="echo", model="echo", echo_latency=60.0, max_in_flight=2)
    backend = EchoEngine(farm.settings)
    await backend.start()
    worker = Worker(
        settings=farm.settings,
        worker_id="worker-1",
        database=farm.db,
        store=farm.store,
        backend=backend,
        waker=PollingWaker(),
        clock=hands,
        throttle=Fixed(2),
    )
    worker.models = ("echo",)
    worker.desk.accepted = {"echo": frozenset({"echo"})}
    worker.engine_up()
    yield worker
    await worker.feed.close()
    await worker.triage.close()
    await backend.close()


async def test_past_the_trust_window_nothing_is_sent_until_a_renewal_answers(
    farm: Farm, worker: Worker, hands: ManualClock
) -> None:
    """Ledger rule 6."""
    batch = await farm.plan([f"q{i}" for i in range(6)], model="echo")
    await worker.claim_what_is_due()
    assert worker.feed.in_flight == 2
    hands.advance(farm.settings.lease_ttl)
    worker.feed.recall(list(worker.feed.flights))
    await eventually(lambda: worker.feed.in_flight == 0)
    worker.feed.pump()
    assert worker.feed.in_flight == 0
    key = (batch, 0)
    worker.leases.renewed({key: 1}, [key], started=hands.monotonic())
    worker.heard({key: 1}, Renewal(frozenset([key]), frozenset(), frozenset()))
    assert worker.feed.in_flight == 2


async def test_past_the_trust_window_nothing_is_committed(farm: Farm, worker: Worker, hands: ManualClock) -> None:
    batch = await farm.plan(["[[echo:latency=0]] a"], model="echo")
    await worker.claim_what_is_due()
    hands.advance(farm.settings.lease_ttl)
    shard = worker.shards[batch, 0]
    await eventually(lambda: shard.complete)
    await eventually(lambda: shard.committing is not None)
    assert await farm.segments(batch) == []
    worker.leases.renewed({(batch, 0): 1}, [(batch, 0)], started=hands.monotonic())
    await eventually(lambda: farm.ended(batch))


async def test_a_shard_that_was_never_begun_is_given_back_after_a_while_and_left_to_others(
    farm: Farm, worker: Worker, hands: ManualClock
) -> None:
    """Invariant 9: another worker may be idle."""
    await farm.plan(["q0", "q1", "q2"], model="echo")
    later = await farm.plan(["r0"], model="echo")
    await worker.claim_what_is_due()
    assert set(worker.shards) >= {(later, 0)}
    await worker.tend()
    hands.advance(IDLE_S)
    await worker.tend()
    assert (later, 0) not in worker.shards
    assert [s.state for s in await shards.shard_list(farm.db, batch_id=later)] == ["ready"]
    await worker.claim_what_is_due()
    assert (later, 0) not in worker.shards
    hands.advance(SHUN_S)
    await worker.claim_what_is_due()
    assert (later, 0) in worker.shards


async def test_a_worker_whose_engine_is_down_holds_no_shard_for_long(
    farm: Farm, worker: Worker, hands: ManualClock
) -> None:
    await farm.plan(["q0", "q1", "q2"], model="echo")
    await worker.claim_what_is_due()
    worker.engine_died()
    await eventually(lambda: worker.feed.in_flight == 0)
    await worker.tend()
    assert worker.shards
    hands.advance(IDLE_S)
    await worker.tend()
    assert not worker.shards
    await worker.claim_what_is_due()
    assert not worker.shards, "nothing is claimed while the engine is down"


async def test_feeding_pauses_while_too_much_is_uncommitted(farm: Farm, worker: Worker) -> None:
    """Invariant 12."""
    await farm.plan(["q0", "q1"], model="echo")
    worker.desk.uncommitted = 10**12
    await worker.claim_what_is_due()
    assert worker.feed.in_flight == 0
    worker.desk.uncommitted = 0
    worker.feed.pump()
    assert worker.feed.in_flight == 2


async def test_what_a_lost_shard_had_finished_leaves_memory(farm: Farm, worker: Worker) -> None:
    batch = await farm.plan(["[[echo:latency=0]] a", "b", "c"], model="echo")
    await worker.claim_what_is_due()
    shard = worker.shards[batch, 0]
    await eventually(lambda: shard.collected.rows)
    assert worker.desk.uncommitted > 0
    worker.heard({(batch, 0): 1}, Renewal(frozenset(), frozenset([(batch, 0)]), frozenset()))
    assert worker.desk.uncommitted == 0
    assert not worker.shards
    await eventually(lambda: worker.feed.in_flight == 0)


async def test_a_renewal_that_finds_a_shard_closed_by_ourselves_is_no_loss(
    farm: Farm, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await farm.plan(["[[echo:latency=0]] a"], model="echo")
    put, heard = farm.store.put, asyncio.Event()

    async def put_later(key: str, data: bytes) -> Stored:
        await heard.wait()
        return await put(key, data)

    monkeypatch.setattr(farm.store, "put", put_later)
    await worker.claim_what_is_due()
    shard = worker.shards[batch, 0]
    await eventually(lambda: shard.committing is not None)
    worker.heard({(batch, 0): 1}, Renewal(frozenset(), frozenset([(batch, 0)]), frozenset()))
    heard.set()
    await eventually(lambda: farm.ended(batch))
    assert sorted(await farm.lines(batch)) == [0]


async def test_a_suspect_may_find_out_whether_the_engine_works_again_when_nothing_else_may_be_sent(
    farm: Farm, worker: Worker, hands: ManualClock
) -> None:
    """A request that met a failure of the engine lets others go first, but these wait for the suspects."""
    alone = await farm.plan(["q0"], model="echo")
    await worker.claim_what_is_due()
    for _ in range(2):
        worker.engine_died()
        await eventually(lambda: worker.feed.in_flight == 0)
        worker.engine_up()
    await farm.plan(["r0", "r1", "r2"], model="echo")
    await worker.claim_what_is_due()
    suspect = worker.shards[alone, 0]
    worker.desk.open = False
    worker.feed.recall_shard(suspect)
    await eventually(lambda: not suspect.flying)
    worker.desk.open = True
    failure = EngineFailure("answers 503", Scope.ENGINE, 1.0, NO_HISTORY)
    suspect.histories[0] = History(refusals=1)
    worker.triage.breaker.failed(suspect.lane, failure, sent_at=hands.monotonic())
    worker.feed.pump()
    assert not suspect.flying
    hands.advance(60)
    worker.leases.renewed(worker.leases.held(), list(worker.leases.held()), started=hands.monotonic())
    worker.feed.pump()
    assert set(suspect.flying) == {0}


async def test_a_suspect_whose_shard_was_lost_and_came_again_stops_nobody(farm: Farm, worker: Worker) -> None:
    batch = await farm.plan(["q0", "q1", "q2"], model="echo")
    await worker.claim_what_is_due()
    for _ in range(2):
        worker.engine_died()
        await eventually(lambda: worker.feed.in_flight == 0)
        worker.engine_up()
    worker.engine_died()
    await eventually(lambda: worker.feed.in_flight == 0)
    worker.heard({(batch, 0): 1}, Renewal(frozenset(), frozenset([(batch, 0)]), frozenset()))
    await shards.expire_leases(farm.db)
    worker.desk.open = True
    await worker.claim_what_is_due()
    assert worker.shards
    worker.feed.pump()
    worker.feed.pump()
    assert worker.feed.in_flight == 2


async def test_a_shard_that_cannot_be_opened_for_an_unknown_reason_is_not_held(
    farm: Farm, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: a lease that is renewed without being run would keep the shard from everybody for ever."""
    await farm.plan(["q0"], model="echo")
    monkeypatch.setattr("engine.worker.claims.care", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await worker.claim_what_is_due()
    assert worker.leases.held() == {}
