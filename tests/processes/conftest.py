"""Real servers in front of a real stub, in real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.overnight import Overnight
from tests.support.stub_process import StubProcess


@pytest.fixture
def stub() -> Iterator[StubProcess]:
    """A model server that takes 50 ms for an answer."""
    with StubProcess(latency=0.05) as process:
        yield process


@pytest.fixture
def server(stub: StubProcess, tmp_path: Path) -> Iterator[Overnight]:
    """`overnight serve` in front of the stub: four requests at a time, a commit every 0.2 s."""
    with Overnight(tmp_path, upstreams=[stub.url], max_in_flight=4, segment_interval=0.2) as running:
        yield running


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[StubProcess]:
    """One for all tests of a module that kill nothing."""
    with StubProcess(latency=0.05) as process:
        yield process


@pytest.fixture(scope="module")
def shared_server(shared_stub: StubProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overnight]:
    """One for all tests of a module that kill nothing."""
    folder = tmp_path_factory.mktemp("serve")
    with Overnight(folder, upstreams=[shared_stub.url], max_in_flight=4, segment_interval=0.2) as running:
        yield running
