import asyncio
import logging
from pathlib import Path
from typing import Any

import orjson
import pytest

from engine.backends.aliases import parse_aliases
from engine.backends.open import open_backend
from engine.backends.protocol import EngineError, NotSent, ServedModel
from engine.backends.remote import Address, RemoteEngine, parse_address, read_endpoints, read_models
from state.clock import ManualClock
from state.records import SettingsError
from state.settings import Settings
from tests.engine.conftest import ask
from tests.support.stub import Stub, chat

CHAT = "/v1/chat/completions"


def _remote(stub: Stub, **more: Any) -> RemoteEngine:
    return RemoteEngine(Settings(**{"upstreams": (stub.url,)} | more), url=stub.url, clock=ManualClock())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8001/v1", Address("http://h:8001", "http://h:8001/v1")),
        ("http://h:8001/v1/", Address("http://h:8001", "http://h:8001/v1")),
        (" http://h:8001 ", Address("http://h:8001", "http://h:8001")),
        ("https://h/openai/v1", Address("https://h/openai", "https://h/openai/v1")),
        ("http://[::1]:8001/v1", Address("http://[::1]:8001", "http://[::1]:8001/v1")),
        ("unix:/run/e.sock", Address("http://localhost", "unix:/run/e.sock", "/run/e.sock")),
        ("unix:///run/e.sock", Address("http://localhost", "unix:/run/e.sock", "/run/e.sock")),
    ],
)
def test_an_upstream_is_written_in_several_ways(url: str, expected: Address) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize(
    "url", ["", "h:8001", "localhost", "ftp://h/v1", "http:///v1", "http://h:x/v1", "unix:", "http://h/v1?a=b"]
)
def test_what_is_no_upstream_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        parse_address(url)


def test_credentials_in_a_url_are_refused_without_being_repeated() -> None:
    with pytest.raises(SettingsError, match="OVERNIGHT_UPSTREAM_API_KEY") as caught:
        parse_address("http://user:s3cret@h:8001/v1")
    assert "s3cret" not in str(caught.value)


async def test_the_models_are_those_the_server_lists_with_the_endpoints_it_tells(stub: Stub) -> None:
    engine = _remote(stub)
    await engine.start()
    endpoints = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank")
    assert await engine.models() == (
        ServedModel("stub-model", ("stub-model",), "stub", endpoints),
        ServedModel("other-model", ("other-model",), "stub", endpoints),
    )
    await engine.close()


async def test_aliases_are_names_of_their_model(stub: Stub) -> None:
    engine = _remote(stub, model_aliases=("gpt-4o-mini=stub-model", "*=other-model"))
    await engine.start()
    assert [m.names for m in await engine.models()] == [("stub-model", "gpt-4o-mini"), ("other-model", "*")]
    await engine.close()


async def test_a_body_that_asks_for_an_alias_is_sent_with_the_servers_name_and_nothing_else_changed(stub: Stub) -> None:
    engine = _remote(stub, model_aliases=("gpt-4o-mini=stub-model", "*=other-model"))
    await engine.start()
    answered = []
    for name in ("gpt-4o-mini", "anything", "stub-model"):
        reply = await engine.send(CHAT, orjson.dumps({"model": name, "messages": chat("hi")}))
        answered.append(orjson.loads(reply.body)["model"])
    assert answered == ["stub-model", "other-model", "stub-model"]
    assert stub.calls_of(chat("hi")) == 3
    await engine.close()


@pytest.mark.parametrize("body", [b"{", b'{"model": 7}', b"[]", b"{}", b""])
async def test_a_body_that_names_no_model_is_sent_as_it_is(stub: Stub, body: bytes) -> None:
    engine = _remote(stub, model_aliases=("*=stub-model",))
    await engine.start()
    assert (await engine.send(CHAT, body)).status == 400
    await engine.close()


async def test_an_alias_of_a_model_that_is_not_served_is_refused_at_the_start(stub: Stub) -> None:
    engine = _remote(stub, model_aliases=("gpt-4o-mini=llama",))
    with pytest.raises(SettingsError, match=r"does not serve 'llama'; it serves 'stub-model', 'other-model'"):
        await engine.start()
    await engine.close()


async def test_of_several_upstreams_one_need_not_serve_every_aliased_model(stub: Stub) -> None:
    engine = _remote(stub, upstreams=(stub.url, "http://127.0.0.1:1/v1"), model_aliases=("a=llama", "b=stub-model"))
    await engine.start()
    assert [m.names for m in await engine.models()] == [("stub-model", "b"), ("other-model",)]
    await engine.close()


@pytest.mark.parametrize("pairs", [("a",), ("=b",), ("a=",), ("a=b", "a=c")])
def test_aliases_are_name_and_model(pairs: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError):
        parse_aliases(pairs)


def test_a_models_name_may_hold_an_equals_sign() -> None:
    assert parse_aliases(["a=org/model=v2", "a=org/model=v2"]) == {"a": "org/model=v2"}


async def test_a_server_that_is_down_at_first_is_asked_again(stub: Stub) -> None:
    await stub.set_mode("down")
    engine = _remote(stub)
    with pytest.raises(NotSent):
        await engine.start()
    await stub.set_mode("ok")
    await engine.start()
    await engine.close()


async def test_a_wrong_key_is_told_by_the_name_of_its_setting_and_never_by_itself(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stub.key = "sk-right"
    engine = _remote(stub, upstream_api_key="sk-wrong")
    with pytest.raises(EngineError, match="OVERNIGHT_UPSTREAM_API_KEY") as caught:
        await engine.start()
    assert "sk-wrong" not in str(caught.value) + repr(engine) + engine.name + caplog.text
    await engine.close()


async def test_an_engine_we_do_not_run_never_dies(stub: Stub) -> None:
    engine = _remote(stub)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.died(), 0.05)
    await engine.close()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": 7}', b'{"data": [{}]}', b'{"data": []}', b"<html>"])
def test_what_is_no_list_of_models_is_an_engine_error(body: bytes) -> None:
    with pytest.raises(EngineError):
        read_models(body, None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"paths": {"/v1/chat/completions": {"post": {}}, "/v1/models": {"get": {}}}}', (CHAT,)),
        (b'{"paths": {"/v1/chat/completions": {"get": {}}}}', None),
        (b'{"paths": {"/v1/chat/completions": {"post": {}}, "/v1/{path}": {"post": {}}}}', None),
        (b'{"paths": {"/v1/chat/completions": {"post": {}}, "/{path}": {"post": {}}}}', None),
        (b'{"paths": {}}', None),
        (b'{"paths": []}', None),
        (b"[]", None),
        (b"<html>", None),
    ],
)
def test_endpoints_are_read_from_openapi_only_where_it_tells_them(
    body: bytes, expected: tuple[str, ...] | None
) -> None:
    assert read_endpoints(body) == expected


def test_the_settings_choose_the_backend(tmp_path: Path) -> None:
    assert open_backend(Settings(engine="echo"), upstream=None).name == "echo"
    settings = Settings(upstreams=("http://h:1/v1",))
    assert open_backend(settings, upstream="http://h:1/v1").name == "http://h:1/v1"
    with pytest.raises(SettingsError, match="--upstream"):
        open_backend(Settings(engine="remote"), upstream=None)


async def test_a_request_to_a_remote_engine_is_answered(stub: Stub) -> None:
    engine = _remote(stub)
    assert (await engine.send(CHAT, ask("hello"))).status == 200
    await engine.close()
