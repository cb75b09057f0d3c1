"""`kill -9`, of every process and all at once, before the plan, in the run and before the finish (invariants 1, 3, 15).

The orchestrator is held by SIGSTOP where a point has to be hit: so each kill comes exactly where the test says.
"""

import signal
from typing import Any

import pytest

from tests.processes.books import assert_all_answered, committed, lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess

pytestmark = pytest.mark.processes

POINTS = ("planning", "running", "finishing")
VICTIMS = (
    ("api",),
    ("orchestrator",),
    ("worker",),
    ("supervisor",),
    ("supervisor", "api", "orchestrator", "worker"),
)


@pytest.mark.parametrize("victims", VICTIMS, ids=lambda names: "all" if len(names) > 1 else names[0])
def test_every_line_is_there_once_and_committed_answers_are_not_asked_for_again(
    victims: tuple[str, ...], server: Overnight, stub: StubProcess
) -> None:
    for point in POINTS:
        lines = lines_of(f"{victims[-1]}-{point}", 48)
        batch = _brought_to(point, server, lines)
        kept, asked = _kill(server, stub, victims, batch.id)
        ended = server.ended(batch.id, within=29)  # before a lease can run out: the supervisor ended it
        assert_all_answered(server, ended, lines)
        if "worker" in victims or "supervisor" in victims:
            assert stub.stats()["calls"] - asked == len(lines) - kept  # invariant 3
        else:
            assert stub.stats()["calls"] == len(lines)  # the worker did not even notice
        stub.reset()
    assert server.stop() == 0
    server.nothing_left()


def _brought_to(point: str, server: Overnight, lines: list[dict[str, Any]]) -> Any:
    """Submits, and brings the batch to the point; the orchestrator is held there, except in the run."""
    if point == "planning":
        server.kill("orchestrator", number=signal.SIGSTOP)
    batch = server.submit(lines)
    if point == "planning":
        return batch
    server.until(batch.id, lambda seen: seen.request_counts.completed >= 8)
    if point == "finishing":
        server.kill("orchestrator", number=signal.SIGSTOP)
        server.until(batch.id, lambda seen: seen.status == "finalizing")
    return batch


def _kill(server: Overnight, stub: StubProcess, victims: tuple[str, ...], batch_id: str) -> tuple[int, int]:
    """Kills, and brings everything back; the lines committed, and the calls made, when all victims were dead."""
    before = server.pids()
    if "supervisor" not in victims:
        server.kill("supervisor", number=signal.SIGSTOP)  # so that nothing is asked before the books are read
    server.kill(*victims)
    if "orchestrator" not in victims:
        server.kill("orchestrator", number=signal.SIGCONT)
    if "supervisor" in victims:
        server.nothing_left()
    kept, asked = committed(server, batch_id), stub.stats()["calls"]
    if "supervisor" in victims:
        server.start()
    else:
        server.kill("supervisor", number=signal.SIGCONT)
        for victim in victims:
            server.replaced(victim, before[victim])
    return kept, asked


def test_a_role_that_is_killed_again_and_again_costs_nothing_but_time(server: Overnight) -> None:
    lines = lines_of("again", 80)
    batch = server.submit(lines)
    for target in (10, 30, 50):
        server.until(batch.id, lambda seen, target=target: seen.request_counts.completed >= target)
        before = server.pids()["worker"]
        server.kill("worker")
        server.replaced("worker", before)
    assert_all_answered(server, server.ended(batch.id), lines)
