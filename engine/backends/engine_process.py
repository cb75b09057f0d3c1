"""An engine's process under its guard: starting it, draining what it prints, ending it with everything below it."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from engine.backends import guard
from engine.backends.leftovers import end_recorded

log = logging.getLogger(__name__)

#: So many of the last lines are kept for people.
KEPT_LINES: Final = 50
#: A longer line is cut, in characters.
LONGEST_LINE: Final = 2000
#: Seconds beyond its own bound that the guard gets before it is killed itself.
GUARD_MARGIN_S: Final = 1.0


class EngineProcess:
    """One run of an engine. Made by `start`; over when `ended` is set."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
        *,
        record: Path,
        stop_s: float,
    ) -> None:
        """`output` is what the engine prints, as it comes out of `pipe`."""
        self._process, self._pipe, self._record, self._stop_s = process, pipe, record, stop_s
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._drain = asyncio.create_task(self._read(output), name="engine output")
        self.ended = asyncio.create_task(self._wait(), name="engine process")

    @classmethod
    async def start(
        cls, command: Sequence[str], *, environ: Mapping[str, str], record: Path, folder: Path, stop_s: float
    ) -> "EngineProcess":
        """Starts the guard, and by it the engine. `folder` is removed with it; `stop_s` bounds its end, in seconds."""
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        options = ["--record", str(record), "--stop", str(stop_s), "--remove", str(folder), "--"]
        output, pipe, printed = await _output_pipe()
        with printed:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guard.__file__, *options, *command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=printed,
                    stderr=asyncio.subprocess.STDOUT,
                    env=dict(environ),
                    start_new_session=True,
                )
            except BaseException:
                pipe.close()
                raise
        return cls(process, output, pipe, record=record, stop_s=stop_s)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines it printed."""
        return tuple(self._lines)

    async def stop(self) -> None:
        """Ends the engine and everything below it; returns when it is gone, within the bound and two seconds."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), self._stop_s + GUARD_MARGIN_S)
        except TimeoutError:
            log.warning("the engine's guard did not end in time; killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self.ended

    async def _wait(self) -> int:
        code = await self._process.wait()
        await end_recorded(self._record)  # a guard that was killed has ended nothing (invariant 15)
        # A stray that outlived the guard may hold the pipe; what was printed before is read within a moment.
        await asyncio.wait([self._drain], timeout=GUARD_MARGIN_S)
        self._drain.cancel()
        self._pipe.close()
        return code

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Drains the output, so that the engine never blocks on it."""
        rest = b""
        while chunk := await output.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._keep(line)
            if len(rest) > LONGEST_LINE * 4:
                self._keep(rest)
                rest = b""
        if rest:
            self._keep(rest)

    def _keep(self, raw: bytes) -> None:
        # A progress bar rewrites its line with carriage returns: only its last state is of interest.
        line = raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2][:LONGEST_LINE]
        self._lines.append(line)
        log.debug("engine: %s", line)


async def _output_pipe() -> tuple[asyncio.StreamReader, asyncio.ReadTransport, IO[bytes]]:
    """What is read, its transport, and the end to write to.

    A pipe of our own: with one of asyncio's, a process is not over for it while a stray holds the other end.
    """
    ours, theirs = os.pipe()
    output = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb")
    )
    return output, pipe, os.fdopen(theirs, "wb")


def describe_exit(code: int) -> str:
    """An exit code of the guard, which is the engine's, in words."""
    if code < 0:
        return f"lost its guard, which was ended by {signal.Signals(-code).name}"
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"
