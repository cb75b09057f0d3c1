"""A vLLM that the worker runs: started under a guard, reached over a private Unix socket, watched, ended with everything.

The life of one run: `start` makes a new private folder with a new socket path (vLLM does not unlink an old one), starts
the process, waits until it is healthy, and sends one tiny request to every endpoint that it serves; `died` returns when
the process has ended or hangs; then `start` makes the next run. An engine is never adopted by another worker.
"""

import asyncio
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.backends.aliases import check_aliases, parse_aliases, with_aliases
from engine.backends.client import Client
from engine.backends.engine_metrics import HUNG_AFTER_ON_CPU_S, HUNG_AFTER_S, HangWatch, Sample, read_sample
from engine.backends.engine_process import EngineProcess, describe_exit
from engine.backends.leftovers import end_leftovers
from engine.backends.protocol import EngineError, EngineMisconfigured, NotSent, Reply, ServedModel
from engine.backends.proven import Proof
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
STOP_S: Final = 3.0
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
    """One run of the engine. `death` is set, with the reason, once it is over."""

    process: EngineProcess
    client: Client
    watcher: Client
    """Connects anew each time: a kept connection works on where the engine cannot be reached any more."""
    death: asyncio.Future[str]
    hung_after: float
    endpoints: tuple[str, ...] | None = None
    watch: asyncio.Task[None] | None = None


class ManagedVLLM:
    """A Backend that owns its engine's process."""

    name = "vllm (managed)"

    def __init__(self, settings: Settings, *, clock: Clock | None = None, stop_s: float = STOP_S) -> None:
        """Starts nothing. `stop_s` is in seconds.

        Raises:
            SettingsError: flags or aliases that cannot work.
        """
        check_flags(settings.engine_args)
        self._settings, self._clock = settings, clock or SystemClock()
        self._stop_s = stop_s
        self._records = settings.data / "engines"
        self._proof = Proof(self._records / "proven", settings)
        self._aliases = parse_aliases(settings.model_aliases)
        self._names: Names = names_of(settings.model, self._aliases)
        self._renaming = Renaming(self._aliases, served=self._names.all)
        check_aliases(self._models(None), self._aliases, engine="the engine")
        cpu = settings.model == "demo" or not _has_gpu()
        self.suggested_in_flight = round(max_num_seqs(settings.engine_args, cpu=cpu) * AHEAD)
        self._run: _Run | None = None

    async def start(self) -> None:
        await self._end_run()
        await end_leftovers(self._records)
        try:
            run = self._run = await self._launch()
            await self._until_healthy(run)
            run.endpoints = await self._read_endpoints(run)
            await self._warm_up(run)
        except (EngineError, SettingsError, OSError) as error:
            tail = await self._end_run()
            if self._proof.given:  # as configured it did work, so this may pass
                raise EngineError("; ".join((str(error), *tail[-3:]))) from error
            if isinstance(error, EngineError):
                raise EngineMisconfigured(str(error), tail) from error
            raise
        except BaseException:
            await self._end_run()
            raise
        self._proof.give()
        run.watch = asyncio.create_task(self._watch(run), name="engine watch")
        log.info("vLLM is ready: %s", self._names.root)

    async def models(self) -> tuple[ServedModel, ...]:
        """The model's names are known before the engine is up, so that batches can be planned meanwhile."""
        return with_aliases(self._models(self._run.endpoints if self._run else None), self._aliases)

    async def send(self, endpoint: str, body: bytes) -> Reply:
        run = self._run
        if run is None or run.death.done():
            raise NotSent("the engine is not running")
        return await run.client.post(endpoint, self._renaming.renamed(body))

    async def died(self) -> str:
        if self._run is None:
            return "it was not started"
        return await asyncio.shield(self._run.death)

    async def close(self) -> None:
        await self._end_run()

    def _models(self, endpoints: tuple[str, ...] | None) -> tuple[ServedModel, ...]:
        return (ServedModel(root=self._names.root, names=self._names.all, endpoints=endpoints),)

    async def _launch(self) -> _Run:
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
        record = self._records / f"{uuid.uuid4().hex}.json"
        try:
            process = await EngineProcess.start(
                command, environ=environ, record=record, folder=folder, stop_s=self._stop_s
            )
        except OSError:
            folder.rmdir()
            raise
        client, watcher = self._client(socket), self._client(socket, {"Connection": "close"})
        hung_after = self._settings.engine_hung_after or (HUNG_AFTER_ON_CPU_S if distribution.cpu else HUNG_AFTER_S)
        return _Run(process, client, watcher, asyncio.get_running_loop().create_future(), hung_after)

    def _client(self, socket: Path, headers: Mapping[str, str] | None = None) -> Client:
        return Client(
            "http://localhost",
            wall=self._clock.wall,
            timeout=self._settings.request_timeout,
            max_reply_bytes=self._settings.max_reply_bytes,
            socket_path=str(socket),
            headers=headers,
        )

    async def _until_healthy(self, run: _Run) -> None:
        """Polls until the engine answers; raises if it ends instead. A large model may load for as long as it likes."""
        started = told = self._clock.monotonic()
        while not run.process.ended.done():
            if await self._health(run) == 200:
                return
            await asyncio.wait([run.process.ended], timeout=STARTING_POLL_S)
            now = self._clock.monotonic()
            if now - told >= STILL_STARTING_S:
                told = now
                log.info("vLLM is still starting after %.0f s: %s", now - started, "".join(run.process.tail[-1:]))
        raise EngineError(f"vLLM {describe_exit(run.process.ended.result())} before it was ready")

    async def _read_endpoints(self, run: _Run) -> tuple[str, ...] | None:
        reply = await run.client.get("/openapi.json")
        return read_endpoints(reply.body) if reply.status == 200 else None

    async def _warm_up(self, run: _Run) -> None:
        """One tiny request per endpoint, so that what is made at the first one is made before work comes.

        An engine that refuses one, or fails at it, and lives may do well with others; one that dies of it cannot work.
        """
        for endpoint, body in tiny_requests(self._names.root, run.endpoints or ()):
            try:
                status = (await run.client.post(endpoint, body)).status
            except EngineError as error:
                raise EngineError(f"vLLM did not live through a first request to {endpoint}: {error}") from error
            if status < 500:
                log.debug("warm-up of %s: %s", endpoint, status)
            elif await self._health(run) == 200:
                log.warning("vLLM answers %s to a first request to %s", status, endpoint)
            else:
                raise EngineError(f"vLLM answers {status} to a first request to {endpoint}, and is dead")

    async def _watch(self, run: _Run) -> None:
        """Waits for the end of the process, or ends it when it hangs; sets `death`."""
        watch = HangWatch(now=self._clock.monotonic(), after=run.hung_after)
        reason = ""
        while not run.process.ended.done():
            await asyncio.wait([run.process.ended], timeout=WATCH_S)
            if run.process.ended.done():
                break
            sample = await self._sample(run)
            if watch.hangs(sample, now=self._clock.monotonic()):
                what = "no answer from it" if sample is None else "requests at it, and no progress"
                reason = f"vLLM hung: {what} for {run.hung_after:g} s"
            elif await self._health(run) == 503:  # it says so for a while: the server outlives its core
                reason = "vLLM's engine core died"
            if reason:
                await run.process.stop()
        tail = "; ".join(run.process.tail[-3:])
        run.death.set_result(reason or f"vLLM {describe_exit(run.process.ended.result())} ({tail})")

    async def _sample(self, run: _Run) -> Sample | None:
        try:
            reply = await run.watcher.get("/metrics")
        except EngineError:
            return None
        return read_sample(reply.body.decode("utf-8", "replace")) if reply.status == 200 else Sample(None, None, None)

    async def _health(self, run: _Run) -> int:
        """The status with which it answers to that question; 0 if it does not answer."""
        try:
            return (await run.watcher.get("/health")).status
        except EngineError:
            return 0

    async def _end_run(self) -> tuple[str, ...]:
        """Ends the engine if one runs; returns the last lines it printed."""
        run, self._run = self._run, None
        if run is None:
            return ()
        if run.watch is not None:
            run.watch.cancel()
            await asyncio.wait([run.watch])
        await run.client.close()
        await run.watcher.close()
        await run.process.stop()
        if not run.death.done():
            run.death.set_result("it was stopped")
        return run.process.tail


def _private_folder() -> Path:
    """A new folder for this user only, with a short path: a socket's may have some hundred bytes.

    Not in XDG_RUNTIME_DIR, which is removed when its user logs out, as those do who leave work for the night.
    """
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108  # mkdtemp makes it 0700
        # vLLM puts sockets with names of 36 characters beside ours
        if len(os.fsencode(base)) + 20 + 40 < LONGEST_SOCKET_PATH and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="overnight-", dir=base))
    raise SettingsError("no folder for the engine's socket: every temporary folder's path is too long; set TMPDIR=/tmp")


def _has_gpu() -> bool:
    """A guess, for how many requests to have at the engine: whether a driver's device files are there."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))
