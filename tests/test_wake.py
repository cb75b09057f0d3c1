"""Wake-ups between processes: a hint that is heard at once, and never needed."""

import os
from pathlib import Path

import pytest

from state.records import SettingsError
from state.settings import Settings
from state.wake import LocalWaker, PollingWaker, open_waker


async def test_a_notice_wakes_every_listener_of_its_topic(tmp_path: Path) -> None:
    first, second = LocalWaker(tmp_path / "run", "worker"), LocalWaker(tmp_path / "run", "worker")
    other, sender = LocalWaker(tmp_path / "run", "orchestrator"), LocalWaker(tmp_path / "run")
    sender.notify("worker")
    assert await first.wait(5)
    assert await second.wait(5)
    assert not await other.wait(0)
    for waker in (first, second, other, sender):
        waker.close()


async def test_notices_before_the_wait_count_as_one(tmp_path: Path) -> None:
    listener = LocalWaker(tmp_path / "run", "worker")
    for _ in range(1000):  # more than a socket's queue holds: notify neither blocks nor fails
        listener.notify("worker")
    assert await listener.wait(5)
    assert not await listener.wait(0)
    listener.close()


async def test_a_listener_that_died_is_forgotten(tmp_path: Path) -> None:
    listener, sender = LocalWaker(tmp_path / "run", "worker"), LocalWaker(tmp_path / "run")
    listener._in.close()  # as when its process is killed: the socket's file stays
    assert len(list((tmp_path / "run").iterdir())) == 1
    sender.notify("worker")
    assert list((tmp_path / "run").iterdir()) == []
    sender.close()
    listener.close()


async def test_the_last_listener_takes_a_temporary_folder_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = LocalWaker(run, "worker", temporary=True), LocalWaker(run, "orchestrator", temporary=True)
    first.close()
    assert run.exists()
    second.close()
    assert not run.exists()


async def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    with pytest.raises(SettingsError, match="open to others"):
        LocalWaker(tmp_path / "run", "worker")


async def test_the_folder_is_private(tmp_path: Path) -> None:
    waker = LocalWaker(tmp_path / "run", "worker")
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o700
    waker.close()


@pytest.mark.parametrize("depth", [1, 20])
async def test_any_depth_of_data_folder_works(tmp_path: Path, depth: int) -> None:
    settings = Settings(data=tmp_path.joinpath(*["folder"] * depth))
    listener, sender = open_waker(settings, "worker"), open_waker(settings)
    sender.notify("worker")
    assert await listener.wait(5)
    listener.close()
    sender.close()


async def test_without_a_shared_folder_everybody_polls() -> None:
    waker = open_waker(Settings(database_url="postgresql+psycopg://db/overnight"), "worker")
    assert isinstance(waker, PollingWaker)
    assert not await waker.wait(0)
    waker.close()
