"""The smallest request that each endpoint accepts. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

_BODIES: Final[Mapping[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
}


def tiny_requests(model: str, endpoints: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Endpoint and body, for those of the endpoints that we know one for."""
    for endpoint in endpoints:
        if endpoint in _BODIES:
            yield endpoint, orjson.dumps({"model": model, **_BODIES[endpoint]})
