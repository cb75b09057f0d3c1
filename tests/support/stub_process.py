"""The stub model server as a process of its own, for tests that kill things."""

import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from tests.support.stub_replies import digest_of


class StubProcess:
    """The stub in a process of its own."""

    def __init__(
        self, *, port: int = 0, latency: float = 0.0, slots: int = 0, models: tuple[str, ...] = (), key: str = ""
    ) -> None:
        self._flags = [f"--port={port}", f"--latency={latency}", f"--slots={slots}", f"--key={key}"]
        self._flags += [f"--model={m}" for m in models]

    def __enter__(self) -> Self:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.support.stub", *self._flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())
        self.control_port = int(self.process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stats(self) -> dict[str, Any]:
        return dict(self._call("/stats"))

    def order(self) -> list[str]:
        """The first 200 characters of each prompt, in the order they came."""
        return list(self._call("/order"))

    def calls_of(self, prompt: Any) -> int:
        return int(self.stats()["by_prompt"].get(digest_of(prompt), 0))

    def set_mode(self, mode: str, *, retry_after: float | None = None) -> None:
        self._call("/mode", {"mode": mode, "retry_after": retry_after})

    def reset(self) -> None:
        self._call("/reset", {})

    def _call(self, path: str, body: Any = None) -> Any:
        url = f"http://127.0.0.1:{self.control_port}{path}"
        data = None if body is None else orjson.dumps(body)
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=10) as reply:
            return orjson.loads(reply.read())
