"""The process that plans and finishes: `python -m engine.orchestrator.child`, started by the orchestrator.

Planning and finishing are minutes of CPU for a large batch; in a process of their own they never delay a heartbeat, and
their memory goes back to the system with the process (invariant 12). It has the object store but not the database, so it
can decide nothing: it proposes, the parent commits.

Settings come first over stdin, then jobs, one at a time; answers go to stdout. When stdin closes the process ends at once,
in the middle of a job too, because its owner is gone or wants it gone (invariant 15).
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import queue
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from engine.orchestrator.finish import FinishRequest, write_results
from engine.orchestrator.pipe import ALIVE_EVERY_S, LENGTH, Alive, Done, Raised, Ready, decode, encode
from engine.orchestrator.plan import PlanRequest, make_plan
from state.objects import ObjectStore
from state.objects.open import open_store
from state.records import OutOfSpace, OvernightError, Unavailable
from state.settings import Settings

#: Spool folders are named so; the lock in one tells whether its process lives (see `clear_abandoned`).
SPOOL_PREFIX = "job-"
_LOCK = "lock"
#: Work for a later night gives way to heartbeats and to the api on a busy machine.
_NICENESS = 10


def main() -> None:
    """Serves jobs until stdin closes."""
    os.nice(_NICENESS)
    # Ctrl-C in a terminal and a service manager's SIGTERM reach every process of the group; who ends this one is its
    # parent, which first gives the job back.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = _take_stdout()
    settings = _receive(sys.stdin.buffer)
    if not isinstance(settings, Settings):
        return
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    asyncio.run(_serve(settings, jobs, answers))


async def _serve(settings: Settings, jobs: "queue.SimpleQueue[Any]", answers: IO[bytes]) -> None:
    try:
        store = open_store(settings)
    except OvernightError as error:
        _send(answers, Raised.of(error))
        return
    _send(answers, Ready())
    while True:
        job = await asyncio.to_thread(jobs.get)
        answer: Done | Raised
        with _signs_of_life(answers):
            try:
                answer = Done(await perform(job, store=store, parent=settings.spool_folder), resident_bytes())
            except Exception as error:
                answer = Raised.of(error)
        _send(answers, answer)


@contextlib.contextmanager
def _signs_of_life(answers: IO[bytes]) -> Iterator[None]:
    """While it lasts, the pipe is the thread's alone: it has ended before the answer is sent."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(ALIVE_EVERY_S):
            _send(answers, Alive())

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


async def perform(job: PlanRequest | FinishRequest, *, store: ObjectStore, parent: Path) -> Any:
    """Does one job in a spool folder of its own below `parent`: PlanResult for a plan, Written for a finish.

    Raises:
        OutOfSpace, Unavailable: the disk of the spool fails, which is not the job's fault (invariant 13). The store has
            such errors of its own.
    """
    try:
        with spool_folder(parent) as spool:
            if isinstance(job, FinishRequest):
                return await write_results(store, request=job, spool=spool)
            return await make_plan(store, request=job, spool=spool)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"no space left for the spool of {job.batch_id}", needed=0, free=0) from error
        raise Unavailable(f"the spool folder fails: {error.strerror or error}") from error


def resident_bytes() -> int:
    """This process's resident memory now; its peak where the system does not say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextlib.contextmanager
def spool_folder(parent: Path) -> Iterator[Path]:
    """A folder for one job's temporary files, locked while its process lives."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder, lock = _new_locked_folder(parent)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned(parent: Path) -> list[Path]:
    """Removes the spool folders whose process is dead, whatever its pid means by now; returns them."""
    removed = []
    for folder in sorted(parent.glob(f"{SPOOL_PREFIX}*")):
        with contextlib.suppress(OSError):  # locked: its process lives; no lock: it is being made, or going
            with open(folder / _LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _new_locked_folder(parent: Path) -> tuple[Path, IO[bytes]]:
    """Again where a sweep fell between the making and the locking: then the lock has no name any more."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=SPOOL_PREFIX, dir=parent))
        lock = open(folder / _LOCK, "wb")  # noqa: SIM115 (the caller closes it, with its process at the latest)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:
            return folder, lock
        lock.close()


def _take_stdout() -> IO[bytes]:
    """The pipe to the parent. What else prints to stdout goes to stderr from now on."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _listen(jobs: "queue.SimpleQueue[Any]") -> None:
    while (job := _receive(sys.stdin.buffer)) is not None:
        jobs.put(job)
    os._exit(0)


def _receive(source: IO[bytes]) -> Any:
    """The next message; None at the end, also within a message."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = source.read(size)
    return decode(data) if len(data) == size else None


def _send(pipe: IO[bytes], message: Any) -> None:
    pipe.write(encode(message))
    pipe.flush()


if __name__ == "__main__":
    main()
