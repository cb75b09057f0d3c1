"""The ledger's clock never runs ahead of real time, so no jump of the wall clock expires a batch early (invariant 8)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state import batches, ledger_clock
from state.clock import ManualClock
from state.database import Database
from state.ledger_clock import TAKEOVER_S, WRITE_S, Reading, Row
from state.records import Batch
from tests.state.making import create, look

DAY = 86_400.0


async def tick(db: Database, clock: ManualClock, last: Reading | None = None) -> Reading:
    return await ledger_clock.tick(db, clock=clock, last=last)


async def due(db: Database, reading: Reading) -> list[str]:
    return await batches.due(db, ledger_now=reading.ledger_now, limit=10)


async def made(db: Database, clock: ManualClock, window_s: float = 60.0) -> Batch:
    return await create(db, now=clock.wall(), window_s=window_s)


async def test_a_batch_is_due_when_its_window_has_passed(db: Database, clock: ManualClock) -> None:
    batch = await made(db, clock)
    reading = await tick(db, clock)
    assert (await look(db, batch)).deadline == reading.ledger_now + 60.0
    clock.advance(59.9)
    reading = await tick(db, clock, reading)
    assert await due(db, reading) == []
    clock.advance(0.2)
    reading = await tick(db, clock, reading)
    assert await due(db, reading) == [batch.id]


@pytest.mark.parametrize("jump", [DAY, -DAY, 61.0, -61.0])
async def test_no_jump_of_the_wall_clock_makes_a_batch_due_early(db: Database, clock: ManualClock, jump: float) -> None:
    batch = await made(db, clock)
    reading = await tick(db, clock)
    clock.jump(jump)
    clock.advance(30)
    reading = await tick(db, clock, reading)
    clock.jump(jump)
    clock.advance(29)
    reading = await tick(db, clock, reading)
    assert await due(db, reading) == []
    clock.advance(1.1)
    assert await due(db, await tick(db, clock, reading)) == [batch.id], "nor late, in the same boot"


async def test_a_jump_between_creation_and_the_next_tick_does_not_matter(db: Database, clock: ManualClock) -> None:
    reading = await tick(db, clock)
    clock.jump(-DAY)
    batch = await made(db, clock)
    clock.jump(2 * DAY)
    reading = await tick(db, clock, reading)
    assert await due(db, reading) == []
    clock.advance(60.1)
    assert await due(db, await tick(db, clock, reading)) == [batch.id]


async def test_time_in_which_no_orchestrator_ran_counts_within_a_boot(db: Database, clock: ManualClock) -> None:
    batch = await made(db, clock)
    await tick(db, clock)
    clock.jump(-DAY)
    clock.advance(60.1)
    assert await due(db, await tick(db, clock, None)) == [batch.id]


async def test_a_batch_made_while_no_orchestrator_ran_gets_its_whole_window(db: Database, clock: ManualClock) -> None:
    await tick(db, clock)
    clock.advance(10 * DAY)
    batch = await made(db, clock)
    clock.advance(30)
    reading = await tick(db, clock, None)
    assert await due(db, reading) == []
    assert (await look(db, batch)).deadline == reading.ledger_now + 60.0


async def test_after_a_reboot_only_time_that_was_watched_counts(db: Database, clock: ManualClock) -> None:
    """How long the machine was off is not known: the wall clock may have been set while nobody looked."""
    batch = await made(db, clock)
    before = await tick(db, clock)
    rebooted = ManualClock(now=clock.now + DAY, ticks=5.0, boot="boot-2")
    reading = await tick(db, rebooted)
    assert reading.ledger_now == before.ledger_now
    rebooted.advance(TAKEOVER_S - 1)
    reading = await tick(db, rebooted, reading)
    assert reading.ledger_now == before.ledger_now
    rebooted.advance(1)
    reading = await tick(db, rebooted, reading)
    assert reading.ledger_now == before.ledger_now + TAKEOVER_S
    rebooted.advance(60 - TAKEOVER_S + 0.1)
    assert await due(db, await tick(db, rebooted, reading)) == [batch.id]


async def test_one_of_several_orchestrators_keeps_the_clock_and_another_takes_over(
    db: Database, clock: ManualClock
) -> None:
    other = ManualClock(now=clock.now - DAY, ticks=77.0, boot="another machine")
    ours = await tick(db, clock)
    theirs = await tick(db, other)
    begin = ours.ledger_now
    for _ in range(100):
        clock.advance(1)
        other.advance(1)
        ours = await tick(db, clock, ours)
        theirs = await tick(db, other, theirs)
        assert begin <= theirs.ledger_now <= ours.ledger_now
    assert ours.ledger_now == begin + 100
    assert theirs.ledger_now >= begin + 100 - WRITE_S
    gone = theirs
    for _ in range(100):
        other.advance(1)
        theirs = await tick(db, other, theirs)
    assert begin + 190 <= theirs.ledger_now <= begin + 200
    clock.advance(100)
    ours = await tick(db, clock, ours)
    assert ours.ledger_now <= theirs.ledger_now, "who comes back looks on, and does not catch up"
    assert gone.version < theirs.version


async def test_the_clock_is_seldom_written_while_nothing_happens(db: Database, clock: ManualClock) -> None:
    """A commit costs a disk its sleep."""
    reading = first = await tick(db, clock)
    for _ in range(10):
        clock.advance(WRITE_S / 10)
        reading = await tick(db, clock, reading)
    assert reading.version <= first.version + 1
    await made(db, clock)
    assert (await tick(db, clock, reading)).version == reading.version + 1


def test_going_back_is_not_counted() -> None:
    row = Row(1, 100.0, "boot", 50.0)
    assert ledger_clock.elapsed(row, boot="boot", monotonic=40.0, last=None) == 0.0


def test_a_row_that_changed_meanwhile_is_still_kept() -> None:
    row, last = Row(2, 100.0, "boot", 50.0), Reading(90.0, version=1, since=0.0)
    assert ledger_clock.elapsed(row, boot="other", monotonic=1e6, last=last) is None
    same = replace(last, version=2)
    assert ledger_clock.elapsed(row, boot="other", monotonic=TAKEOVER_S, last=same) == TAKEOVER_S
    assert ledger_clock.elapsed(row, boot="other", monotonic=TAKEOVER_S - 0.1, last=same) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # which orchestrator ticks; the others are suspended
            st.floats(0.0, 40.0),  # how much time passes before it does
            st.booleans(),  # whether it has restarted
        ),
        max_size=40,
    )
)
def test_between_any_two_moments_the_ledger_grows_by_no_more_than_real_time(
    ticks: list[tuple[int, float, bool]],
) -> None:
    """The one thing that deadlines rest on, over orchestrators that come, go, and sleep as they like."""
    boots = [("a", 1_000.0), ("a", 1_000.0), ("b", 5.0)]
    lasts: list[Reading | None] = [None, None, None]
    row, real = Row(1, 0.0, "a", 1_000.0), 0.0
    history = [(0.0, 0.0)]
    for who, passed, restarted in ticks:
        real += passed
        boot, base = boots[who]
        last = None if restarted else lasts[who]
        grown = ledger_clock.elapsed(row, boot=boot, monotonic=base + real, last=last)
        if grown is None:
            kept = last is not None and last.version == row.version
            lasts[who] = Reading(row.ledger, row.version, last.since if kept and last else base + real)
            continue
        row = Row(row.version + 1, row.ledger + grown, boot, base + real)
        lasts[who] = Reading(row.ledger, row.version, base + real)
        assert all(row.ledger - ledger <= real - then + 1e-6 for then, ledger in history)
        history.append((real, row.ledger))
