"""What becomes of a request after a call: it is done, it is tried again, or the engine is at fault. Pure.

The rule of the house: a failure of the *engine* costs a request nothing, however long it lasts; a failure of the
*request* ends in an error line after `max_attempts`, and blocks nobody.

==========================================================  ==========================================================
what came back                                              whose failure
==========================================================  ==========================================================
2xx with a proper body                                      nobody's: a line of the output file
not sent; 401, 402, 403, 429, 503; a 3xx                    the engine's
404 or 405 without an OpenAI error                          the engine's, for this lane only: it lacks the endpoint
other 4xx but 408                                           the request's, final at once
reply too large                                             the request's, final at once
408, other 5xx, unknown outcome, 2xx with a broken body     the request's if others succeed, else in *doubt*
==========================================================  ==========================================================

**Doubt.** A 500 may be the engine's fault or the request's. A request's first such failure is its own if its lane is
alive (`pulse`: something succeeded in the last 10 s, and few calls have failed since); each further one if the lane has
had a success since the one before. So one outage costs a request one attempt at most, and most requests none.
Otherwise it is in doubt: feeding pauses and the canary is sent (`canary.py`), a tiny request of our own. If it comes
back, the engine works: the request is sent again, and its next failure counts, so that a batch of nothing but bad
requests on an idle engine ends, however slowly they fail. If not, the engine is down, and nobody's attempts are used
up. (The list of models would be a poorer witness: gateways serve it while nothing behind them works.)

**Refused alone.** One request may be what an engine always answers with 503 or 403 (a content filter in front of it,
say) while it answers the others. A refusal *counts* if the lane has answered others since the request's last one,
and is *alone* if it has answered others at least four times for each of their refusals. From its second lone refusal
on, the request no longer stops the others and only waits longer itself; after 20 of them it becomes an error line, and
so it does after 100 counted ones other than 429, which ends several such requests on an otherwise idle engine within
about an hour. A rate limit that turns away every fifth request does not come near that: 0.2 ** 20. From a request's third refusal on,
the canary is sent too where the lane is not alive, or a lone request would never be told apart from the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from engine.backends.protocol import EngineError, NotSent, Reply, ReplyTooLarge, TimedOut
from engine.replies import (
    Ending,
    NotConforming,
    is_openai_error,
    read_answer,
    refused,
    succeeded,
    unanswered,
)
from engine.worker.pulse import Scene
from engine.worker.retry import backoff, own_pause

#: Lone refusals after which a request is given up, and counted refusals of any kind.
MOST_ALONE: Final = 20
MOST_COUNTED: Final = 100
#: From so many lone refusals on, a request does not stop the others any more.
HARMLESS: Final = 2
#: Answers to others for each refusal of others that make a refusal a lone one.
EXCEPTIONAL: Final = 4
#: From so many refusals on in a lane that is not alive, the canary is sent.
ASK_AFTER: Final = 3
#: The longest `Retry-After` that is obeyed for one request, in seconds.
LONGEST_OWN_RETRY_AFTER: Final = 30.0

_ENGINE_STATUS: Final = frozenset({401, 402, 403, 429, 503})
_NOWHERE: Final = Scene()


class Scope(Enum):
    """What an engine failure stops: everything, or one lane."""

    ENGINE = auto()
    LANE = auto()


@dataclass(frozen=True, slots=True)
class History:
    """What a request has been through in this worker. A worker that takes its shard over starts it anew."""

    attempts: int = 0
    """Failures of its own."""
    refusals: int = 0
    """Engine failures and doubts; they make its own waiting longer."""
    counted: int = 0
    alone: int = 0
    since: Scene = _NOWHERE
    """Its lane as it was at its last failure of any kind."""


class Done(NamedTuple):
    """The request has ended; `ending` makes its result line.

    `settled`: by the engine's verdict on it, which shows that the engine works; otherwise we gave the request up.
    """

    ending: Ending
    settled: bool = False


@dataclass(frozen=True, slots=True)
class RetryRequest:
    """The request is sent again after `delay` seconds; the others are not concerned."""

    delay: float
    history: History
    refused: bool = False
    """It was an engine failure that stops only this request."""
    in_doubt: bool = False
    """The canary is to be sent meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The engine is at fault: feeding pauses (`breaker`), and the request comes again after `delay` seconds.

    `in_doubt`: the canary is to be sent before any request is.
    """

    cause: str
    scope: Scope
    delay: float
    history: History
    retry_after: float | None = None
    in_doubt: bool = False


Verdict = Done | RetryRequest | EngineFailure


class Case(NamedTuple):
    """One call to be judged, with all that bears on it. `scene` is the request's lane before this call."""

    result: Reply | EngineError
    history: History
    scene: Scene
    max_attempts: int
    random: Callable[[], float]


def judge(case: Case) -> Verdict:
    """Decides on one call."""
    result = case.result
    if isinstance(result, Reply):
        return _judge_reply(case, result)
    if isinstance(result, ReplyTooLarge):
        return Done(unanswered("reply_too_large", str(result)), settled=True)
    if isinstance(result, NotSent):
        return _engine_failure(case, str(result), Scope.ENGINE)
    code = "request_timeout" if isinstance(result, TimedOut) else "engine_error"
    return _own_failure(case, str(result), unanswered(code, str(result)))


def _judge_reply(case: Case, reply: Reply) -> Verdict:
    status = reply.status
    if 200 <= status < 300:
        try:
            return Done(succeeded(status, read_answer(reply.body), reply.request_id), settled=True)
        except NotConforming as fault:
            return _own_failure(case, str(fault), unanswered("invalid_response", str(fault)))
    ending = refused(status, reply.body, reply.request_id)
    if _is_final(reply):
        return Done(ending, settled=True)
    if status in _ENGINE_STATUS or status < 400:
        return _refusal(case, reply, Scope.ENGINE, ending)
    if status in (404, 405):
        return _refusal(case, reply, Scope.LANE, ending)
    return _own_failure(case, f"answers {status}", ending, reply.retry_after)


def _is_final(reply: Reply) -> bool:
    """Whether a status is the engine's word on this very request."""
    if reply.status in _ENGINE_STATUS or reply.status == 408 or not 400 <= reply.status < 500:
        return False
    return reply.status not in (404, 405) or is_openai_error(reply.body)


def _own_failure(case: Case, cause: str, ending: Ending, retry_after: float | None = None) -> Verdict:
    """A failure of the request itself, unless it is in doubt whether the engine works."""
    old, now = case.history, case.scene
    first = old.attempts + old.refusals == 0
    if not (now.alive if first else now.successes > old.since.successes):
        return _engine_failure(case, cause, Scope.LANE, retry_after, in_doubt=True)
    attempts = old.attempts + 1
    if attempts >= case.max_attempts:
        return Done(ending)
    delay = max(backoff(attempts, random=case.random), min(retry_after or 0.0, LONGEST_OWN_RETRY_AFTER))
    return RetryRequest(delay, History(attempts, old.refusals, old.counted, old.alone, now))


def _refusal(case: Case, reply: Reply, scope: Scope, ending: Ending) -> Verdict:
    """A failure of the engine, unless this request meets it again and again and the others do not."""
    verdict = _engine_failure(case, f"answers {reply.status}", scope, reply.retry_after)
    after = verdict.history
    if after.alone >= MOST_ALONE or (after.counted >= MOST_COUNTED and reply.status != 429):
        return Done(ending)
    if after.alone >= HARMLESS:
        return RetryRequest(verdict.delay, after, refused=True, in_doubt=verdict.in_doubt)
    return verdict


def _engine_failure(
    case: Case, cause: str, scope: Scope, retry_after: float | None = None, *, in_doubt: bool = False
) -> EngineFailure:
    after = _counted(case)
    stubborn = after.refusals >= ASK_AFTER and not case.scene.alive and not isinstance(case.result, NotSent)
    delay = own_pause(after.refusals, retry_after, random=case.random)
    return EngineFailure(cause, scope, delay, after, retry_after, in_doubt or stubborn)


def _counted(case: Case) -> History:
    """The request's history with this refusal, and with what happened to others since the one before."""
    old, now = case.history, case.scene
    if isinstance(case.result, NotSent):  # says nothing about the request: it never arrived
        return History(old.attempts, old.refusals + 1, old.counted, old.alone, now)
    answers = now.answers - old.since.answers
    others_refused = now.refusals - old.since.refusals - 1  # its own last one is among them
    counted = old.refusals > 0 and answers > 0
    alone = counted and answers >= EXCEPTIONAL * others_refused
    return History(old.attempts, old.refusals + 1, old.counted + counted, old.alone + alone, now)
