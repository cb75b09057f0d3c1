"""Input files for measurements: made, not fetched, and the same every time."""

import random
from pathlib import Path

import orjson

WORDS = [
    "river",
    "stone",
    "lantern",
    "winter",
    "harbour",
    "copper",
    "thread",
    "meadow",
    "signal",
    "orchard",
    "velvet",
    "engine",
    "paper",
    "north",
]


def chat_file(path: Path, *, requests: int, prompt_bytes: int, model: str) -> int:
    """Writes `requests` chat requests whose user message has about `prompt_bytes` bytes; returns the file's size."""
    rng = random.Random(7)
    with path.open("wb") as file:
        for number in range(requests):
            text = f"Request {number}: "
            while len(text) < prompt_bytes:
                text += " ".join(rng.choices(WORDS, k=32)) + " "
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text[:prompt_bytes]}],
                "max_tokens": 16,
                "temperature": 0,
            }
            line = {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(orjson.dumps(line) + b"\n")
    return path.stat().st_size
