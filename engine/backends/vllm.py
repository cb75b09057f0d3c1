"""A vLLM that the worker runs: started under a guard, reached over a private Unix socket, watched, ended with everything.

The life of one run: `start` makes a new private folder with a new socket path (vLLM does not unlink an old one), starts
the process, waits until it is healthy, and sends one tiny request to every endpoint that it serves; `died` returns when
the process has ended or hangs; then `start` makes the next run. An engine is never adopted by another worker.
"""

import asyncio
import contextlib
import json
import logging
import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.backends.aliases import check_aliases, parse_aliases, with_aliases
from engine.backends.client import Client
from engine.backends.engine_metrics import HangWatch, Sample, read_sample
from engine.backends.engine_process import EngineProcess, describe_exit
from engine.backends.leftovers import end_leftovers
from engine.backends.protocol import EngineError, EngineMisconfigured, NotSent, Reply, ServedModel
from engine.backends.remote import read_endpoints
from engine.backends.renaming import Renaming
from engine.backends.vllm_command import (
    Distribution,
    Names,
    check_flags,
    command_line,
    environment,
    max_num_seqs,
    names_of,
)
from engine.backends.warm_up import tiny_requests
from engine.environment import find_distribution, find_model, find_python
from state.clock import Clock, SystemClock
from state.records import SettingsError
from state.settings import Settings

log = logging.getLogger(__name__)

#: Seconds the engine gets to end by itself and by force, all in all: a worker has ten for everything it does at its end.
STOP_S: Final = 4.0
#: Seconds between looks at an engine that is starting, and at one that runs.
STARTING_POLL_S: Final = 0.1
WATCH_S: Final = 1.0
#: Seconds between lines in the log about an engine that takes long to start.
STILL_STARTING_S: Final = 30.0
#: A path of a Unix socket is shorter than this, in bytes, on every system we run on.
LONGEST_SOCKET_PATH: Final = 100
#: More at once than the engine runs, so that its queue is never empty.
AHEAD: Final = 1.25


@dataclass(slots=True)
class _Run:
    """One run of the engine. `death` is set, with the reason, once it is over; `in_flight` counts our requests."""

    process: EngineProcess
    client: Client
    death: asyncio.Future[str]
    endpoints: tuple[str, ...] | None = None
    in_flight: int = 0
    watch: asyncio.Task[None] | None = None


class ManagedVLLM:
    """A Backend that owns its engine's process."""

    name = "vllm (managed)"

    def __init__(
        self, settings: Settings, *, clock: Clock | None = None, hung_after: float = 120.0, stop_s: float = STOP_S
    ) -> None:
        """Starts nothing. `hung_after` and `stop_s` are seconds.

        Raises:
            SettingsError: flags or aliases that cannot work.
        """
        check_flags(settings.engine_args)
        self._settings, self._clock = settings, clock or SystemClock()
        self._hung_after, self._stop_s = hung_after, stop_s
        self._aliases = parse_aliases(settings.model_aliases)
        self._names: Names = names_of(settings.model, self._aliases)
        self._renaming = Renaming(self._aliases, served=self._names.all)
        check_aliases(self._models(None), self._aliases, engine="the engine")
        cpu = settings.model == "demo" or not _has_gpu()
        self.suggested_in_flight = round(max_num_seqs(settings.engine_args, cpu=cpu) * AHEAD)
        self._run: _Run | None = None
        self._was_healthy = False

    async def start(self) -> None:
        await self._end_run()
        records = self._settings.data / "engines"
        await end_leftovers(records)
        run = self._run = await self._launch(records)
        try:
            await self._until_healthy(run)
            run.endpoints = await self._read_endpoints(run)
            await self._warm_up(run)
        except BaseException:
            await self._end_run()
            raise
        self._was_healthy = True
        run.watch = asyncio.create_task(self._watch(run), name="engine watch")
        log.info("vLLM is ready: %s", self._names.root)

    async def models(self) -> tuple[ServedModel, ...]:
        """The model's names are known before the engine is up, so that batches can be planned meanwhile."""
        return with_aliases(self._models(self._run.endpoints if self._run else None), self._aliases)

    async def send(self, endpoint: str, body: bytes) -> Reply:
        run = self._run
        if run is None or run.death.done():
            raise NotSent("the engine is not running")
        run.in_flight += 1
        try:
            return await run.client.post(endpoint, self._renaming.renamed(body))
        finally:
            run.in_flight -= 1

    async def died(self) -> str:
        if self._run is None:
            return "it was not started"
        return await asyncio.shield(self._run.death)

    async def close(self) -> None:
        await self._end_run()

    def _models(self, endpoints: tuple[str, ...] | None) -> tuple[ServedModel, ...]:
        return (ServedModel(root=self._names.root, names=self._names.all, endpoints=endpoints),)

    async def _launch(self, records: Path) -> _Run:
        python = find_python(self._settings)
        distribution: Distribution = await find_distribution(python)
        model = find_model(self._settings)
        folder = _private_folder()
        socket = folder / "s"
        command = command_line(
            python=python,
            distribution=distribution,
            model=model,
            names=self._names,
            socket=socket,
            args=self._settings.engine_args,
        )
        environ = environment(os.environ, distribution=distribution, model=model, python=python, folder=folder)
        log.info("starting vLLM %s: %s", distribution.version, json.dumps(command))
        process = await EngineProcess.start(
            command, environ=environ, record=records / f"{uuid.uuid4().hex}.json", folder=folder, stop_s=self._stop_s
        )
        client = Client(
            "http://localhost",
            wall=self._clock.wall,
            timeout=self._settings.request_timeout,
            max_reply_bytes=self._settings.max_reply_bytes,
            socket_path=str(socket),
        )
        return _Run(process, client, asyncio.get_running_loop().create_future())

    async def _until_healthy(self, run: _Run) -> None:
        """Polls until the engine answers; raises if it ends instead. A large model may load for as long as it likes."""
        started = told = self._clock.monotonic()
        while not run.process.ended.done():
            with contextlib.suppress(EngineError):
                if (await run.client.get("/health")).status == 200:
                    return
            await asyncio.wait([run.process.ended], timeout=STARTING_POLL_S)
            now = self._clock.monotonic()
            if now - told >= STILL_STARTING_S:
                told = now
                log.info("vLLM is still starting after %.0f s: %s", now - started, "".join(run.process.tail[-1:]))
        what = f"vLLM {describe_exit(run.process.ended.result())} before it was ready"
        if self._was_healthy:  # as configured it did work, so this may pass
            raise EngineError(what)
        raise EngineMisconfigured(what, run.process.tail)

    async def _read_endpoints(self, run: _Run) -> tuple[str, ...] | None:
        reply = await run.client.get("/openapi.json")
        return read_endpoints(reply.body) if reply.status == 200 else None

    async def _warm_up(self, run: _Run) -> None:
        """One tiny request per endpoint, so that what is made at the first one is made before work comes.

        A refusal (4xx) is the request's fault, as with a model that has no chat template; anything else is the engine's.
        """
        for endpoint, body in tiny_requests(self._names.root, run.endpoints or ()):
            reply = await run.client.post(endpoint, body)
            if reply.status >= 500:
                raise EngineError(f"answers {reply.status} to a first request to {endpoint}")
            log.debug("warm-up of %s: %s", endpoint, reply.status)

    async def _watch(self, run: _Run) -> None:
        """Waits for the end of the process, or ends it when it hangs; sets `death`."""
        watch = HangWatch(now=self._clock.monotonic(), after=self._hung_after)
        reason = ""
        while not run.process.ended.done():
            await asyncio.wait([run.process.ended], timeout=WATCH_S)
            if run.process.ended.done():
                break
            sample = await self._sample(run)
            if watch.hangs(sample, in_flight=run.in_flight, now=self._clock.monotonic()):
                reason = f"vLLM hung: requests at it, and no progress for {self._hung_after:g} s"
            elif await self._core_is_dead(run):
                reason = "vLLM's engine core died"
            if reason:
                await run.process.stop()
        tail = "; ".join(run.process.tail[-3:])
        run.death.set_result(reason or f"vLLM {describe_exit(run.process.ended.result())} ({tail})")

    async def _sample(self, run: _Run) -> Sample | None:
        try:
            reply = await run.client.get("/metrics")
        except EngineError:
            return None
        return read_sample(reply.body.decode("utf-8", "replace")) if reply.status == 200 else Sample(None, None, None)

    async def _core_is_dead(self, run: _Run) -> bool:
        """Whether the server says so, by 503: it outlives its core for a while."""
        try:
            return (await run.client.get("/health")).status == 503
        except EngineError:
            return False

    async def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if run.watch is not None:
            run.watch.cancel()
            await asyncio.wait([run.watch])
        await run.client.close()
        await run.process.stop()
        if not run.death.done():
            run.death.set_result("it was stopped")


def _private_folder() -> Path:
    """A new folder for this user only, with a short path: a socket's may have some hundred bytes."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108  # mkdtemp makes it 0700
        # vLLM puts sockets with names of 36 characters beside ours
        if base and len(os.fsencode(base)) + 20 + 40 < LONGEST_SOCKET_PATH and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="overnight-", dir=base))
    raise SettingsError("no folder for the engine's socket: every temporary folder's path is too long; set TMPDIR=/tmp")


def _has_gpu() -> bool:
    """A guess, for how many requests to have at the engine: whether a driver's device files are there."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))
