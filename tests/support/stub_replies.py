"""What the stub model server says: its answers, its broken bodies, and how a request is named."""

import hashlib
from typing import Any

import orjson

PROMPT_KEY = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
    "/v1/score": "text_1",
    "/v1/rerank": "query",
}
BODIES = {
    "nan": b'{"object":"x","value":NaN}',
    "html": b"<html>Bad Gateway</html>",
    "detail": b'{"detail":"Not Found"}',
    "array": b"[1,2]",
    "empty": b"",
    "latin1": b'{"text":"caf\xe9"}',
    "surrogate": b'{"id":"\\ud83d","model":"a\\ud83d","choices":[]}',
    "separators": b'{\r\n "text": "a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d",\n "n": 12345678901234567890, "x": 1.10 }\n',
}


def digest_of(prompt: Any) -> str:
    """What names a request in the statistics: a hash of its prompt (messages, prompt or input)."""
    return hashlib.sha256(orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def chat(text: str) -> list[dict[str, str]]:
    """The messages of a one-turn chat."""
    return [{"role": "user", "content": text}]


def answer_of(prompt: Any) -> str:
    """The text of the answer to a prompt, so that a test can tell whose answer it holds."""
    return f"answer {digest_of(prompt)}"


def text_of(prompt: Any) -> str:
    """A prompt's plain text."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        return text_of(prompt.get("content") or prompt.get("text") or "")
    return "\n".join(text_of(part) for part in prompt) if isinstance(prompt, list) else ""


def reply_body(path: str, body: Any, digest: str, padding: str = "") -> dict[str, Any]:
    """The answer to a request: the same for the same prompt."""
    text = f"answer {digest}{padding}"
    tokens = {"prompt_tokens": len(text_of(body[PROMPT_KEY[path]]).split()), "completion_tokens": 2}
    usage: dict[str, Any] = {
        **tokens,
        "total_tokens": sum(tokens.values()),
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    base: dict[str, Any] = {"id": f"stub-{digest}", "created": 1, "model": body["model"]}
    if path == "/v1/chat/completions":
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
    if path == "/v1/completions":
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        return {**base, "object": "text_completion", "choices": [choice], "usage": usage}
    if path == "/v1/responses":
        usage = {"input_tokens": tokens["prompt_tokens"], "output_tokens": 2, "total_tokens": usage["total_tokens"]}
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "role": "assistant", "content": [part]}
        return {**base, "object": "response", "status": "completed", "output": [message], "usage": usage}
    values = [int(digest[i : i + 2], 16) / 256 for i in range(0, 8, 2)]
    usage = {"prompt_tokens": tokens["prompt_tokens"], "total_tokens": tokens["prompt_tokens"]}
    data = [{"object": "embedding", "index": 0, "embedding": values}]
    return {**base, "object": "list", "data": data, "usage": usage}
