"""Leases kept alive, trusted for so long and no longer, and heard of when they are lost."""

from collections.abc import Mapping

import pytest

from engine.worker.heartbeat import Heartbeat, Status
from engine.worker.leases import MARGIN, Key, Leases
from state import batches, shards, workers
from state.clock import ManualClock
from state.database import Database
from state.records import Unavailable
from state.shards import Renewal
from tests.state import making
from tests.support.waiting import eventually

TTL = 30.0
TRUST = TTL * (1 - MARGIN)


class Ear:
    def __init__(self) -> None:
        self.heard: list[Renewal] = []

    def __call__(self, asked: Mapping[Key, int], renewal: Renewal) -> None:
        self.heard.append(renewal)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now=making.NOW)


@pytest.fixture
def leases() -> Leases:
    return Leases(ttl=TTL)


def a_heartbeat(url: str, leases: Leases, clock: ManualClock, ear: Ear, status: Status) -> Heartbeat:
    return Heartbeat(
        database_url=url,
        worker_id="worker-1",
        engine="stub",
        leases=leases,
        clock=clock,
        ttl=TTL,
        every=5.0,
        heard=ear,
        status=lambda: status,
    )


def test_a_lease_is_trusted_from_the_start_of_its_claim_less_a_margin(leases: Leases) -> None:
    holding = leases.hold(("b", 0), 1, started=100.0)
    assert holding.trusted_until == 100.0 + TRUST


def test_a_renewal_extends_the_trust_from_when_it_started(leases: Leases) -> None:
    holding = leases.hold(("b", 0), 1, started=100.0)
    leases.renewed({("b", 0): 1}, [("b", 0)], started=110.0)
    assert holding.trusted_until == 110.0 + TRUST
    leases.renewed({("b", 0): 1}, [("b", 0)], started=90.0)
    assert holding.trusted_until == 110.0 + TRUST, "a late answer to an old renewal takes nothing away"


def test_a_renewal_of_an_older_epoch_says_nothing_about_a_newer_lease(leases: Leases) -> None:
    leases.hold(("b", 0), 1, started=0.0)
    asked = leases.held()
    newer = leases.hold(("b", 0), 2, started=1.0)
    leases.renewed(asked, [("b", 0)], started=50.0)
    assert newer.trusted_until == 1.0 + TRUST
    leases.drop(("b", 0), 1)
    assert leases.holding(("b", 0)) is newer


async def test_a_beat_renews_every_lease_and_publishes_the_worker(
    db: Database, database_url: str, clock: ManualClock, leases: Leases
) -> None:
    await making.running(db, 3, 3)
    for _ in range(2):
        lease = await making.claim(db)
        leases.hold((lease.batch_id, lease.number), lease.epoch, started=clock.monotonic())
    heartbeat = a_heartbeat(database_url, leases, clock, Ear(), Status("ready", None, ("smol",)))
    clock.advance(20.0)
    await heartbeat.beat(db)
    assert [leases.holding(key).trusted_until for key in leases.held()] == [clock.monotonic() + TRUST] * 2  # type: ignore[union-attr]
    clock.advance(TTL + making.GRACE - 1)
    assert await shards.candidates(db, models=["smol"], now=clock.wall(), grace=making.GRACE) == []
    seen = await workers.listed(db, now=clock.wall(), within=100.0)
    assert [(w.worker_id, w.state, w.models) for w in seen] == [("worker-1", "ready", ("smol",))]


async def test_a_beat_hears_of_what_is_lost_and_of_what_is_stopped(
    db: Database, database_url: str, clock: ManualClock, leases: Leases
) -> None:
    lost_batch, stopped_batch = await making.running(db, 1), await making.running(db, 1)
    for _ in range(2):
        lease = await making.claim(db)
        leases.hold((lease.batch_id, lease.number), lease.epoch, started=clock.monotonic())
    clock.advance(TTL + making.GRACE + 1)
    assert (await making.claim(db, worker="worker-2", now=clock.wall())).batch_id == lost_batch.id
    await batches.cancel(db, project_id=making.PROJECT, batch_id=stopped_batch.id, now=clock.wall())
    ear = Ear()
    heartbeat = a_heartbeat(database_url, leases, clock, ear, Status("ready"))
    heartbeat.start()
    await eventually(lambda: ear.heard)
    await heartbeat.stop()
    assert ear.heard[0].lost == {(lost_batch.id, 0)}
    assert ear.heard[0].stopped == {(stopped_batch.id, 0)}, "a late renewal succeeds while the epoch is unchanged"


async def test_a_nudge_brings_the_next_beat_forward(
    db: Database, database_url: str, clock: ManualClock, leases: Leases
) -> None:
    await making.running(db, 1)
    lease = await making.claim(db)
    leases.hold((lease.batch_id, lease.number), lease.epoch, started=clock.monotonic())
    ear = Ear()
    heartbeat = a_heartbeat(database_url, leases, clock, ear, Status("ready"))
    heartbeat.start()
    await eventually(lambda: len(ear.heard) == 1)
    heartbeat.nudge()
    await eventually(lambda: len(ear.heard) == 2, within=4.0)
    await heartbeat.stop()


async def test_a_heartbeat_outlives_a_database_that_is_away(
    db: Database, database_url: str, clock: ManualClock, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    await making.running(db, 1)
    lease = await making.claim(db)
    holding = leases.hold((lease.batch_id, lease.number), lease.epoch, started=0.0)
    original, failures = shards.renew, [Unavailable("away"), RuntimeError("a bug")]

    async def renew(*args: object, **more: object) -> Renewal:
        if failures:
            raise failures.pop()
        return await original(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.worker.heartbeat.shards.renew", renew)
    monkeypatch.setattr("engine.worker.heartbeat.RETRY_S", 0.01)
    ear = Ear()
    heartbeat = a_heartbeat(database_url, leases, clock, ear, Status("ready"))
    heartbeat.start()
    await eventually(lambda: ear.heard)
    await heartbeat.stop()
    assert failures == []
    assert holding.trusted_until == clock.monotonic() + TRUST


async def test_an_unchanged_state_is_published_no_more_often_than_the_heartbeat(
    db: Database, database_url: str, clock: ManualClock, leases: Leases
) -> None:
    heartbeat = a_heartbeat(database_url, leases, clock, Ear(), Status("ready"))
    await heartbeat.beat(db)
    first = (await workers.listed(db, now=clock.wall()))[0].seen_at
    clock.advance(1.0)
    await heartbeat.beat(db)
    assert (await workers.listed(db, now=clock.wall()))[0].seen_at == first
    clock.advance(5.0)
    await heartbeat.beat(db)
    assert (await workers.listed(db, now=clock.wall()))[0].seen_at == clock.wall()
