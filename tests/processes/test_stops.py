"""Batches that are cancelled at any moment, or whose window closes: the books balance (invariants 1, 5, 6, 7)."""

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from server.roles.unblock import is_locked
from tests.processes.books import assert_balanced, lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess

pytestmark = pytest.mark.processes


@pytest.fixture
def stub(shared_stub: StubProcess) -> StubProcess:
    return shared_stub


@pytest.fixture
def server(shared_server: Overnight) -> Overnight:
    return shared_server


def test_cancelling_at_any_moment_keeps_what_is_finished(server: Overnight) -> None:
    chance = random.Random(7)
    batches = []
    for number in range(8):
        lines = lines_of(f"cancel-{number}", 12)
        batch = server.submit(lines)
        later = threading.Timer(chance.uniform(0.0, 1.6), _cancel, (server, batch.id))
        later.start()
        batches.append((batch.id, lines, later))
    for batch_id, lines, later in batches:
        later.join()
        ended = server.ended(batch_id, within=30)
        assert ended.status in ("cancelled", "completed")
        assert_balanced(server, ended, lines)


def test_cancelling_while_the_answers_take_long_aborts_them(server: Overnight, stub: StubProcess) -> None:
    lines = lines_of("long", 8, "[[stub latency=60]]")
    batch = server.submit(lines)
    server.until(batch.id, lambda seen: seen.status == "in_progress")
    server.client.batches.cancel(batch.id)
    ended = server.ended(batch.id, within=20)
    assert ended.status == "cancelled"
    assert_balanced(server, ended, lines)
    assert stub.stats()["in_flight"] == 0


def test_a_stopped_worker_cannot_hold_up_a_cancelled_batch(stub: StubProcess, tmp_path: Path) -> None:
    with Overnight(tmp_path, upstreams=[stub.url], max_in_flight=2, segment_interval=0.2, stop_grace=1.0) as server:
        lines = lines_of("held", 60)
        batch = server.submit(lines)
        server.until(batch.id, lambda seen: seen.request_counts.completed >= 4)
        server.kill("worker", number=signal.SIGSTOP)
        server.client.batches.cancel(batch.id)
        ended = server.ended(batch.id, within=20)  # invariant 7
        assert ended.status == "cancelled"
        assert_balanced(server, ended, lines)
        server.kill("worker", number=signal.SIGCONT)
        more = lines_of("more", 4)
        assert server.ended(server.submit(more).id).status == "completed"
        assert server.batch(batch.id) == ended


def test_a_worker_frozen_in_the_middle_of_a_commit_cannot_hold_up_a_cancelled_batch(
    stub: StubProcess, tmp_path: Path
) -> None:
    with Overnight(tmp_path, upstreams=[stub.url], max_in_flight=8, segment_interval=0.0, segment_lines=1) as server:
        lines = lines_of("frozen", 2000)
        batch = server.submit(lines)
        server.until(batch.id, lambda seen: seen.request_counts.completed >= 4)
        frozen = server.pids()["worker"]
        while not _frozen_in_a_commit(server):
            assert server.batch(batch.id).status == "in_progress"
        server.replaced("worker", frozen, within=40)
        server.client.batches.cancel(batch.id)
        ended = server.ended(batch.id, within=30)  # invariant 7
        assert ended.status in ("cancelled", "completed")
        assert_balanced(server, ended, lines)


def test_a_window_that_closes_keeps_what_is_finished(server: Overnight) -> None:
    lines = lines_of("window", 30, "[[stub latency=2]]")
    started = time.time()
    batch = server.submit(lines, window="10s")
    ended = server.ended(batch.id, within=40)
    assert ended.status == "expired"
    assert ended.expired_at - started >= 9  # never early: invariant 8
    assert_balanced(server, ended, lines)
    output, errors = server.results(ended)
    assert output
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def _frozen_in_a_commit(server: Overnight) -> bool:
    """Stops the worker, and lets it go on unless that was in the middle of a write transaction."""
    database = server.data / "overnight.db"
    server.kill("worker", number=signal.SIGSTOP)
    if is_locked(database, 0.1) and is_locked(database, 1.5):  # not by another role, which lets it go
        return True
    server.kill("worker", number=signal.SIGCONT)
    return False


def _cancel(server: Overnight, batch_id: str) -> Any:
    try:
        return server.client.batches.cancel(batch_id)
    except openai.ConflictError:
        return None  # it had completed
