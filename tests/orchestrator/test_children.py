"""The child processes: jobs go over, answers and errors come back, and no process outlives its owner."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from engine.orchestrator.child import SPOOL_PREFIX, clear_abandoned, perform, spool_folder
from engine.orchestrator.children import Child, Children
from engine.orchestrator.finish import FinishRequest
from engine.orchestrator.pipe import ChildDied, ChildFailed, Raised
from state.objects.local import LocalStore
from state.records import Corrupt, OutOfSpace, Unavailable
from state.settings import Settings
from tests.orchestrator.dying import StuckObject, lives, needs_proc, peak_bytes
from tests.orchestrator.made import BATCH, put_segment, result_line
from tests.support.waiting import eventually, eventually_sync

pytestmark = [pytest.mark.processes, needs_proc]


@pytest.fixture
async def children(settings: Settings):
    made = Children(settings)
    yield made
    await made.close()


async def finish_of_one_line(store: LocalStore, *, epoch: int = 1) -> FinishRequest:
    segment = await put_segment(store, {0: result_line(0)})
    return FinishRequest(BATCH, epoch, 1, "", (segment,), spool_limit=1 << 20)


async def test_a_job_is_done_in_another_process_which_serves_the_next_one_too(children, store):
    pids = set()
    for epoch in (1, 2):
        written = await children.run_small(await finish_of_one_line(store, epoch=epoch))
        assert await store.get(written.output.object_key) == result_line(0)
        pids |= set(children.pids)
    assert len(pids) == 1
    assert os.getpid() not in pids


async def test_a_large_job_has_a_process_of_its_own_that_ends_with_it(children, store):
    await children.warm()
    (warm,) = children.pids
    await children.run_large(await finish_of_one_line(store))
    assert children.pids == [warm]


async def test_the_errors_of_a_job_arrive_as_what_they_are(children, store):
    asked = await finish_of_one_line(store)
    twice = FinishRequest(BATCH, 1, 1, "", asked.segments * 2, spool_limit=1 << 20)
    with pytest.raises(Corrupt, match="a second time"):
        await children.run_small(twice)
    await store.delete([asked.segments[0].object_key])
    with pytest.raises(Unavailable):
        await children.run_small(FinishRequest(BATCH, 1, 1, "batches/none/index", asked.segments, spool_limit=1 << 20))


def test_an_error_nobody_foresaw_brings_its_traceback():
    try:
        raise KeyError("what")
    except KeyError as error:
        carried = Raised.of(error).error()
    assert isinstance(carried, ChildFailed)
    assert "test_children.py" in str(carried)


def test_out_of_space_keeps_its_numbers():
    carried = Raised.of(OutOfSpace("full", needed=7, free=3)).error()
    assert isinstance(carried, OutOfSpace)
    assert (carried.needed, carried.free) == (7, 3)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, OutOfSpace), (errno.EDQUOT, OutOfSpace), (errno.EIO, Unavailable)]
)
async def test_a_disk_that_fails_under_a_job_is_not_the_jobs_fault(store, settings, monkeypatch, number, error):
    """Invariant 13: it waits for the disk, and does not count as an attempt."""

    def fail(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(error):
        await perform(await finish_of_one_line(store), store=store, parent=settings.spool_folder)
    assert list(settings.spool_folder.iterdir()) == []


async def test_a_spool_folder_that_was_removed_is_made_again(children, store, settings):
    await children.run_small(await finish_of_one_line(store))
    shutil.rmtree(settings.spool_folder)
    written = await children.run_small(await finish_of_one_line(store, epoch=2))
    assert written.output is not None


async def test_a_spool_that_cannot_be_made_is_waited_for_by_the_same_process(children, store, settings):
    settings.spool_folder.write_bytes(b"in the way")
    with pytest.raises(Unavailable, match="spool"):
        await children.run_small(await finish_of_one_line(store))
    settings.spool_folder.unlink()
    written = await children.run_small(await finish_of_one_line(store, epoch=2))
    assert written.output is not None


async def test_a_frozen_process_is_noticed_ended_and_replaced(children, store, monkeypatch):
    """Invariant 7: a batch that is to end does not wait for it."""
    monkeypatch.setattr("engine.orchestrator.children._SILENCE_S", 3.0)
    await children.warm()
    (frozen,) = children.pids
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(ChildDied, match="no sign of life for 3 s"):
        await children.run_small(await finish_of_one_line(store))
    assert not lives(frozen)
    written = await children.run_small(await finish_of_one_line(store, epoch=2))
    assert written.output is not None


async def test_a_process_that_works_for_long_gives_signs_of_life(children, store, monkeypatch):
    monkeypatch.setattr("engine.orchestrator.children._SILENCE_S", 3.0)
    await children.warm()
    asked = await finish_of_one_line(store)
    stuck = StuckObject(store, asked.segments[0].object_key)
    job = asyncio.create_task(children.run_small(asked))
    await eventually(stuck.has_begun, within=20.0)
    longer_than_silence = time.monotonic() + 5.0
    await eventually(lambda: time.monotonic() > longer_than_silence)
    assert not job.done()
    stuck.mend()
    assert (await job).output is not None


async def test_a_process_that_does_not_start_is_no_jobs_fault(children, store, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="does not start"):
        await children.run_small(await finish_of_one_line(store))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="does not start"):
        await children.run_large(await finish_of_one_line(store))


async def test_a_child_killed_in_the_middle_is_told_and_replaced(children, store):
    await children.warm()
    (pid,) = children.pids
    asked = await finish_of_one_line(store)
    stuck = StuckObject(store, asked.segments[0].object_key)
    job = asyncio.create_task(children.run_small(asked))
    await eventually(stuck.has_begun)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChildDied):
        await job
    stuck.mend()
    written = await children.run_small(asked)
    assert written.output is not None
    assert children.pids != [pid]


async def test_a_caller_that_gives_up_takes_the_process_along(children, store):
    await children.warm()
    (pid,) = children.pids
    asked = await finish_of_one_line(store)
    stuck = StuckObject(store, asked.segments[0].object_key)
    job = asyncio.create_task(children.run_small(asked))
    await eventually(stuck.has_begun)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert not lives(pid)
    stuck.mend()


async def test_ctrl_c_and_sigterm_leave_it_to_the_parent(settings, store):
    child = Child(settings)
    await child.start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    os.kill(child.pid, signal.SIGTERM)
    written = await child.call(await finish_of_one_line(store))
    assert written.output is not None
    await child.end()


PARENT = """
import asyncio, sys
from pathlib import Path
from engine.orchestrator.children import Child
from state.settings import Settings

async def main():
    child = Child(Settings(data=Path(sys.argv[1])))
    await child.start()
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_child_ends_with_its_parent_however_that_ends(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert lives(pid)
    parent.kill()
    parent.communicate()
    eventually_sync(lambda: not lives(pid))  # invariant 15
    eventually_sync(lambda: not list((tmp_path / "spool").glob(f"{SPOOL_PREFIX}*")))


def test_the_spool_of_a_dead_process_is_cleared_and_that_of_a_living_one_kept(tmp_path):
    script = (
        "import os, sys, pathlib; from engine.orchestrator.child import spool_folder\n"
        "with spool_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'left').write_bytes(b'x'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    with spool_folder(tmp_path) as mine:
        (left,) = (folder for folder in tmp_path.iterdir() if folder != mine)
        assert clear_abandoned(tmp_path) == [left]
        assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []


async def test_fifty_thousand_results_are_merged_in_little_memory(store, settings):
    total, each = 50_000, 500
    order = [(n * 7919) % total for n in range(total)]
    segments = [
        await put_segment(store, {n: result_line(n, text="x" * 400) for n in order[at : at + each]}, seq=at // each)
        for at in range(0, total, each)
    ]
    asked = FinishRequest(BATCH, 1, total, "", tuple(segments), spool_limit=1 << 30)
    child = Child(settings)
    await child.start()
    written = await child.call(asked)
    assert child.pid is not None
    peak = peak_bytes(child.pid)
    await child.end()
    assert written.output.lines == total
    assert await store.get(written.output.object_key) == b"".join(result_line(n, text="x" * 400) for n in range(total))
    assert peak < 100 << 20  # invariant 12
