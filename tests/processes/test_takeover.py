"""A worker that sleeps past its lease, while another takes over, changes nothing when it wakes (invariants 3, 4)."""

import signal
from pathlib import Path

import pytest

from tests.processes.books import assert_all_answered, lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("woken", ["while the other works", "after the end"])
def test_a_stopped_worker_is_taken_over_and_disturbs_nothing_when_it_wakes(
    woken: str, stub: StubProcess, tmp_path: Path
) -> None:
    short = {"lease_ttl": 1.0, "lease_heartbeat": 0.2, "lease_grace": 0.3}
    with Overnight(tmp_path, upstreams=[stub.url] * 2, max_in_flight=2, segment_interval=0.2, **short) as server:
        lines = lines_of("sleepy", 160)
        batch = server.submit(lines)
        server.until(batch.id, lambda seen: seen.request_counts.completed >= 20)
        server.kill("worker-1", number=signal.SIGSTOP)
        if woken == "while the other works":
            server.until(batch.id, lambda seen: seen.request_counts.completed >= 110)
            server.kill("worker-1", number=signal.SIGCONT)
        ended = server.ended(batch.id)
        assert_all_answered(server, ended, lines)
        first = server.client.files.content(ended.output_file_id).read()
        server.kill("worker-1", number=signal.SIGCONT)
        more = lines_of("after", 20)
        assert_all_answered(server, server.ended(server.submit(more).id), more)
        assert server.client.files.content(ended.output_file_id).read() == first
        assert server.batch(batch.id) == ended
        assert server.stop() == 0
        server.nothing_left()
