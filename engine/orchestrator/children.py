"""The orchestrator's child processes, from the parent's side.

Two kinds: a warm one whose start-up is paid before the first job, so that a batch of three requests is planned and
finished in milliseconds; and one made for each large job and ended after it. So a small batch never waits behind the minutes
of a large one, and a large job's memory goes back to the system.
"""

import asyncio
import contextlib
import logging
import sys
from typing import Any

from engine.orchestrator.pipe import LENGTH, Alive, ChildDied, Raised, decode, encode
from state.records import Unavailable
from state.settings import Settings

log = logging.getLogger(__name__)

#: A child that holds on to more than this after a job is replaced, in bytes.
_RESIDENT_LIMIT = 128 * 1024 * 1024
#: How long a child may take to start, and how long it may give no sign of life while it works, in seconds. The latter
#: leaves time to do the job again before a stopped batch must have ended (invariant 7).
_START_S, _SILENCE_S = 60.0, 30.0


class Child:
    """One process of `engine.orchestrator.child`. One job at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self.resident = 0
        """Bytes of memory it held after its last job."""

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Starts the process and waits until it can take a job.

        Raises:
            Unavailable: it does not start, or cannot open the object store; no job is to blame for that.
        """
        # -P: a folder named `engine` in the working directory is not ours.
        command = (sys.executable, "-P", "-m", "engine.orchestrator.child")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            first = await self._exchange(self._settings, silence=_START_S)
        except (OSError, ChildDied) as error:
            await self.end()
            raise Unavailable(f"a child process does not start: {str(error) or type(error).__name__}") from error
        except BaseException:
            await self.end()
            raise
        if isinstance(first, Raised):
            await self.end()
            raise first.error()

    async def call(self, job: Any) -> Any:
        """The job's value. A caller that is cancelled takes the process along: nobody else wants what it works on.

        Raises:
            ChildDied: the process ended in the middle, or is frozen.
            Unavailable, OutOfSpace, Corrupt: as the job raised them.
            ChildFailed: the job raised something else.
        """
        try:
            answer = await self._exchange(job, silence=_SILENCE_S)
        except BaseException:
            await self.end()
            raise
        if isinstance(answer, Raised):
            raise answer.error()
        self.resident = answer.resident
        return answer.value

    async def end(self) -> None:
        """Kills the process, if it runs, and reaps it. What it was writing is garbage of its epoch."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.shield(process.wait())

    async def _exchange(self, message: Any, *, silence: float) -> Any:
        """Sends a message and returns the answer; `silence` is the longest wait for a sign of life, in seconds."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ChildDied("the child process is not running")
        try:
            process.stdin.write(encode(message))
            await process.stdin.drain()
            while True:
                async with asyncio.timeout(silence):
                    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                    answer = decode(await process.stdout.readexactly(size))
                if not isinstance(answer, Alive):
                    return answer
        except TimeoutError as error:
            raise ChildDied(f"the child process gave no sign of life for {silence:.0f} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildDied("the child process ended in the middle of its work") from error


class Children:
    """The warm child, and one for a large job at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._warm: Child | None = None
        self._warm_lock = asyncio.Lock()
        self._large: Child | None = None

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [c.pid for c in (self._warm, self._large) if c is not None and c.pid is not None]

    async def warm(self) -> None:
        """Starts the warm child where there is none."""
        async with self._warm_lock:
            await self._ensure_warm()

    async def run_small(self, job: Any) -> Any:
        """Runs a job in the warm child. Errors as for `Child.call` and `Child.start`."""
        async with self._warm_lock:
            child = await self._ensure_warm()
            value = await child.call(job)
            if child.resident > _RESIDENT_LIMIT:
                log.info("replacing a child process that holds %d MiB", child.resident >> 20)
                await child.end()
            return value

    async def run_large(self, job: Any) -> Any:
        """Runs a job in a process of its own, which ends with it. One at a time: the caller sees to it."""
        self._large = child = Child(self._settings)
        try:
            await child.start()
            return await child.call(job)
        finally:
            await child.end()
            self._large = None

    async def close(self) -> None:
        """Ends them all (invariant 15)."""
        for child in (self._warm, self._large):
            if child is not None:
                await child.end()

    async def _ensure_warm(self) -> Child:
        if self._warm is None or self._warm.pid is None:
            if self._warm is not None:
                await self._warm.end()
            self._warm = None
            child = Child(self._settings)
            await child.start()
            self._warm = child
        return self._warm
