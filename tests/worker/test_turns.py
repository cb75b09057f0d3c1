"""Who is served next, and how many requests in a row."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.worker.turns import FAIR_EVERY, LONGEST_TURN, TURN, Ring, Standing, Turns, short_of_time, turn_end

FAR = 1e12


def a_standing(batch: str, project: str = "p", *, deadline: float = FAR, left: int = 1000) -> Standing:
    return Standing(batch, project, deadline, left)


def served(turns: Turns, standings: list[Standing], times: int, *, size: int = TURN) -> list[str]:
    order = []
    for _ in range(times):
        chosen = turns.choose(standings, now=0, rate=0)
        assert chosen is not None
        turns.charge(chosen, size)
        order.append(chosen.batch_id)
    return order


def test_a_turn_of_unrelated_requests_has_the_ordinary_length() -> None:
    assert turn_end([0] * 500, [100] * 500, 10) == 10 + TURN


def test_a_turn_ends_with_its_shard() -> None:
    assert turn_end([90] * 40, [100] * 40, 30) == 40


def test_a_turn_is_not_cut_inside_a_prefix_group() -> None:
    groups_of_20 = [0 if i % 20 == 0 else 90 for i in range(500)]
    assert turn_end(groups_of_20, [100] * 500, 0) == 40


def test_a_very_long_prefix_group_is_cut() -> None:
    assert turn_end([90] * 500, [100] * 500, 0) == LONGEST_TURN


def test_sharing_less_than_half_of_a_request_makes_no_group() -> None:
    assert turn_end([40] * 500, [100] * 500, 0) == TURN


@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=300), start=st.integers(0)
)
def test_a_turn_always_makes_progress_and_stays_within_its_bounds(rows: list[tuple[int, int]], start: int) -> None:
    start %= len(rows)
    end = turn_end([m for m, _ in rows], [s for _, s in rows], start)
    assert start < end <= min(len(rows), start + LONGEST_TURN)


def test_two_batches_alternate() -> None:
    order = served(Turns(), [a_standing("a"), a_standing("b")], 8)
    assert Counter(order) == {"a": 4, "b": 4}
    assert order[:2] in (["a", "b"], ["b", "a"])


def test_a_project_with_many_batches_gets_no_more_than_one_with_a_single_batch() -> None:
    standings = [a_standing(f"many-{i}", "crowd") for i in range(9)] + [a_standing("one", "single")]
    order = served(Turns(), standings, 40)
    assert Counter(b.startswith("many") for b in order) == {True: 20, False: 20}


def test_a_batch_of_long_turns_pays_for_them() -> None:
    turns, spent = Turns(), Counter[str]()
    standings = [a_standing("long"), a_standing("short")]
    for _ in range(200):
        chosen = turns.choose(standings, now=0, rate=0)
        assert chosen is not None
        size = LONGEST_TURN if chosen.batch_id == "long" else TURN
        turns.charge(chosen, size)
        spent[chosen.batch_id] += size
    assert abs(spent["long"] - spent["short"]) <= LONGEST_TURN + TURN


def test_a_newcomer_waits_for_one_turn_of_each_of_the_others_at_most() -> None:
    turns = Turns()
    old = [a_standing("a"), a_standing("b")]
    served(turns, old, 101)
    assert "new" in served(turns, [*old, a_standing("new")], 3)


def test_nobody_to_serve_is_no_turn() -> None:
    assert Turns().choose([], now=0, rate=0) is None


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdef"), min_size=1), st.integers(1, LONGEST_TURN)), max_size=60))
def test_the_ring_always_chooses_one_of_the_runnable(rounds: list[tuple[set[str], int]]) -> None:
    ring = Ring[str]()
    for runnable, requests in rounds:
        key = ring.choose(runnable)
        assert key in runnable
        ring.charge(key, requests)


@given(st.lists(st.integers(1, LONGEST_TURN), min_size=100, max_size=200))
def test_whoever_always_has_work_gets_an_equal_share(sizes: list[int]) -> None:
    ring, spent = Ring[str](), Counter[str]()
    for size in sizes:
        key = ring.choose(["a", "b", "c"])
        assert key is not None
        ring.charge(key, size)
        spent[key] += size
    assert max(spent.values()) - min(spent[k] for k in "abc") <= 2 * (LONGEST_TURN + TURN)


def test_a_batch_is_short_of_time_when_its_work_needs_most_of_what_is_left() -> None:
    assert short_of_time(deadline=1000, now=0, left=600, rate=1)
    assert not short_of_time(deadline=1000, now=0, left=400, rate=1)
    assert short_of_time(deadline=1000, now=990, left=1, rate=100)
    assert not short_of_time(deadline=1000, now=0, left=10**9, rate=0), "an unknown rate alarms nobody"


def test_the_earliest_deadline_goes_first_among_those_short_of_time() -> None:
    standings = [a_standing("calm"), a_standing("late", deadline=900), a_standing("soon", deadline=800)]
    chosen = Turns().choose(standings, now=0, rate=1)
    assert chosen is not None
    assert chosen.batch_id == "soon"


def test_a_deadline_that_cannot_be_met_does_not_stop_everybody_else() -> None:
    turns = Turns()
    standings = [a_standing("calm"), a_standing("hopeless", deadline=1, left=10**6)]
    order = served(turns, standings, 10 * FAIR_EVERY)
    assert order.count("calm") >= 5
    assert order.count("hopeless") > order.count("calm")
