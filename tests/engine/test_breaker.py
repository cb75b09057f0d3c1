import pytest

from engine.worker.breaker import ASK_AGAIN, Breaker
from engine.worker.outcome import EngineFailure, History, Scope
from engine.worker.pulse import ALIVE_FOR, MOST_FAILURES, Lane, Pulse, Scene
from state.clock import ManualClock

CHAT = Lane("/v1/chat/completions", "m")
EMBED = Lane("/v1/embeddings", "m")


def _failure(
    scope: Scope = Scope.ENGINE, *, retry_after: float | None = None, in_doubt: bool = False, cause: str = "answers 503"
) -> EngineFailure:
    return EngineFailure(cause, scope, 1.0, History(), retry_after, in_doubt)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(monotonic=clock.monotonic)


def _fail(breaker: Breaker, clock: ManualClock, failure: EngineFailure | None = None, lane: Lane = CHAT) -> None:
    """A request is sent now and fails a moment later."""
    sent_at = clock.monotonic()
    clock.advance(0.01)
    breaker.failed(lane, failure or _failure(), sent_at=sent_at)


def test_a_working_engine_is_sent_everything(breaker: Breaker) -> None:
    assert [breaker.admit(CHAT) for _ in range(100)] == [0.0] * 100
    assert breaker.closed(CHAT)
    assert breaker.cause() is None


def test_after_a_failure_nothing_passes_until_the_pause_is_over_and_then_one_request(
    breaker: Breaker, clock: ManualClock
) -> None:
    _fail(breaker, clock)
    assert breaker.admit(CHAT) == 1.0
    assert breaker.admit(EMBED) == 1.0
    assert breaker.cause() == "answers 503"
    clock.advance(1.0)
    assert [breaker.admit(CHAT), breaker.admit(CHAT), breaker.admit(EMBED)] == [0.0, ASK_AGAIN, ASK_AGAIN]


def test_the_probes_success_lets_everything_pass(breaker: Breaker, clock: ManualClock) -> None:
    _fail(breaker, clock)
    clock.advance(1.0)
    assert breaker.admit(CHAT) == 0.0
    breaker.succeeded(CHAT, sent_at=clock.monotonic())
    assert [breaker.admit(CHAT) for _ in range(3)] == [0.0] * 3
    assert breaker.cause() is None


def test_pauses_double_while_probes_fail_and_start_anew_after_a_success(breaker: Breaker, clock: ManualClock) -> None:
    _fail(breaker, clock)
    pauses = []
    for _ in range(7):
        pauses.append(round(breaker.admit(CHAT)))
        clock.advance(pauses[-1])
        assert breaker.admit(CHAT) == 0.0
        _fail(breaker, clock)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    clock.advance(30.0)
    breaker.succeeded(CHAT, sent_at=clock.monotonic())
    _fail(breaker, clock)
    assert breaker.admit(CHAT) == 1.0


def test_the_requests_that_fail_together_count_once(breaker: Breaker, clock: ManualClock) -> None:
    sent_at = clock.monotonic()
    clock.advance(0.01)
    for _ in range(64):
        breaker.failed(CHAT, _failure(), sent_at=sent_at)
    assert breaker.admit(CHAT) == 1.0


def test_a_retry_after_is_obeyed_by_whichever_request_it_comes(breaker: Breaker, clock: ManualClock) -> None:
    sent_at = clock.monotonic()
    clock.advance(0.01)
    breaker.failed(CHAT, _failure(), sent_at=sent_at)
    breaker.failed(CHAT, _failure(retry_after=20.0), sent_at=sent_at)
    assert breaker.admit(CHAT) == 20.0


def test_a_success_of_a_request_sent_before_the_failure_says_nothing(breaker: Breaker, clock: ManualClock) -> None:
    before = clock.monotonic()
    _fail(breaker, clock)
    breaker.succeeded(CHAT, sent_at=before)
    assert breaker.admit(CHAT) > 0


def test_an_endpoint_that_is_missing_stops_only_its_own_requests(breaker: Breaker, clock: ManualClock) -> None:
    _fail(breaker, clock, _failure(Scope.LANE, cause="answers 404"), EMBED)
    assert breaker.admit(EMBED) == 1.0
    assert breaker.admit(CHAT) == 0.0
    assert breaker.cause() == "/v1/embeddings (m): answers 404"


def test_in_doubt_no_request_passes_until_the_canary_has_come_back(breaker: Breaker, clock: ManualClock) -> None:
    _fail(breaker, clock, _failure(Scope.LANE, in_doubt=True))
    assert breaker.in_doubt(CHAT)
    clock.advance(100.0)
    assert breaker.admit(CHAT) == ASK_AGAIN
    breaker.succeeded(CHAT, sent_at=clock.monotonic())
    assert breaker.admit(CHAT) == 0.0


def test_in_doubt_any_success_is_a_proof_of_life(breaker: Breaker, clock: ManualClock) -> None:
    before = clock.monotonic()
    _fail(breaker, clock, _failure(Scope.LANE, in_doubt=True))
    breaker.succeeded(CHAT, sent_at=before)
    assert breaker.closed(CHAT)


@pytest.mark.parametrize("scope", list(Scope))
def test_a_canary_that_fails_leaves_the_next_try_to_a_request(
    breaker: Breaker, clock: ManualClock, scope: Scope
) -> None:
    _fail(breaker, clock, _failure(scope, in_doubt=True))
    clock.advance(5.0)
    breaker.canary_failed(CHAT, "answers 500")
    assert not breaker.in_doubt(CHAT)
    assert breaker.admit(CHAT) == 1.0
    clock.advance(1.0)
    assert [breaker.admit(CHAT), breaker.admit(CHAT)] == [0.0, ASK_AGAIN]


def test_the_request_that_met_the_failure_is_not_the_probe_while_others_wait(
    breaker: Breaker, clock: ManualClock
) -> None:
    _fail(breaker, clock)
    clock.advance(1.0)
    assert breaker.admit(CHAT, unlucky=True, others_wait=True) == ASK_AGAIN
    assert breaker.admit(CHAT) == 0.0


def test_alone_it_is_the_probe_and_with_a_working_engine_it_waits_for_nobody(
    breaker: Breaker, clock: ManualClock
) -> None:
    assert breaker.admit(CHAT, unlucky=True, others_wait=True) == 0.0
    _fail(breaker, clock)
    clock.advance(1.0)
    assert breaker.admit(CHAT, unlucky=True) == 0.0


def test_a_probe_that_was_cancelled_makes_room_for_another(breaker: Breaker, clock: ManualClock) -> None:
    _fail(breaker, clock)
    clock.advance(1.0)
    assert breaker.admit(CHAT) == 0.0
    breaker.abandoned(CHAT, sent_at=clock.monotonic())
    assert breaker.admit(EMBED) == 0.0


def test_a_straggler_that_is_cancelled_is_not_taken_for_the_probe(breaker: Breaker, clock: ManualClock) -> None:
    before = clock.monotonic()
    _fail(breaker, clock)
    clock.advance(1.0)
    assert breaker.admit(CHAT) == 0.0
    breaker.abandoned(CHAT, sent_at=before)
    assert breaker.admit(CHAT) == ASK_AGAIN


def test_a_new_engine_starts_with_a_clean_slate(breaker: Breaker, clock: ManualClock) -> None:
    _fail(breaker, clock)
    breaker.reset()
    assert breaker.admit(CHAT) == 0.0


def test_a_lane_is_alive_for_some_seconds_after_a_success(clock: ManualClock) -> None:
    pulse = Pulse(monotonic=clock.monotonic)
    assert not pulse.scene(CHAT).alive
    pulse.succeeded(CHAT)
    clock.advance(ALIVE_FOR - 0.1)
    assert pulse.scene(CHAT).alive
    assert not pulse.scene(EMBED).alive
    clock.advance(0.2)
    assert not pulse.scene(CHAT).alive


def test_a_lane_is_not_alive_once_many_calls_have_failed_since_the_last_success(clock: ManualClock) -> None:
    pulse = Pulse(monotonic=clock.monotonic)
    pulse.succeeded(CHAT)
    for _ in range(MOST_FAILURES):
        assert pulse.scene(CHAT).alive
        pulse.failed(CHAT)
    assert not pulse.scene(CHAT).alive
    pulse.succeeded(CHAT)
    assert pulse.scene(CHAT).alive


def test_a_bad_requests_refusal_is_an_answer_but_no_sign_of_life(clock: ManualClock) -> None:
    pulse = Pulse(monotonic=clock.monotonic)
    pulse.settled(CHAT)
    assert pulse.scene(CHAT) == Scene(alive=False, successes=0, answers=1, refusals=0)
