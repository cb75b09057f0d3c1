"""An upstream that is down, or refuses the key, for a while costs time and not one line."""

from pathlib import Path

import httpx
import pytest

from tests.processes.books import assert_all_answered, lines_of
from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess
from tests.support.waiting import eventually_sync

pytestmark = pytest.mark.processes


@pytest.fixture
def stub(shared_stub: StubProcess) -> StubProcess:
    return shared_stub


@pytest.fixture
def server(shared_server: Overnight) -> Overnight:
    return shared_server


@pytest.mark.parametrize("mode", ["down", "unauthorized", "status:503"])
def test_a_failing_upstream_costs_no_line(mode: str, server: Overnight, stub: StubProcess) -> None:
    lines = lines_of(mode, 40)
    batch = server.submit(lines)
    server.until(batch.id, lambda seen: seen.request_counts.completed >= 8)
    stub.set_mode(mode)
    eventually_sync(lambda: not _engine_is_ready(server))
    before = server.batch(batch.id).request_counts
    assert (before.failed, before.total) == (0, 40)
    stub.set_mode("ok")
    assert_all_answered(server, server.ended(batch.id, within=40), lines)


def test_an_upstream_that_is_not_up_yet_is_waited_for(stub: StubProcess, tmp_path: Path) -> None:
    stub.set_mode("down")
    server = Overnight(tmp_path, upstreams=[stub.url])
    try:
        server.start(engine=False)
        lines = lines_of("early", 3)
        batch = server.submit(lines)
        eventually_sync(lambda: "the engine cannot take work yet" in server.text)
        assert server.batch(batch.id).status == "validating"
        stub.set_mode("ok")
        assert_all_answered(server, server.ended(batch.id), lines)
    finally:
        server.destroy()


def _engine_is_ready(server: Overnight) -> bool:
    return httpx.get(f"http://127.0.0.1:{server.port}/readyz/engine", timeout=5).status_code == 200
