"""A real `overnight serve` as a test sees it: start it, ask it, kill any of its processes, start it again, look what is left.

    with Overnight(tmp_path, upstreams=[stub.url]) as server:
        batch = server.submit(lines)
        server.kill("worker")
        batch = server.ended(batch.id)
        output, errors = server.results(batch)

Settings are given as keyword arguments by their names (`lease_ttl=1.0`) and go by the environment.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import openai

from tests.support.waiting import eventually_sync

ENDED = ("completed", "failed", "expired", "cancelled")

#: Inherited by everything a server starts, and so what finds its processes again.
MARK = "SERVED_FOR_TEST"


class Overnight:
    """One data folder, and the `serve` that runs on it at the moment, if any."""

    def __init__(
        self,
        folder: Path,
        *,
        upstreams: Sequence[str] = (),
        port: int | None = None,
        command: str = "serve",
        args: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.data = folder / "data"
        self.port = port or free_port()
        self.log = folder / "serve.log"
        self.mark = uuid.uuid4().hex
        self.command, self.args = command, list(args)
        self.process: subprocess.Popen[bytes] | None = None
        self._settings: dict[str, Any] = {"upstreams": list(upstreams), **settings}
        self._environ = environ or {}
        self.key = next(iter(settings.get("api_keys", ())), "any")

    # ---- its life --------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.story)  # pytest shows it with the failure
        self.destroy()

    def start(self, *, wait: bool = True, engine: bool = True, within: float = 30.0) -> None:
        """Starts `overnight serve` (or another command); returns when it answers and, with `engine`, when an engine can take work."""
        assert self.process is None or self.process.poll() is not None
        command = [sys.executable, "-P", "-m", "server.cli", self.command, f"--data={self.data}"]
        if self.command in ("serve", "api"):
            command.append(f"--port={self.port}")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.args],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.ready(engine=engine, within=within)

    def environment(self) -> dict[str, str]:
        """What the server gets; also for commands that are to be found by `processes`."""
        told = {f"OVERNIGHT_{name.upper()}": _as_variable(value) for name, value in self._settings.items()}
        kept = {name: value for name, value in os.environ.items() if name == "OVERNIGHT_ENGINE_HOME"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("OVERNIGHT_", "OPENAI_"))}
        return {**clean, **kept, **told, MARK: self.mark, **self._environ}

    def ready(self, *, engine: bool = True, within: float = 30.0) -> None:
        """Waits until the server answers (and its engine can take work); fails at once if `serve` has ended."""

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.text}"
            with contextlib.suppress(httpx.TransportError):
                path = "/readyz/engine" if engine else "/readyz"
                headers = {"Authorization": f"Bearer {self.key}"}
                reply = httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=5)
                return reply.status_code == 200
            return False

        try:
            eventually_sync(answers, within=within, every=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story}") from None

    def stop(self, *, within: float = 15.0) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within)

    def destroy(self) -> None:
        """Ends everything that is left, by whatever means; for the end of a test."""
        self.client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(12)
            self.process.kill()
            self.process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ---- its processes ---------------------------------------------------------------------------------------------
    def pids(self) -> dict[str, int]:
        """Process ids by role: supervisor, api, orchestrator, worker (or worker-1, worker-2, ...)."""
        return dict(json.loads((self.data / "run" / "pids.json").read_text()))

    def kill(self, *roles: str, number: int = signal.SIGKILL) -> None:
        """Sends SIGKILL (or another signal) to these roles' processes; `supervisor` is waited for."""
        pids = self.pids()
        for role in roles:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[role], number)
        if "supervisor" in roles and number == signal.SIGKILL:
            assert self.process is not None
            self.process.wait(10)

    def replaced(self, role: str, before: int, *, within: float = 15.0) -> int:
        """Waits until the supervisor has started this role again; its new process id."""
        return int(
            eventually_sync(lambda: self.pids().get(role) if self.pids().get(role) != before else None, within=within)
        )

    def processes(self) -> dict[int, str]:
        """Every living process that was started by this server's `serve`, at whatever remove: pid and command line."""
        found = {}
        needle = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def nothing_left(self, *, within: float = 15.0) -> None:
        """Invariant 15: waits until no process of this server lives."""
        try:
            eventually_sync(lambda: not self.processes(), within=within, every=0.05)
        except AssertionError:
            raise AssertionError(f"still alive: {self.processes()}\n{self.story}") from None

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def story(self) -> str:
        """The same without the requests that it logs, for the message of a failed test."""
        return "\n".join(line for line in self.text.splitlines() if " request request_id=" not in line)

    # ---- its API ---------------------------------------------------------------------------------------------------
    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @cached_property
    def client(self) -> openai.OpenAI:
        """The official SDK, which tries again by itself while the api restarts."""
        return openai.OpenAI(base_url=self.base_url, api_key=self.key, max_retries=8)

    def submit(self, lines: Iterable[Any], *, endpoint: str = "/v1/chat/completions", window: str = "24h") -> Any:
        """Uploads the lines (objects, or bytes as they are) and starts a batch."""
        data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        file = self.client.files.create(file=("input.jsonl", data), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,
            completion_window=window,  # type: ignore[arg-type]
        )

    def batch(self, batch_id: str) -> Any:
        return self.client.batches.retrieve(batch_id)

    def until(self, batch_id: str, probe: Any, *, within: float = 60.0) -> Any:
        """Polls the batch until `probe(batch)` is true, through restarts of the api, and returns it."""
        deadline = time.monotonic() + within
        while True:
            batch = None
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                batch = self.batch(batch_id)
                if probe(batch):
                    return batch
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within} s; last: {batch}\n{self.story}")
            time.sleep(0.05)

    def ended(self, batch_id: str, *, within: float = 60.0) -> Any:
        """Waits for a terminal status."""
        return self.until(batch_id, lambda batch: batch.status in ENDED, within=within)

    def results(self, batch: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of the output and of the error file."""
        ids = (batch.output_file_id, batch.error_file_id)
        texts = [self.client.files.content(file_id).read() if file_id else b"" for file_id in ids]
        output, errors = ([json.loads(line) for line in text.split(b"\n") if line] for text in texts)
        return output, errors


def request_line(custom_id: str, prompt: str, *, model: str = "stub-model") -> dict[str, Any]:
    """One chat request of an input file."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_variable(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
