import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.poison import Care, Poison, care, mark_of, place_of


@dataclass
class Night:
    """A worker and an engine that dies sooner or later whenever a poison request is there."""

    requests: int
    at_once: int
    poison: frozenset[int]
    dies_at_once: st.DataObject
    deaths: int = 0
    answered: list[int] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)
    crowd_during_isolation: bool = False

    def run(self) -> None:
        state: Poison[int] = Poison()
        waiting = list(range(self.requests))
        flying: list[int] = []
        while waiting or flying:
            for key in [k for k in waiting if k in state.group or not state.isolating][: self.at_once - len(flying)]:
                waiting.remove(key)
                flying.append(key)
            if state.isolating and not set(flying) <= set(state.group):
                self.crowd_during_isolation = True
            harmless = [k for k in flying if k not in self.poison]
            if len(harmless) == len(flying) or (harmless and not self.dies_at_once.draw(st.booleans())):
                key = self.dies_at_once.draw(st.sampled_from(harmless))
                flying.remove(key)
                self.answered.append(key)
                state.finished(key)
                continue
            self.deaths += 1
            assert self.deaths <= 1000, "it never ends"
            gone = state.died(flying)
            self.quarantined += gone
            waiting = sorted({*waiting, *flying} - {*gone})
            flying = []


@given(data=st.data(), requests=st.integers(1, 40), at_once=st.integers(1, 16))
def test_exactly_the_poison_is_quarantined_within_the_bound_and_all_others_are_answered_once(
    data: st.DataObject, requests: int, at_once: int
) -> None:  # invariant 10
    poison = frozenset(data.draw(st.sets(st.integers(0, requests - 1), max_size=6)))
    night = Night(requests, at_once, poison, data)
    night.run()
    assert sorted(night.quarantined) == sorted(poison)
    assert sorted(night.answered) == sorted(set(range(requests)) - poison)
    assert night.deaths <= len(poison) * (4 + math.ceil(math.log2(at_once)))
    assert not night.crowd_during_isolation


def test_after_the_first_death_everything_may_run_again() -> None:
    state: Poison[str] = Poison()
    assert state.died(["a", "b"]) == ()
    assert not state.isolating
    assert state.group == ()


def test_only_those_at_both_deaths_are_suspects_and_nothing_runs_beside_them() -> None:
    state: Poison[str] = Poison()
    state.died(["a", "b", "c"])
    state.finished("a")
    state.died(["b", "c", "d"])
    assert state.isolating
    assert state.group == ("b", "c")


def test_a_group_that_kills_is_split_in_halves() -> None:
    state: Poison[int] = Poison()
    state.died([1, 2, 3, 4])
    state.died([1, 2, 3, 4])
    state.died([1, 2, 3, 4])
    assert state.group == (1, 2)
    state.finished(1)
    state.finished(2)
    assert state.group == (3, 4)


def test_one_death_alone_is_not_enough_for_quarantine_and_two_are() -> None:
    state: Poison[str] = Poison()
    assert [state.died(["a"]) for _ in range(4)] == [(), (), (), ("a",)]
    assert not state.isolating


def test_an_answered_request_is_forgotten() -> None:
    state: Poison[str] = Poison()
    state.died(["a"])
    state.finished("a")
    state.died(["a"])
    assert not state.isolating


def test_a_death_with_nothing_at_the_engine_is_nobodys_fault() -> None:
    state: Poison[str] = Poison()
    state.died(["a"])
    assert state.died([]) == ()
    assert not state.isolating


def test_members_that_were_not_sent_yet_stay_suspects_when_their_group_kills() -> None:
    state: Poison[int] = Poison()
    state.died([1, 2, 3])
    state.died([1, 2, 3])
    state.died([1])
    assert state.group == (1,)
    assert state.died([1]) == (1,)
    assert state.group == (2, 3)


@pytest.mark.parametrize(
    ("vain", "mark", "done", "expected"),
    [
        (0, None, (), Care()),
        (1, None, (), Care()),
        (2, None, (), Care(careful=True)),
        (3, mark_of(7), (), Care(careful=True, first=7)),
        (0, mark_of(7), (), Care(careful=True, first=7)),
        (4, mark_of(7, again=True), (), Care(careful=True, give_up=7)),
        (4, mark_of(0, again=True), (), Care(careful=True, give_up=0)),
        (3, mark_of(7), (7,), Care(careful=True)),
        (0, mark_of(7, again=True), (7,), Care()),
    ],
)
def test_a_claimer_knows_from_the_row_how_careful_to_be(
    vain: int, mark: int | None, done: tuple[int, ...], expected: Care
) -> None:
    assert care(claims_in_vain=vain, mark=mark, done=done) == expected


@given(st.integers(0, 10**6), st.booleans())
def test_a_mark_names_its_place_and_try(place: int, again: bool) -> None:
    assert place_of(mark_of(place, again=again)) == (place, again)


def test_a_request_that_kills_every_worker_is_given_up_by_the_one_after_two_deaths_alone() -> None:
    mark: int | None = None
    tried = []
    for vain in range(10):
        plan = care(claims_in_vain=vain, mark=mark, done=())
        if plan.give_up is not None:
            break
        place = 0 if plan.first is None else plan.first
        tried.append(plan.careful)
        if plan.careful:
            mark = mark_of(place, again=plan.first is not None)
    assert tried == [False, False, True, True]
    assert plan.give_up == 0
