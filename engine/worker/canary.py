"""The canary: a tiny request of our own, sent when it is in doubt whether an engine works.

It is sent only then (see `outcome`), never while requests succeed, and asks for one token.
"""

import asyncio
from typing import Final

import orjson

from engine.backends.protocol import Backend, EngineError
from engine.worker.outcome import Case, EngineFailure, History, judge
from engine.worker.pulse import Lane, Scene

#: Seconds an engine has for the canary. It may have to queue behind the requests in flight.
PATIENCE: Final = 60.0

_ASKING: Final[dict[str, dict[str, object]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/score": {"text_1": "Hi", "text_2": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
}


def canary_body(lane: Lane) -> bytes:
    """The smallest request this endpoint takes; for one we do not know, one that it refuses, which is an answer too."""
    return orjson.dumps({"model": lane.model, **_ASKING.get(lane.endpoint, {})})


async def sing(backend: Backend, lane: Lane, *, patience: float = PATIENCE) -> str | None:
    """Sends the canary. Returns None if the engine answered it, else what went wrong."""
    try:
        async with asyncio.timeout(patience):
            reply = await backend.send(lane.endpoint, canary_body(lane))
    except TimeoutError:
        return f"does not answer a one-token request within {patience:g} s"
    except EngineError as error:
        return str(error)
    verdict = judge(Case(reply, History(), Scene(), max_attempts=1, random=lambda: 0.0))
    if isinstance(verdict, EngineFailure):
        return f"{verdict.cause} (to a one-token request)"
    return None
