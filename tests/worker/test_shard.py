"""The bookkeeping of one shard: each place is in one state, and is answered once."""

from hypothesis import given
from hypothesis import strategies as st

from engine.packs import ERROR, OUTPUT, Pack
from engine.worker.outcome import History
from engine.worker.segments import Collected, Limits, bitmap, marked, tally
from engine.worker.shard import OpenShard, Phase
from state.records import Tally, Usage
from tests.worker.making import FOREVER, a_result, a_shard

TRIED = History(attempts=1)


def all_places(shard: OpenShard) -> list[int]:
    places = []
    while (flight := shard.take(len(shard.pack))) is not None:
        places.append(flight.place)
    return places


def test_requests_go_in_plan_order() -> None:
    assert all_places(a_shard(requests=5)) == [0, 1, 2, 3, 4]


def test_what_earlier_epochs_committed_is_not_sent_again() -> None:
    shard = a_shard(requests=6, done=[0, 2, 3, 5])
    assert shard.left == 2
    assert all_places(shard) == [1, 4]


def test_a_shard_whose_every_place_is_committed_is_complete() -> None:
    shard = a_shard(requests=3, done=range(3))
    assert shard.complete
    assert not shard.runnable(0)


def test_a_request_put_back_is_sent_before_later_ones_and_uses_no_attempt() -> None:
    shard = a_shard(requests=4)
    for _ in range(3):
        shard.take(4)
    shard.put_back(2)
    shard.put_back(1)
    assert shard.histories == {}
    assert all_places(shard) == [1, 2, 3]


def test_a_failed_request_rests_until_its_retry() -> None:
    shard = a_shard(requests=2)
    shard.take(2)
    shard.rest(0, TRIED)
    assert all_places(shard) == [1]
    assert shard.history(0) == TRIED
    shard.wake(0)
    assert all_places(shard) == [0]


def test_requests_that_were_never_sent_can_be_taken_first() -> None:
    shard = a_shard(requests=3)
    shard.take(3)
    shard.put_back(0)
    assert shard.has_fresh
    assert shard.take_fresh().place == 1
    assert shard.take_fresh().place == 2
    assert not shard.has_fresh
    assert all_places(shard) == [0]


def test_a_turn_stops_at_its_end() -> None:
    shard = a_shard(requests=4)
    assert shard.take(1) is not None
    assert shard.take(1) is None


def test_a_finished_request_is_counted_off() -> None:
    shard = a_shard(requests=1)
    shard.take(1)
    shard.finish(0, a_result(), now=5.0)
    assert shard.complete
    assert shard.collected.since == 5.0
    assert shard.flying == {}


def test_nothing_is_sent_past_the_trust_window() -> None:
    shard = a_shard(trusted_until=100.0)
    assert shard.runnable(99.0)
    assert not shard.runnable(100.0)


def test_nothing_is_sent_of_a_stopped_shard() -> None:
    shard = a_shard()
    shard.phase = Phase.STOPPED
    assert not shard.runnable(0)
    assert shard.sendable == 0


@given(st.lists(st.tuples(st.sampled_from(["take", "back", "rest", "wake", "finish"]), st.integers(0)), max_size=80))
def test_every_place_is_answered_once_whatever_happens_on_the_way(steps: list[tuple[str, int]]) -> None:
    """Invariant 1, within one shard."""
    shard, resting = a_shard(requests=6, done=[1]), list[int]()
    for verb, pick in steps:
        flying = sorted(shard.flying)
        if verb == "take":
            shard.take(6)
        elif verb == "wake" and resting:
            shard.wake(resting.pop(pick % len(resting)))
        elif flying and verb != "wake":
            place = flying[pick % len(flying)]
            if verb == "back":
                shard.put_back(place)
            elif verb == "rest":
                shard.rest(place, TRIED)
                resting.append(place)
            else:
                shard.finish(place, a_result(place), now=0.0)
    for place in resting:
        shard.wake(place)
    for place in list(shard.flying):
        shard.put_back(place)
    finished = set(shard.collected.rows)
    rest = all_places(shard)
    assert sorted([*finished, *rest, 1]) == list(range(6))
    assert shard.left == len(rest)


def test_results_are_due_by_lines_by_bytes_or_by_time() -> None:
    collected = Collected()
    limits = Limits(lines=2, bytes=10_000, seconds=2.0)
    assert not collected.due(limits, now=FOREVER)
    collected.add(0, a_result(0), now=10.0)
    assert not collected.due(limits, now=11.9)
    assert collected.due(limits, now=12.0)
    assert collected.due(Limits(lines=9, bytes=5, seconds=9.0), now=10.0)
    collected.add(1, a_result(1), now=10.0)
    assert collected.due(limits, now=10.0)


def test_a_segment_holds_the_lines_in_plan_order_and_says_which_places_they_answer() -> None:
    collected = Collected()
    collected.add(9, a_result(100, mark=ERROR), now=0)
    collected.add(2, a_result(200), now=0)
    sealed = collected.seal(10)
    assert [(r.line, r.mark, r.body) for r in Pack(sealed.data)] == [
        (200, OUTPUT, b'{"line": 200}\n'),
        (100, ERROR, b'{"line": 100}\n'),
    ]
    assert list(marked(sealed.places)) == [2, 9]
    assert sealed.lines == 2


def test_a_tally_counts_lines_sums_usage_and_names_the_first_success_model() -> None:
    results = [a_result(mark=ERROR, model="wrong"), a_result(model=None), a_result(model="m1"), a_result(model="m2")]
    assert tally(results) == Tally(3, 1, Usage(12, 4, 8, 0), "m1")


@given(st.sets(st.integers(0, 499)))
def test_a_bitmap_says_what_was_put_into_it(places: set[int]) -> None:
    assert list(marked(bitmap(places, 500))) == sorted(places)
