"""What we rely on, said by a real vLLM: answers, refusals, names, and that nothing of it is left behind."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine import demo_model
from engine.backends import guard
from engine.environment import python_in
from engine.install import Steps
from tests.real.conftest import RealEngine


def content(reply: Any) -> str:
    assert reply.status == 200, reply.body
    text: str = orjson.loads(reply.body)["choices"][0]["message"]["content"]
    return text


def own_engine(engine: RealEngine) -> dict[int, int]:
    """Process ids and start times of everything below the guard."""
    (record,) = (engine.settings.data / "engines").glob("*.json")
    facts = orjson.loads(record.read_bytes())
    below = guard.descendants(guard.read_processes(), facts["guard"])
    return {p.pid: p.start for p in below} | {facts["guard"]: facts["guard_start"]}


def first_process(engine: RealEngine) -> int:
    (record,) = (engine.settings.data / "engines").glob("*.json")
    pid: int = orjson.loads(record.read_bytes())["engine"]
    return pid


def alive(processes: dict[int, int]) -> list[int]:
    return [p.pid for p in guard.read_processes() if not p.zombie and processes.get(p.pid) == p.start]


def test_the_capital_of_france_is_paris(engine: RealEngine) -> None:
    reply = engine.chat("What is the capital of France?", temperature=0, max_tokens=24)
    assert content(reply) == "The capital of France is Paris."


def test_a_long_prompt_is_read_to_its_end(engine: RealEngine) -> None:
    """Kernels that compute wrong do so beyond the first few tokens: what follows a long pattern shows it."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 60 + "The quick"
    reply = engine.ask("/v1/completions", prompt=prompt, temperature=0, max_tokens=8)
    assert orjson.loads(reply.body)["choices"][0]["text"] == " brown fox jumps over the lazy dog."


def test_its_models_and_endpoints(engine: RealEngine) -> None:
    (model,) = engine.models()
    assert (model.root, model.names) == (
        "smollm2-135m-instruct",
        ("smollm2-135m-instruct", "demo", "gpt-4o-mini", "*"),
    )
    assert {"/v1/chat/completions", "/v1/completions"} <= set(model.endpoints)
    assert "/v1/embeddings" not in model.endpoints


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gpt-4o-mini", "any-other-name"])
def test_it_answers_to_every_name(engine: RealEngine, name: str) -> None:
    assert engine.chat("Hello", model=name, max_tokens=1).status == 200


def test_usage_tells_of_cached_tokens(engine: RealEngine) -> None:
    prompt = "You will find the same long beginning in both of these requests. " * 40
    first, second = (orjson.loads(engine.chat(prompt, max_tokens=1).body)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == second["prompt_tokens"] > 256
    assert second["prompt_tokens_details"]["cached_tokens"] >= 256


def test_too_many_tokens_are_that_requests_own_fault(engine: RealEngine) -> None:
    reply = engine.chat("Hello", max_tokens=1_000_000)
    assert reply.status == 400
    assert "max_tokens" in orjson.loads(reply.body)["error"]["message"]


def test_a_chat_model_has_no_embeddings(engine: RealEngine) -> None:
    reply = engine.ask("/v1/embeddings", input="Hello")
    assert (reply.status, orjson.loads(reply.body)) == (404, {"detail": "Not Found"})


def test_pictures_from_anywhere_are_refused(engine: RealEngine) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/cat.png"}}
    reply = engine.ask("/v1/chat/completions", messages=[{"role": "user", "content": [part]}], max_tokens=1)
    assert reply.status == 400


def test_an_embedding_model(start_engine: Callable[..., RealEngine], engine_home: Path) -> None:
    with (engine_home / "install.log").open("ab") as log:
        steps = Steps(folder=engine_home, echo=print, log=log.fileno())
        folder = demo_model.build_embedding(
            home=engine_home, python=python_in(engine_home.absolute()), run=steps.run, echo=print
        )
    embedder = start_engine(model=str(folder.absolute()), engine_args=("--dtype", "float32"))
    (model,) = embedder.models()
    assert model.root == "all-minilm-l6-v2"
    assert "/v1/embeddings" in model.endpoints
    assert "/v1/chat/completions" not in model.endpoints
    reply = embedder.ask(
        "/v1/embeddings", model=model.root, input=["a cat on a sofa", "a kitten on a couch", "tax law"]
    )
    cat, kitten, tax = (d["embedding"] for d in orjson.loads(reply.body)["data"])
    assert len(cat) == 384
    assert _dot(cat, kitten) > _dot(cat, tax)
    embedder.close()


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_a_killed_guard_leaves_nothing(engine: RealEngine) -> None:
    first = own_engine(engine)
    (record,) = (engine.settings.data / "engines").glob("*.json")
    os.kill(orjson.loads(record.read_bytes())["guard"], signal.SIGKILL)
    engine.died()
    assert alive(first) == []
    engine.start()


def test_a_killed_engine_is_replaced_and_nothing_is_left(engine: RealEngine) -> None:
    """Last in this file: it ends the engine that the others share."""
    first = own_engine(engine)
    assert len(first) >= 4  # guard, server, core, worker
    os.kill(first_process(engine), signal.SIGKILL)
    assert engine.died().startswith("vLLM was ended by SIGKILL")
    assert alive(first) == []
    engine.start()
    second = own_engine(engine)
    assert content(engine.chat("What is the capital of France?", temperature=0, max_tokens=24)).endswith("Paris.")
    engine.close()
    assert alive(second) == []
    assert list((engine.settings.data / "engines").glob("*.json")) == []
