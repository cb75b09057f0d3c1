"""An engine without a model, in the worker's own process: it answers with what it was asked. For tests and benchmarks.

A prompt may hold one directive, `[[echo:WORD:KEY=VALUE:...]]`; with `times=N` it stops after N calls of that prompt:

- `status=500`: that status instead of an answer;
- `drop`: the call ends with an unknown outcome;
- `refuse`: the call is not sent;
- `latency=2.5`: seconds this answer takes;
- `die`: the engine dies as a managed one does: every call under way is broken, and `start` brings it up again.
"""

import asyncio
import hashlib
import re
from collections import Counter
from typing import Any, Final

import orjson

from engine.backends.aliases import parse_aliases, with_aliases
from engine.backends.protocol import NotSent, OutcomeUnknown, Reply, ServedModel
from state.settings import Settings

_DIRECTIVE: Final = re.compile(r"\[\[echo:([^\]]*)\]\]")
_PROMPT: Final = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
}


class EchoEngine:
    """A Backend that makes its answers up."""

    name = "echo"

    def __init__(self, settings: Settings) -> None:
        model = ServedModel(settings.model or "echo", (settings.model or "echo",), endpoints=tuple(_PROMPT))
        self._models = with_aliases((model,), parse_aliases(settings.model_aliases))
        self._latency = settings.echo_latency
        self._followed: Counter[str] = Counter()
        self._life: asyncio.Future[str] | None = None

    async def start(self) -> None:
        self._life = asyncio.get_running_loop().create_future()

    async def models(self) -> tuple[ServedModel, ...]:
        self._alive()
        return self._models

    async def died(self) -> str:
        return await asyncio.shield(self._alive())

    async def close(self) -> None:
        if self._life is not None and not self._life.done():
            self._life.set_result("it was closed")

    async def send(self, endpoint: str, body: bytes) -> Reply:
        life = self._alive()
        try:
            request = orjson.loads(body)
            prompt = request[_PROMPT[endpoint]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return _error(400, "this is no request for this endpoint")
        if not any(request.get("model") in m.names or "*" in m.names for m in self._models):
            return _error(404, f"The model `{request.get('model')}` does not exist.")
        text = _text(prompt)
        rule = self._rule(text)
        if "refuse" in rule:
            raise NotSent("the prompt said so")
        await _wait(life, float(rule.get("latency", self._latency)))
        if "die" in rule and not life.done():
            life.set_result("the prompt said so")
        if "drop" in rule or life.done():
            raise OutcomeUnknown("the connection broke")
        if "status" in rule:
            return _error(int(rule["status"]), "the prompt said so")
        return Reply(200, orjson.dumps(_answer(endpoint, request, text)))

    def _alive(self) -> "asyncio.Future[str]":
        if self._life is None or self._life.done():
            raise NotSent("the echo engine does not run")
        return self._life

    def _rule(self, text: str) -> dict[str, str]:
        """The directive that applies to this call."""
        found = _DIRECTIVE.search(text) if "[[echo:" in text else None
        if not found:
            return {}
        rule = {key: value for key, _, value in (part.partition("=") for part in found[1].split(":"))}
        self._followed[text] += 1
        return rule if self._followed[text] <= int(rule.get("times", 1 << 30)) else {}


async def _wait(life: "asyncio.Future[str]", seconds: float) -> None:
    """Waits so long, or until the engine dies."""
    if seconds > 0:
        await asyncio.wait({life}, timeout=seconds)


def _error(status: int, message: str) -> Reply:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Reply(status, orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}))


def _text(prompt: Any) -> str:
    """The prompt as plain text: a string, a list of strings, or the contents of messages."""
    if isinstance(prompt, dict):
        prompt = prompt.get("content") or prompt.get("text")
    if isinstance(prompt, list):
        return "\n".join(_text(part) for part in prompt)
    return prompt if isinstance(prompt, str) else ""


def _answer(endpoint: str, request: dict[str, Any], text: str) -> dict[str, Any]:
    read, written = len(text.split()), len(text[:200].split())
    top: dict[str, Any] = {"id": "echo-" + hashlib.sha256(text.encode()).hexdigest()[:24], "model": request["model"]}
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    if endpoint == "/v1/chat/completions":
        choice = {"index": 0, "message": {"role": "assistant", "content": text[:200]}, "finish_reason": "stop"}
        return {**top, "object": "chat.completion", "created": 0, "choices": [choice], "usage": usage}
    if endpoint == "/v1/completions":
        choice = {"index": 0, "text": text[:200], "finish_reason": "stop"}
        return {**top, "object": "text_completion", "created": 0, "choices": [choice], "usage": usage}
    if endpoint == "/v1/responses":
        part = {"type": "output_text", "text": text[:200], "annotations": []}
        output = [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}]
        usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
        return {**top, "object": "response", "status": "completed", "created_at": 0, "output": output, "usage": usage}
    vector = [byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:8]]
    usage = {"prompt_tokens": read, "total_tokens": read}
    return {**top, "object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector}], "usage": usage}
