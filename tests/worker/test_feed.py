"""Feeding an engine: how much is in flight, and taking requests back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.backends.protocol import EngineError, NotSent, Reply
from engine.worker.feed import Feed, Fixed
from engine.worker.shard import Flight
from tests.support.waiting import eventually
from tests.worker.making import a_shard

pytestmark = pytest.mark.asyncio


class ADesk:
    """Hands out the places of one shard; the test decides when, and with what, each is answered."""

    def __init__(self, requests: int = 10) -> None:
        self.shard = a_shard(requests=requests)
        self.at_engine: dict[int, asyncio.Future[Reply]] = {}
        self.sent: list[int] = []
        self.landings: list[tuple[int, Reply | EngineError]] = []
        self.taken_back: list[int] = []

    def next(self, in_flight: int) -> Flight | None:
        return self.shard.take(len(self.shard.pack))

    async def send(self, flight: Flight) -> Reply:
        self.sent.append(flight.place)
        self.at_engine[flight.place] = asyncio.get_running_loop().create_future()
        return await self.at_engine[flight.place]

    def landed(self, flight: Flight, result: Reply | EngineError) -> None:
        self.landings.append((flight.place, result))

    def recalled(self, flight: Flight) -> None:
        self.taken_back.append(flight.place)
        self.shard.put_back(flight.place)

    def answer(self, place: int, size: int = 2) -> None:
        self.at_engine.pop(place).set_result(Reply(200, b"x" * size))


@pytest.fixture
def desk() -> ADesk:
    return ADesk()


@pytest.fixture
async def feed(desk: ADesk) -> AsyncIterator[Feed]:
    feed = Feed(desk=desk, throttle=Fixed(3), most_bytes=1000)
    yield feed
    await feed.close()
    assert not feed.broken.done()


async def test_the_limit_is_reached_and_never_passed(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    await eventually(lambda: desk.sent == [0, 1, 2])
    desk.answer(1)
    await eventually(lambda: desk.sent == [0, 1, 2, 3])
    assert feed.in_flight == 3


async def test_everything_is_sent_in_order_and_landed_once(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    for place in range(10):
        await eventually(lambda place=place: place in desk.at_engine)
        desk.answer(place)
    await eventually(lambda: len(desk.landings) == 10)
    assert desk.sent == list(range(10))
    assert feed.in_flight == 0


async def test_idle_runners_are_woken_when_there_is_work_again(desk: ADesk, feed: Feed) -> None:
    desk.shard.phase, open_phase = type(desk.shard.phase).GONE, desk.shard.phase
    desk.shard, later = a_shard(requests=0), desk.shard
    feed.pump()
    assert desk.sent == []
    later.phase = open_phase
    desk.shard = later
    feed.pump()
    await eventually(lambda: desk.sent == [0, 1, 2])
    for place in (0, 1, 2):
        desk.answer(place)
    await eventually(lambda: desk.sent == [0, 1, 2, 3, 4, 5])


async def test_a_failed_call_lands_with_its_error(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    await eventually(lambda: 0 in desk.at_engine)
    error = NotSent("refused")
    desk.at_engine[0].set_exception(error)
    await eventually(lambda: desk.landings == [(0, error)])


async def test_a_recalled_request_is_aborted_at_the_engine_and_its_runner_goes_on(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    await eventually(lambda: desk.sent == [0, 1, 2])
    call = desk.at_engine[1]
    feed.recall([f for f in feed.flights if f.place == 1])
    await eventually(lambda: desk.taken_back == [1])
    assert call.cancelled()
    await eventually(lambda: desk.sent == [0, 1, 2, 1])
    assert desk.landings == []


async def test_an_answer_that_comes_with_the_recall_is_dropped(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    await eventually(lambda: desk.sent == [0, 1, 2])
    desk.answer(1)
    feed.recall([f for f in feed.flights if f.place == 1])
    await eventually(lambda: desk.taken_back == [1])
    assert desk.landings == []


async def test_a_request_recalled_before_its_runner_began_is_never_sent(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    feed.recall([f for f in feed.flights if f.place == 2])
    feed.stop()
    await eventually(lambda: desk.taken_back == [2])
    assert desk.sent == [0, 1]


async def test_large_replies_lower_what_is_in_flight(desk: ADesk, feed: Feed) -> None:
    """Invariant 12: a thousand bytes may be out, and replies are expected to be as large as lately."""
    feed.pump()
    await eventually(lambda: len(desk.sent) == 3)
    for place in (0, 1, 2):
        desk.answer(place, size=600)
    await eventually(lambda: len(desk.landings) == 3 and feed.in_flight == 2)


async def test_one_request_is_sent_however_large_it_is(desk: ADesk) -> None:
    feed = Feed(desk=desk, throttle=Fixed(3), most_bytes=1)
    feed.pump()
    await eventually(lambda: desk.sent == [0])
    assert feed.in_flight == 1
    await feed.close()


async def test_after_stop_what_is_in_flight_lands_and_nothing_is_sent(desk: ADesk, feed: Feed) -> None:
    feed.pump()
    await eventually(lambda: len(desk.sent) == 3)
    feed.stop()
    desk.answer(0)
    await eventually(lambda: len(desk.landings) == 1)
    feed.pump()
    assert desk.sent == [0, 1, 2]


async def test_a_bug_in_landing_is_told_and_not_swallowed(desk: ADesk) -> None:
    def landed(flight: Flight, result: Reply | EngineError) -> None:
        raise ZeroDivisionError

    desk.landed = landed  # type: ignore[method-assign]
    feed = Feed(desk=desk, throttle=Fixed(3), most_bytes=1000)
    feed.pump()
    await eventually(lambda: 0 in desk.at_engine)
    desk.answer(0)
    with pytest.raises(ZeroDivisionError):
        await feed.broken
    await feed.close()
