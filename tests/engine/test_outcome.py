import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.protocol import EngineError, NotSent, OutcomeUnknown, Reply, ReplyTooLarge, TimedOut
from engine.packs import ERROR, OUTPUT
from engine.worker.outcome import (
    MOST_ALONE,
    MOST_COUNTED,
    Case,
    Done,
    EngineFailure,
    History,
    RetryRequest,
    Scope,
    Verdict,
    judge,
)
from engine.worker.pulse import Scene
from engine.worker.retry import FIRST_PAUSE, LONGEST, LONGEST_PAUSE, LONGEST_RETRY_AFTER, backoff, own_pause, pause

ALIVE = Scene(alive=True, successes=5, answers=5)
SILENT = Scene()
OPENAI_ERROR = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'


def _judge(
    result: Reply | EngineError, history: History | None = None, scene: Scene = ALIVE, *, attempts: int = 3
) -> Verdict:
    return judge(Case(result, history or History(), scene, attempts, lambda: 0.5))


@pytest.mark.parametrize("scene", [ALIVE, SILENT])
def test_a_proper_answer_is_a_line_of_the_output_file(scene: Scene) -> None:
    verdict = _judge(Reply(200, b'{"id": "c", "usage": {"prompt_tokens": 3}}'), scene=scene)
    assert isinstance(verdict, Done)
    assert verdict.settled
    assert (verdict.ending.mark, verdict.ending.status, verdict.ending.usage.input_tokens) == (OUTPUT, 200, 3)


@pytest.mark.parametrize("scene", [ALIVE, SILENT])
@pytest.mark.parametrize(
    "result",
    [
        *(Reply(status, OPENAI_ERROR) for status in (400, 404, 405, 409, 410, 413, 415, 422, 451)),
        Reply(400, b'{"detail": "There was an error parsing the body"}'),
        ReplyTooLarge("the reply is larger than 10 bytes"),
    ],
)
def test_the_engines_verdict_on_a_request_is_final(result: Reply | EngineError, scene: Scene) -> None:
    verdict = _judge(result, scene=scene)
    assert isinstance(verdict, Done)
    assert verdict.settled
    assert verdict.ending.mark == ERROR


@pytest.mark.parametrize("scene", [ALIVE, SILENT])
@pytest.mark.parametrize(
    ("result", "scope"),
    [
        (NotSent("cannot connect: Connection refused"), Scope.ENGINE),
        *((Reply(status, OPENAI_ERROR), Scope.ENGINE) for status in (307, 401, 402, 403, 429, 503)),
        (Reply(404, b'{"detail":"Not Found"}'), Scope.LANE),
        (Reply(405, b"<html>"), Scope.LANE),
    ],
)
def test_a_failure_of_the_engine_uses_no_attempt(result: Reply | EngineError, scope: Scope, scene: Scene) -> None:
    verdict = _judge(result, History(attempts=2), scene)
    assert isinstance(verdict, EngineFailure)
    assert (verdict.scope, verdict.in_doubt, verdict.history.attempts) == (scope, False, 2)


DUBIOUS = [
    *(Reply(status, OPENAI_ERROR) for status in (408, 500, 502, 504, 599)),
    Reply(200, b"<html>"),
    Reply(200, b'{"a": NaN}'),
    OutcomeUnknown("the connection broke"),
    TimedOut("no reply"),
]


@pytest.mark.parametrize("result", DUBIOUS)
def test_while_others_succeed_a_dubious_failure_is_the_requests_and_is_retried(result: Reply | EngineError) -> None:
    verdict = _judge(result)
    assert verdict == RetryRequest(delay=0.25, history=History(attempts=1, since=ALIVE))


@pytest.mark.parametrize("result", DUBIOUS)
def test_while_nothing_succeeds_a_dubious_failure_is_in_doubt_and_uses_no_attempt(result: Reply | EngineError) -> None:
    verdict = _judge(result, History(attempts=1), SILENT)
    assert isinstance(verdict, EngineFailure)
    assert (verdict.scope, verdict.in_doubt, verdict.history.attempts) == (Scope.LANE, True, 1)


@pytest.mark.parametrize(
    ("result", "status", "code"),
    [
        (Reply(500, OPENAI_ERROR), 500, ""),
        (Reply(200, b"<html>"), 0, "invalid_response"),
        (OutcomeUnknown("the connection broke"), 0, "engine_error"),
        (TimedOut("no reply"), 0, "request_timeout"),
    ],
)
def test_the_last_attempt_that_fails_is_an_error_line_with_the_reply_if_there_was_one(
    result: Reply | EngineError, status: int, code: str
) -> None:
    verdict = _judge(result, History(attempts=2))
    assert isinstance(verdict, Done)
    assert not verdict.settled
    assert (verdict.ending.mark, verdict.ending.status, verdict.ending.code) == (ERROR, status, code)


def test_a_request_that_fails_slowly_is_not_in_doubt_for_ever() -> None:
    """Each try takes longer than a lane counts as alive, but the canary came back since the last."""
    first = _judge(OutcomeUnknown("x"), scene=SILENT)
    assert isinstance(first, EngineFailure)
    second = _judge(OutcomeUnknown("x"), first.history, Scene(False, successes=1, answers=1, refusals=1))
    assert isinstance(second, RetryRequest)
    assert second.history.attempts == 1


def test_one_outage_costs_a_request_one_attempt_at_most() -> None:
    """It begins while the lane still counts as alive."""
    verdict = _judge(Reply(502, b""))
    assert isinstance(verdict, RetryRequest)
    for _ in range(10):
        verdict = _judge(Reply(502, b""), verdict.history, ALIVE)
        assert isinstance(verdict, EngineFailure)
        assert (verdict.in_doubt, verdict.history.attempts) == (True, 1)


def _refused(status: int, *, answers: int, others_refused: int, most: int) -> tuple[list[Verdict], Verdict]:
    """One request that is always refused; between two of its refusals, others are answered and refused so often."""
    history, verdicts = History(), []
    for i in range(most):
        scene = Scene(answers > 0, answers * i, answers * i, (others_refused + 1) * i)
        verdict = _judge(Reply(status, OPENAI_ERROR), history, scene)
        verdicts.append(verdict)
        if isinstance(verdict, Done):
            break
        history = verdict.history
    return verdicts, verdicts[-1]


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_request_that_alone_is_always_refused_stops_the_others_at_first_and_then_only_itself(status: int) -> None:
    verdicts, last = _refused(status, answers=8, others_refused=0, most=100)
    assert len(verdicts) == MOST_ALONE + 1
    assert [type(v) for v in verdicts[:3]] == [EngineFailure, EngineFailure, RetryRequest]
    assert {type(v) for v in verdicts[2:-1]} == {RetryRequest}
    assert isinstance(last, Done)
    assert (last.ending.status, last.settled) == (status, False)


def test_a_request_that_an_idle_engine_always_refuses_ends_with_the_canary_as_the_only_other() -> None:
    verdicts, last = _refused(503, answers=1, others_refused=0, most=100)
    assert len(verdicts) == MOST_ALONE + 1
    assert isinstance(last, Done)


def test_a_rate_limit_that_turns_away_many_never_costs_a_request_its_answer() -> None:
    _, last = _refused(429, answers=1, others_refused=10, most=1000)
    assert isinstance(last, EngineFailure)


def test_requests_that_an_idle_engine_always_refuses_end_after_many_refusals() -> None:
    verdicts, last = _refused(503, answers=1, others_refused=1, most=1000)
    assert len(verdicts) == MOST_COUNTED + 1
    assert isinstance(last, Done)


def test_an_engine_that_refuses_everybody_costs_no_request_its_answer() -> None:
    for status in (401, 429, 503):
        verdicts, last = _refused(status, answers=0, others_refused=50, most=1000)
        assert isinstance(last, EngineFailure)
        assert len(verdicts) == 1000


def test_after_a_few_refusals_without_an_answer_to_anybody_the_canary_is_asked() -> None:
    verdicts, _ = _refused(503, answers=0, others_refused=0, most=4)
    assert [v.in_doubt for v in verdicts if isinstance(v, EngineFailure)] == [False, False, True, True]


def test_not_sent_says_nothing_about_the_request() -> None:
    history = History()
    for i in range(500):
        verdict = _judge(NotSent("refused"), history, Scene(True, 10 * i, 10 * i, i))
        assert isinstance(verdict, EngineFailure)
        history = verdict.history
    assert (history.alone, history.counted, history.attempts) == (0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*DUBIOUS, Reply(429, b""), Reply(503, b""), NotSent("x"), Reply(404, b"")]),
            st.booleans(),
            st.integers(0, 3),
        ),
        max_size=50,
    )
)
def test_attempts_never_exceed_what_is_allowed_and_histories_only_grow(
    calls: list[tuple[Reply | EngineError, bool, int]],
) -> None:
    history, answers = History(), 0
    for i, (result, alive, more) in enumerate(calls):
        answers += more
        verdict = _judge(result, history, Scene(alive, answers, answers, i))
        if isinstance(verdict, Done):
            assert history.attempts == 2 or history.alone == MOST_ALONE - 1
            return
        new = verdict.history
        assert new.attempts <= 2
        assert new.attempts + new.refusals == history.attempts + history.refusals + 1
        assert verdict.delay >= 0
        history = new


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_waiting_grows_to_a_bound(failures: int, chance: float) -> None:
    assert 0 <= backoff(failures, random=lambda: chance) <= LONGEST
    assert FIRST_PAUSE <= pause(failures, None) <= LONGEST_PAUSE
    assert pause(failures, None) < own_pause(failures, None, random=lambda: chance) <= 1.5 * LONGEST_PAUSE


def test_pauses_double_and_a_longer_retry_after_is_obeyed_within_reason() -> None:
    assert [pause(n, None) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert [pause(1, after) for after in (0.5, 20.0, 86_400.0)] == [1, 20, LONGEST_RETRY_AFTER]


def test_a_retry_after_of_a_request_is_a_floor_for_its_own_waiting() -> None:
    verdict = _judge(Reply(500, OPENAI_ERROR, retry_after=12.0))
    assert isinstance(verdict, RetryRequest)
    assert verdict.delay == 12.0
