"""Whole nights with an engine that fails in its way, in virtual time: who gets an answer, and how long it takes."""

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from engine.backends.protocol import EngineError, NotSent, OutcomeUnknown, Reply, ServedModel
from engine.worker.outcome import Done, History
from engine.worker.pulse import Lane
from engine.worker.triage import Triage
from state.clock import ManualClock

LANE = Lane("/v1/chat/completions", "m")
OK = Reply(200, b'{"id": "x"}')
CANARY = "canary"

#: What the engine does: for a request (or CANARY) at a time since the start, the result and the seconds it takes.
Behaviour = Callable[[str, float], tuple[Reply | EngineError, float]]


class _Engine:
    """The backend the canary is sent to."""

    name = "simulated"

    def __init__(self, behaviour: Behaviour, now: Callable[[], float]) -> None:
        self._behaviour, self._now, self.canaries = behaviour, now, 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def models(self) -> tuple[ServedModel, ...]:
        return ()

    async def died(self) -> str:
        raise NotImplementedError

    async def send(self, endpoint: str, body: bytes) -> Reply:
        self.canaries += 1
        result, _ = self._behaviour(CANARY, self._now())
        if isinstance(result, EngineError):
            raise result
        return result


@dataclass
class Night:
    """A worker that feeds `at_once` requests; waiting for a retry takes no place at the engine."""

    behaviour: Behaviour
    requests: list[str]
    at_once: int = 16
    lasts: float = 86_400.0
    clock: ManualClock = field(default_factory=ManualClock)
    calls: Counter[str] = field(default_factory=Counter)
    ended: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When each request ended, and with which status (0: without a reply)."""

    def now(self) -> float:
        return self.clock.ticks - 1000.0

    async def run(self) -> "Night":
        self.engine = _Engine(self.behaviour, self.now)
        chance = random.Random(1)
        triage = Triage(backend=self.engine, monotonic=self.clock.monotonic, random=chance.random, max_attempts=4)
        waiting: list[tuple[float, str, History]] = [(0.0, r, History()) for r in self.requests]
        flying: list[tuple[float, float, str, History, Reply | EngineError]] = []
        while (waiting or flying) and self.now() < self.lasts:
            wake = self._send(triage, waiting, flying)
            times = [t for t, *_ in waiting if t > self.now()] + [f[0] for f in flying[:1]] + ([wake] if wake else [])
            self.clock.advance(max(min(times) - self.now(), 1e-6))
            while flying and flying[0][0] <= self.now():
                _, sent_at, request, history, result = heapq.heappop(flying)
                verdict = triage.verdict(result, lane=LANE, history=history, sent_at=sent_at)
                if isinstance(verdict, Done):
                    assert request not in self.ended
                    self.ended[request] = (self.now(), verdict.ending.status)
                else:
                    waiting.append((self.now() + verdict.delay, request, verdict.history))
            for _ in range(5):
                await asyncio.sleep(0)  # lets the canary fly
        await triage.close()
        return self

    def _send(
        self,
        triage: Triage,
        waiting: list[tuple[float, str, History]],
        flying: list[tuple[float, float, str, History, Reply | EngineError]],
    ) -> float | None:
        """Sends what may be sent; returns when to ask again if the breaker held something back."""
        due = sorted((w for w in waiting if w[0] <= self.now()), key=lambda w: -w[0])  # retries first
        wake = None
        for item in due:
            if len(flying) >= self.at_once:
                break
            _, request, history = item
            others = any(not h.refusals for _, r, h in due if r != request)
            wait = triage.admit(LANE, history, others_wait=others)
            if wait:
                wake = self.now() + wait
                continue
            waiting.remove(item)
            due = [w for w in due if w is not item]
            self.calls[request] += 1
            result, takes = self.behaviour(request, self.now())
            self.clock.ticks += 1e-7
            heapq.heappush(flying, (self.now() + takes, self.clock.ticks, request, history, result))
        return wake

    def statuses(self) -> Counter[int]:
        return Counter(status for _, status in self.ended.values())


def _names(count: int) -> list[str]:
    return [f"r{i:04}" for i in range(count)]


OUTAGES: list[Reply | EngineError] = [
    NotSent("cannot connect: Connection refused"),
    OutcomeUnknown("the connection broke"),
    *(Reply(status, b"") for status in (401, 403, 404, 429, 500, 502, 503, 504)),
    Reply(200, b"<html>sorry</html>"),
]


@pytest.mark.parametrize("result", OUTAGES, ids=lambda r: f"{type(r).__name__}-{getattr(r, 'status', '')}")
@pytest.mark.parametrize("starts", [0.0, 1.0])
async def test_an_engine_that_is_down_for_ten_minutes_costs_ten_minutes_and_no_answer(
    result: Reply | EngineError, starts: float
) -> None:
    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        return (result, 0.01) if starts <= now < starts + 600 else (OK, 0.1)

    night = await Night(behaviour, _names(400)).run()
    assert night.statuses() == {200: 400}
    assert max(at for at, _ in night.ended.values()) < 600 + 60


@pytest.mark.parametrize("count", [1, 3, 200])
@pytest.mark.parametrize("takes", [0.01, 60.0])
@pytest.mark.parametrize("result", [Reply(500, b""), OutcomeUnknown("broke"), Reply(200, b"[]")], ids=repr)
async def test_a_batch_of_nothing_but_requests_the_engine_fails_on_ends(
    result: Reply | EngineError, takes: float, count: int
) -> None:
    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        return (OK if request == CANARY else result), takes

    night = await Night(behaviour, _names(count)).run()
    assert len(night.ended) == count
    assert 200 not in night.statuses()
    assert max(night.calls.values()) <= 4 + 4
    assert max(at for at, _ in night.ended.values()) < 60 + 8 * takes * (1 + count / 16)


@pytest.mark.parametrize("status", [403, 429, 503])
@pytest.mark.parametrize("takes", [0.02, 5.0])
async def test_a_request_that_alone_is_always_refused_hardly_delays_the_others_and_ends(
    status: int, takes: float
) -> None:
    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        return (Reply(status, b""), 0.01) if request == "r0007" else (OK, takes)

    night = await Night(behaviour, _names(500)).run()
    assert night.statuses() == {200: 499, status: 1}
    assert sorted(at for at, _ in night.ended.values())[-2] < 500 / 16 * takes + 10 + 2 * takes
    assert night.ended["r0007"][0] < 1800
    assert night.calls["r0007"] <= 30


@pytest.mark.parametrize("status", [403, 503])
async def test_several_requests_that_an_idle_engine_always_refuses_end_within_two_hours(status: int) -> None:
    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        return (OK if request == CANARY else Reply(status, b"")), 0.01

    night = await Night(behaviour, _names(3)).run()
    assert night.statuses() == {status: 3}
    assert max(at for at, _ in night.ended.values()) < 7200


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
async def test_an_engine_that_turns_some_away_at_random_answers_everybody_in_the_end(share: float) -> None:
    chance = random.Random(2)

    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        return (Reply(429, b"", retry_after=1.0), 0.01) if chance.random() < share else (OK, 0.1)

    night = await Night(behaviour, _names(150)).run()
    assert night.statuses() == {200: 150}


async def test_a_server_that_takes_ten_requests_a_minute_answers_everybody_in_the_end() -> None:
    allowed: list[float] = []

    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        if len([t for t in allowed if t > now - 60]) >= 10:
            return Reply(429, b""), 0.01
        allowed.append(now)
        return OK, 0.5

    night = await Night(behaviour, _names(120), at_once=64).run()
    assert night.statuses() == {200: 120}


async def test_an_endpoint_that_is_missing_is_waited_for_however_long_it_takes() -> None:
    night = await Night(lambda request, now: (Reply(404, b'{"detail":"Not Found"}'), 0.01), _names(20)).run()
    assert night.ended == {}
    assert sum(night.calls.values()) <= 86_400 / 30 + 50


async def test_while_requests_succeed_no_canary_is_sent() -> None:
    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        return (Reply(500, b""), 0.5) if request == "r0007" else (OK, 0.1)

    night = await Night(behaviour, _names(2000)).run()
    assert night.statuses() == {200: 1999, 500: 1}
    assert night.calls["r0007"] == 4
    assert night.engine.canaries == 0


async def test_a_canary_that_breaks_leaves_nobody_waiting_for_it(caplog: pytest.LogCaptureFixture) -> None:
    def behaviour(request: str, now: float) -> tuple[Reply | EngineError, float]:
        if request == CANARY:
            raise RuntimeError("a bug")
        return (Reply(500, b"") if now < 5 else OK), 0.01

    night = await Night(behaviour, _names(10)).run()
    assert night.statuses() == {200: 10}
    assert "the canary failed" in caplog.text


async def test_closing_ends_a_canary_under_way() -> None:
    clock = ManualClock()
    hang: Callable[[str, bytes], Awaitable[Reply]] = lambda endpoint, body: asyncio.get_running_loop().create_future()  # noqa: E731
    engine = _Engine(lambda request, now: (OK, 0.0), clock.monotonic)
    engine.send = hang  # type: ignore[method-assign, assignment]
    triage = Triage(backend=engine, monotonic=clock.monotonic, random=lambda: 0.5, max_attempts=4)
    triage.verdict(OutcomeUnknown("x"), lane=LANE, history=History(), sent_at=clock.monotonic())
    await asyncio.sleep(0)
    await triage.close()
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith("canary")] == []
