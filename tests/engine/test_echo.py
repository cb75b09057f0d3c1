import asyncio
from typing import Any

import orjson
import pytest

from engine.backends.echo import EchoEngine
from engine.backends.protocol import NotSent, OutcomeUnknown
from engine.replies import read_answer
from state.records import Usage
from state.settings import Settings
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"


def _body(text: str, **more: Any) -> bytes:
    return orjson.dumps({"model": "echo", "messages": [{"role": "user", "content": text}], **more})


@pytest.fixture
async def engine() -> EchoEngine:
    made = EchoEngine(Settings(engine="echo"))
    await made.start()
    return made


@pytest.mark.parametrize(
    ("endpoint", "prompt", "usage"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]}, Usage(2, 0, 2)),
        ("/v1/completions", {"prompt": "one two"}, Usage(2, 0, 2)),
        ("/v1/embeddings", {"input": ["one", "two"]}, Usage(2, 0, 0)),
        ("/v1/responses", {"input": "one two"}, Usage(2, 0, 2)),
    ],
)
async def test_every_endpoint_has_its_answer_the_same_each_time(
    engine: EchoEngine, endpoint: str, prompt: dict[str, Any], usage: Usage
) -> None:
    first, again = [await engine.send(endpoint, orjson.dumps({"model": "echo", **prompt})) for _ in range(2)]
    assert first == again
    assert first.status == 200
    assert read_answer(first.body).usage == usage
    assert read_answer(first.body).model == "echo"


async def test_the_answer_is_what_was_asked(engine: EchoEngine) -> None:
    reply = orjson.loads((await engine.send(CHAT, _body("hello there"))).body)
    assert reply["choices"][0]["message"]["content"] == "hello there"


async def test_it_goes_by_the_name_in_the_settings_and_by_aliases() -> None:
    engine = EchoEngine(Settings(engine="echo", model="m", model_aliases=("gpt-4o-mini=m",)))
    await engine.start()
    assert [(m.root, m.names) for m in await engine.models()] == [("m", ("m", "gpt-4o-mini"))]
    statuses = [(await engine.send(CHAT, _body("hi", model=name))).status for name in ("m", "gpt-4o-mini", "echo")]
    assert statuses == [200, 200, 404]


async def test_bad_requests_are_refused(engine: EchoEngine) -> None:
    statuses = [(await engine.send(CHAT, body)).status for body in (b"{", b"[]", b"{}")]
    assert statuses == [400, 400, 400]


async def test_a_directive_holds_for_so_many_calls_of_its_prompt(engine: EchoEngine) -> None:
    body = _body("[[echo:status=500:times=2]]")
    assert [(await engine.send(CHAT, body)).status for _ in range(3)] == [500, 500, 200]


@pytest.mark.parametrize(("word", "error"), [("drop", OutcomeUnknown), ("refuse", NotSent)])
async def test_calls_fail_as_told(engine: EchoEngine, word: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await engine.send(CHAT, _body(f"[[echo:{word}]]"))


async def test_a_death_breaks_every_call_and_start_brings_it_up_again(engine: EchoEngine) -> None:
    death = asyncio.create_task(engine.died())
    slow = asyncio.create_task(engine.send(CHAT, _body("[[echo:latency=60]]")))
    await eventually(lambda: engine._followed["[[echo:latency=60]]"] == 1)
    with pytest.raises(OutcomeUnknown):
        await engine.send(CHAT, _body("[[echo:die]]"))
    assert await death == "the prompt said so"
    with pytest.raises(OutcomeUnknown):
        await slow
    with pytest.raises(NotSent):
        await engine.send(CHAT, _body("hello"))
    await engine.start()
    assert (await engine.send(CHAT, _body("hello"))).status == 200


async def test_an_answer_takes_its_latency() -> None:
    engine = EchoEngine(Settings(engine="echo", echo_latency=0.05))
    await engine.start()
    before = asyncio.get_running_loop().time()
    await engine.send(CHAT, _body("hello"))
    assert asyncio.get_running_loop().time() - before >= 0.04
