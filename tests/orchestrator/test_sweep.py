"""The sweeper: what is due ends, what is stopped closes, and those who wait are woken."""

from engine.orchestrator import sweep
from state.records import BatchStatus
from tests.orchestrator.house import House, input_lines


async def test_workers_hear_of_a_stopped_batch_at_once(house: House):
    batch = await house.planned(3)
    house.notices.woken.clear()
    await house.cancel(batch)
    await house.sweep.step()
    assert house.notices.woken == ["worker", "orchestrator"]


async def test_a_quiet_night_wakes_nobody(house: House):
    await house.planned(3)
    house.notices.woken.clear()
    assert not await house.sweep.step()
    assert house.notices.woken == []


async def test_a_jump_of_the_wall_clock_expires_nothing(house: House):
    batch = await house.planned(3, window_s=3600.0)
    house.clock.jump(7200.0)
    await house.settle()
    assert (await house.get(batch)).status is BatchStatus.IN_PROGRESS  # invariant 8
    house.clock.jump(-7200.0)
    house.clock.advance(3601.0)
    await house.sweep.step()
    assert (await house.get(batch)).status is BatchStatus.FINALIZING


async def test_more_batches_than_one_round_looks_at_are_all_stopped(house: House, monkeypatch):
    monkeypatch.setattr(sweep, "_AT_ONCE", 4)
    made = [await house.create(input_lines(1), window_s=60.0) for _ in range(6)]
    await house.sweep.step()
    house.clock.advance(61.0)
    assert await house.sweep.step()  # there is more to do at once
    await house.settle()
    assert {(await house.get(batch)).status for batch in made} == {BatchStatus.EXPIRED}
