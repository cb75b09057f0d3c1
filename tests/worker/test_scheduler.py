"""The order in which requests of several shards are handed out."""

from itertools import groupby

from engine.worker.scheduler import CAREFUL_TURN, Scheduler
from engine.worker.shard import Flight, OpenShard
from engine.worker.turns import LONGEST_TURN, TURN
from tests.worker.making import a_shard


def a_scheduler(*shards: OpenShard) -> Scheduler:
    scheduler = Scheduler()
    for shard in shards:
        scheduler.add(shard)
    return scheduler


def drained(scheduler: Scheduler, most: int = 10_000) -> list[tuple[str, int, int]]:
    order = []
    while len(order) < most and (flight := scheduler.take(now=0, wall=0, in_flight=0)) is not None:
        order.append((flight.shard.lease.batch_id, flight.shard.lease.number, flight.place))
    return order


def one(scheduler: Scheduler, *, in_flight: int = 0) -> Flight | None:
    return scheduler.take(now=0, wall=0, in_flight=in_flight)


def test_a_lone_batch_is_sent_in_plan_order_across_its_shards() -> None:
    scheduler = a_scheduler(a_shard(number=1, requests=40), a_shard(number=0, requests=40))
    assert drained(scheduler) == [("batch_a", n, i) for n in (0, 1) for i in range(40)]


def test_batches_take_turns_and_a_turn_is_consecutive() -> None:
    scheduler = a_scheduler(a_shard("a", requests=96), a_shard("b", requests=96))
    runs = [(batch, len(list(run))) for batch, run in groupby(drained(scheduler), key=lambda row: row[0])]
    assert runs == [("a", TURN), ("b", TURN)] * 3


def test_a_prefix_group_stays_together_beside_other_batches() -> None:
    marks = [0 if i % 60 == 0 else 9 for i in range(180)]
    scheduler = a_scheduler(a_shard("grouped", requests=180, marks=marks), a_shard("other", requests=500))
    runs = [list(run) for _, run in groupby(drained(scheduler), key=lambda row: row[0])]
    grouped = [[place for _, _, place in run] for run in runs if run[0][0] == "grouped"]
    assert grouped == [list(range(start, start + 60)) for start in (0, 60, 120)]


def test_a_small_batch_is_not_behind_a_large_one() -> None:
    large = a_shard("large", requests=500, marks=[9] * 500)
    scheduler = a_scheduler(large)
    drained(scheduler, 200)
    scheduler.add(a_shard("small", requests=3))
    order = [batch for batch, _, _ in drained(scheduler)]
    assert order.index("small") <= LONGEST_TURN


def test_a_shard_that_is_lost_in_its_turn_is_left() -> None:
    first, second = a_shard("a", requests=40), a_shard("b", requests=40)
    scheduler = a_scheduler(first, second)
    drained(scheduler, 3)
    first.holding.trusted_until = 0.0
    assert {batch for batch, _, _ in drained(scheduler)} == {"b"}


def test_a_careful_shard_runs_alone_one_request_at_a_time() -> None:
    """Invariant 10: whoever kills this worker is the one that was being tried."""
    scheduler = a_scheduler(a_shard("careful", requests=2, careful=2))
    assert one(scheduler, in_flight=5) is None, "it waits until the engine is empty"
    first = one(scheduler)
    assert first is not None
    assert first.careful
    scheduler.add(a_shard("other", requests=5))
    assert one(scheduler, in_flight=1) is None, "nothing runs beside it"
    first.shard.put_back(first.place)
    scheduler.landed(first)
    assert one(scheduler) is not None


def test_a_careful_shard_does_not_keep_others_waiting_for_long() -> None:
    scheduler = a_scheduler(a_shard("careful", requests=100, careful=100), a_shard("other", requests=100))
    order = []
    while len(order) < 60 and (flight := one(scheduler)) is not None:
        order.append(flight.shard.lease.batch_id)
        scheduler.landed(flight)
    assert max(len(list(run)) for key, run in groupby(order) if key == "careful") <= TURN
    assert "other" in order[: CAREFUL_TURN * 5]


def test_what_waits_to_be_sent_is_known_by_batch() -> None:
    scheduler = a_scheduler(a_shard("a", number=0), a_shard("a", number=1), a_shard("b", requests=9))
    one(scheduler)
    assert scheduler.sendable() == {"a": 7, "b": 9}


def test_nothing_open_is_nothing_to_send() -> None:
    scheduler = Scheduler()
    assert one(scheduler) is None
    shard = a_shard()
    scheduler.add(shard)
    scheduler.remove(shard)
    assert one(scheduler) is None
