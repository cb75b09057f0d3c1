"""A stub of an OpenAI-compatible model server: real sockets, deterministic answers, faults on demand.

It answers `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/responses`, `/v1/score`, `/v1/rerank`,
`/v1/models`, `/openapi.json` and `/health`. In a test, inside the event loop::

    async with Stub(latency=0.01).running() as stub:
        ... stub.url, stub.calls_of("the prompt"), stub.stats(), stub.set_mode("down")

or as a process of its own (what a test of kill -9 wants)::

    with StubProcess(latency=0.01) as stub:
        ... stub.url, stub.stats(), stub.set_mode("unauthorized"), stub.order()

`python -m tests.support.stub --port 0` prints its port as the first line and its control port as the second. The control
port answers GET /stats, GET /order, POST /reset and POST /mode `{"mode": ..., "retry_after": ...}` in every mode.

Modes: `ok`; `down` (refuses connections, and cuts those there are); `unauthorized` (401 for everything); `hang` (takes
requests, answers none); `status:NNN` (that status for every inference request); `missing` (a plain 404 for them).

A prompt may hold one directive, `[[stub WORD KEY=VALUE ...]]`, where `times=N` stops it after N calls of that prompt:

======================  ==================================================================================
status=500              that status with an OpenAI error; `retry-after=1` adds the header
drop                    the connection is closed instead of an answer
die                     the server ends: a process exits, inside a test every connection is cut
latency=2.5             seconds this answer takes
size=100000             the answer holds so many further characters
body=NAME               one of BODIES instead of the answer (with `status=`, as that status's body)
cut                     the answer breaks off in the middle
======================  ==================================================================================
"""

import argparse
import asyncio
import os
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, cast

import orjson

from tests.support.stub_process import StubProcess
from tests.support.stub_replies import BODIES, PROMPT_KEY, answer_of, chat, digest_of, reply_body, text_of

__all__ = ["Stub", "StubProcess", "answer_of", "chat", "digest_of"]

DIRECTIVE = re.compile(r"\[\[stub ([^\]]*)\]\]")


class Stub:
    """The server's state, whichever way it runs."""

    def __init__(
        self,
        *,
        latency: float = 0.0,
        slots: int = 0,
        models: tuple[str, ...] = ("stub-model",),
        key: str = "",
        exits: bool = False,
    ) -> None:
        self.latency, self.slots, self.models, self.key, self.exits = latency, slots, models, key, exits
        self.mode, self.mode_retry_after, self.deaths = "ok", None, 0
        self.connections: set[_Connection] = set()
        self.waiting: deque[tuple[_Connection, float, Callable[[], None]]] = deque()
        self.busy = self.port = self.control_port = 0
        self._server: asyncio.Server | None = None
        self._control: asyncio.Server | None = None
        self._uds: str | None = None
        self.reset()

    # ---- what a test reads and sets -------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def reset(self) -> None:
        self.calls = self.in_flight = self.max_in_flight = self.aborted = self.probes = 0
        self.by_status: Counter[str] = Counter()
        self.by_prompt: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.log: list[str] = []
        self.first_reply_at = self.last_reply_at = 0.0
        self.headers: dict[str, str] = {}

    def stats(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "probes": self.probes,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "aborted": self.aborted,
            "deaths": self.deaths,
            "first_reply_at": self.first_reply_at,
            "last_reply_at": self.last_reply_at,
            "by_status": dict(self.by_status),
            "by_prompt": dict(self.by_prompt),
        }

    def calls_of(self, prompt: Any) -> int:
        """How often this prompt (messages, prompt or input) was asked for."""
        return self.by_prompt[digest_of(prompt)]

    async def set_mode(self, mode: str, *, retry_after: float | None = None) -> None:
        """Switches the mode; see above."""
        was, self.mode, self.mode_retry_after = self.mode, mode, retry_after
        if mode == "down" and was != "down":
            self._cut()
        elif mode != "down" and was == "down":
            await self._listen()

    @asynccontextmanager
    async def running(self, *, port: int = 0, uds: str | None = None) -> AsyncIterator[Self]:
        """Serves on a loopback port (0: a free one), or on a Unix socket."""
        self.port, self._uds = port, uds
        loop = asyncio.get_running_loop()
        await self._listen()
        self._control = await loop.create_server(lambda: _Connection(self, control=True), "127.0.0.1", 0)
        self.control_port = self._control.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._cut()
            self._control.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self._uds:
            Path(self._uds).unlink(missing_ok=True)
            self._server = await loop.create_unix_server(lambda: _Connection(self), self._uds)
        else:
            self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=2048)
            self.port = self._server.sockets[0].getsockname()[1]

    def _cut(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.abort()

    def die(self) -> None:
        """Ends as an engine does that a request kills."""
        if self.exits:
            os._exit(1)
        self.deaths += 1
        for connection in list(self.connections):
            connection.abort()

    # ---- one request ----------------------------------------------------------------------------------------------
    def route(self, connection: "_Connection", method: str, path: str, head: dict[str, str], body: bytes) -> None:
        if connection.control:
            self._control_route(connection, method, path, body)
        elif self.mode == "unauthorized" or (self.key and head.get("authorization") != f"Bearer {self.key}"):
            self.by_status["401"] += 1
            connection.refuse(401, "Incorrect API key provided")
        elif method == "GET":
            self.probes += 1
            self._get(connection, path)
        elif path in PROMPT_KEY and self.mode != "missing":
            self.headers = head
            self._infer(connection, path, body)
        else:
            self.by_status["404"] += 1
            connection.reply(404, BODIES["detail"])

    def _control_route(self, connection: "_Connection", method: str, path: str, body: bytes) -> None:
        answer: Any = {}
        if (method, path) == ("GET", "/stats"):
            answer = self.stats()
        elif (method, path) == ("GET", "/order"):
            answer = self.log
        elif path == "/reset":
            self.reset()
        elif path == "/mode":
            wanted = orjson.loads(body)
            task = asyncio.ensure_future(self.set_mode(wanted["mode"], retry_after=wanted.get("retry_after")))
            task.add_done_callback(lambda _: connection.reply(200, b"{}"))
            return
        connection.reply(200, orjson.dumps(answer))

    def _get(self, connection: "_Connection", path: str) -> None:
        if path == "/v1/models":
            data = [{"id": m, "object": "model", "created": 1, "owned_by": "stub"} for m in self.models]
            connection.reply(200, orjson.dumps({"object": "list", "data": data}))
        elif path == "/openapi.json":
            connection.reply(200, orjson.dumps({"openapi": "3.1.0", "paths": {p: {"post": {}} for p in PROMPT_KEY}}))
        elif path == "/health":
            connection.reply(200, b"{}")
        else:
            connection.reply(404, BODIES["detail"])

    def _infer(self, connection: "_Connection", path: str, raw: bytes) -> None:
        self.calls += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        connection.inferring = True
        if self.mode == "hang":
            return
        if self.mode.startswith("status:"):
            connection.finish(
                lambda: connection.refuse(int(self.mode[7:] or 503), "the stub was told so", self.mode_retry_after)
            )
            return
        try:
            body = orjson.loads(raw)
            prompt = body[PROMPT_KEY[path]]
        except (orjson.JSONDecodeError, KeyError, TypeError) as problem:
            reason = f"bad request: {problem}"
            connection.finish(lambda: connection.refuse(400, reason))
            return
        text, digest = text_of(prompt), digest_of(prompt)
        self.by_prompt[digest] += 1
        self.log.append(text[:200])
        if body.get("model") not in self.models:
            reason = f"The model `{body.get('model')}` does not exist."
            connection.finish(lambda: connection.refuse(404, reason))
            return
        rule = self._directive(text, digest)
        if "die" in rule:
            self.die()
            return
        self._run(
            connection,
            float(rule.get("latency", self.latency)),
            lambda: self._answer(connection, path, body, digest, rule),
        )

    def _directive(self, text: str, digest: str) -> dict[str, str]:
        found = DIRECTIVE.search(text) if "[[stub" in text else None
        if not found:
            return {}
        rule = {k: v for k, _, v in (word.partition("=") for word in found[1].split())}
        if self.faults[digest] >= int(rule.get("times", 1 << 30)):
            return {}
        self.faults[digest] += 1
        return rule

    def _run(self, connection: "_Connection", latency: float, answer: Callable[[], None]) -> None:
        """Runs now, or when a slot is free."""
        if self.slots and self.busy >= self.slots:
            self.waiting.append((connection, latency, answer))
            return
        self.busy += 1
        connection.has_slot = True
        if latency <= 0:
            connection.finish(answer)
        else:
            connection.timer = asyncio.get_running_loop().call_later(latency, connection.finish, answer)

    def free_slot(self) -> None:
        self.busy -= 1
        while self.waiting:
            connection, latency, answer = self.waiting.popleft()
            if connection.inferring:
                self._run(connection, latency, answer)
                return

    def _answer(self, connection: "_Connection", path: str, body: Any, digest: str, rule: dict[str, str]) -> None:
        if "drop" in rule:
            self.by_status["dropped"] += 1
            connection.abort()
        elif "body" in rule:
            connection.reply(int(rule.get("status", 200)), BODIES[rule["body"]])
        elif "status" in rule:
            after = rule.get("retry-after")
            connection.refuse(int(rule["status"]), "the prompt said so", None if after is None else float(after))
        else:
            data = orjson.dumps(reply_body(path, body, digest, "x" * int(rule.get("size", 0))))
            connection.reply(200, data, cut="cut" in rule)


class _Connection(asyncio.Protocol):
    """One client connection: requests one after another, answered in order."""

    def __init__(self, stub: Stub, *, control: bool = False) -> None:
        self.stub, self.control = stub, control
        self.buffer = b""
        self.answering = self.inferring = self.has_slot = False
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        if not self.control:
            self.stub.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stub.connections.discard(self)
        if self.timer:
            self.timer.cancel()
        if self.inferring:
            self.stub.aborted += 1
            self._leave()

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        self._next()

    def _next(self) -> None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0 or self.answering:
            return
        first, *rest = self.buffer[:end].decode("latin-1").split("\r\n")
        head = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in rest)}
        stop = end + 4 + int(head.get("content-length", 0))
        if len(self.buffer) < stop:
            return
        body, self.buffer = self.buffer[end + 4 : stop], self.buffer[stop:]
        method, path, _ = first.split(" ", 2)
        self.answering = True
        self.stub.route(self, method, path, head, body)

    def finish(self, answer: Callable[[], None]) -> None:
        """An inference request is over: frees its slot and answers."""
        self._leave()
        self.stub.last_reply_at = time.monotonic()
        self.stub.first_reply_at = self.stub.first_reply_at or self.stub.last_reply_at
        answer()

    def _leave(self) -> None:
        self.inferring, self.timer = False, None
        self.stub.in_flight -= 1
        if self.has_slot:
            self.has_slot = False
            self.stub.free_slot()

    def abort(self) -> None:
        self.transport.abort()

    def refuse(self, status: int, message: str, retry_after: float | None = None) -> None:
        error = {"message": message, "type": "stub_error", "param": None, "code": status}
        extra = "" if retry_after is None else f"Retry-After: {retry_after:g}\r\n"
        self.reply(status, orjson.dumps({"error": error}), extra=extra)

    def reply(self, status: int, body: bytes, *, extra: str = "", cut: bool = False) -> None:
        if not self.control:
            self.stub.by_status[str(status)] += 1
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{extra}\r\n"
        ).encode()
        if cut:
            self.transport.write(head + body[: len(body) // 2])
            self.transport.close()
            return
        self.transport.write(head + body)
        self.answering = False
        if self.buffer:
            self._next()


async def _serve(options: argparse.Namespace) -> None:
    stub = Stub(
        latency=options.latency,
        slots=options.slots,
        models=tuple(options.model or ["stub-model"]),
        key=options.key,
        exits=True,
    )
    async with stub.running(port=options.port, uds=options.uds):
        print(stub.port, stub.control_port, sep="\n", flush=True)
        await asyncio.Event().wait()


def _main() -> None:
    parser = argparse.ArgumentParser(description="A stub of an OpenAI-compatible model server.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds", default=None)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--model", action="append")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    import uvloop

    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(options))


if __name__ == "__main__":
    _main()
