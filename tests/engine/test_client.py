import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.backends.client import LONGEST_RETRY_AFTER, Client, parse_retry_after
from engine.backends.protocol import EngineError, NotSent, OutcomeUnknown, ReplyTooLarge, TimedOut
from tests.engine.conftest import ask, client_of
from tests.support.stub import Stub, answer_of, chat
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"


@pytest.fixture
async def client(stub: Stub) -> AsyncIterator[Client]:
    made = client_of(stub)
    yield made
    await made.close()


@asynccontextmanager
async def _server(serve: Callable[[bytes], bytes]) -> AsyncIterator[Client]:
    """A server that answers one read with these bytes and closes; empty: closes without a word."""
    reads: list[bytes] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reads.append(await reader.read(65536))
        writer.write(serve(reads[-1]))
        writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    made = Client(f"http://127.0.0.1:{port}", wall=lambda: 0.0, timeout=10.0, max_reply_bytes=1000)
    try:
        yield made
    finally:
        await made.close()
        server.close()


async def test_a_body_goes_out_and_a_reply_comes_back_byte_for_byte(stub: Stub, client: Client) -> None:
    reply = await client.post(CHAT, ask("hello"))
    assert reply.status == 200
    assert json.loads(reply.body)["choices"][0]["message"]["content"] == answer_of(chat("hello"))
    assert stub.headers["content-type"] == "application/json"
    assert stub.headers["accept-encoding"] == "identity"
    assert "authorization" not in stub.headers
    assert "cookie" not in stub.headers


async def test_the_key_goes_out_as_a_bearer_token(stub: Stub) -> None:
    stub.key = "sk-secret"
    client = client_of(stub, key="sk-secret")
    assert (await client.post(CHAT, ask("hello"))).status == 200
    await client.close()


async def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with Stub().running(uds=path):
        client = Client("http://localhost", wall=lambda: 0.0, timeout=10.0, max_reply_bytes=1 << 20, socket_path=path)
        assert (await client.post(CHAT, ask("hello"))).status == 200
        await client.close()


async def test_connections_are_kept_alive(stub: Stub, client: Client) -> None:
    for _ in range(5):
        await client.post(CHAT, ask("hello"))
    assert len(stub.connections) == 1


async def test_as_many_calls_run_at_once_as_are_made(stub: Stub, client: Client) -> None:
    stub.latency = 0.2
    await asyncio.gather(*(client.post(CHAT, ask(f"{i}")) for i in range(150)))
    assert stub.max_in_flight == 150


async def test_a_large_body_is_sent_whole(client: Client) -> None:
    reply = await client.post(CHAT, ask("word " * 500_000))
    assert json.loads(reply.body)["usage"]["prompt_tokens"] == 500_000


async def _refused(tmp_path: Path) -> Client:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return Client(f"http://127.0.0.1:{port}", wall=lambda: 0.0, timeout=10.0, max_reply_bytes=1000)


async def _no_such_socket(tmp_path: Path) -> Client:
    path = str(tmp_path / "nobody")
    return Client("http://localhost", wall=lambda: 0.0, timeout=10.0, max_reply_bytes=1000, socket_path=path)


async def _no_such_name(tmp_path: Path) -> Client:
    return Client("http://nowhere.invalid:8000", wall=lambda: 0.0, timeout=10.0, max_reply_bytes=1000)


@pytest.mark.parametrize("make", [_refused, _no_such_socket, _no_such_name])
async def test_who_cannot_connect_has_not_sent(make: Callable[[Path], Awaitable[Client]], tmp_path: Path) -> None:
    client = await make(tmp_path)
    with pytest.raises(NotSent):
        await client.post(CHAT, ask("hello"))
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"this is no HTTP\r\n\r\n",
    ],
    ids=["closed", "cut", "cut chunk", "no HTTP"],
)
async def test_what_breaks_after_sending_has_an_unknown_outcome(answer: bytes) -> None:
    async with _server(lambda _: answer) as client:
        with pytest.raises(OutcomeUnknown):
            await client.post(CHAT, ask("hello"))


async def test_a_reset_connection_has_an_unknown_outcome(stub: Stub, client: Client) -> None:
    with pytest.raises(OutcomeUnknown):
        await client.post(CHAT, ask("[[stub drop]]"))


async def test_no_reply_in_time_is_a_time_out_and_ends_the_request_at_the_engine(stub: Stub) -> None:
    await stub.set_mode("hang")
    client = client_of(stub, timeout=0.1)
    with pytest.raises(TimedOut):
        await client.post(CHAT, ask("hello"))
    await eventually(lambda: stub.aborted == 1)
    await client.close()


async def test_a_post_on_a_connection_that_died_while_idle_is_not_sent_twice_behind_our_back(
    stub: Stub, client: Client
) -> None:
    await client.post(CHAT, ask("first"))
    with pytest.raises(OutcomeUnknown):
        await client.post(CHAT, ask("second [[stub drop times=1]]"))
    assert stub.calls_of(chat("second [[stub drop times=1]]")) == 1


@pytest.mark.parametrize("extra", [b"Content-Length: 1001\r\n\r\n", b"\r\n"], ids=["announced", "unannounced"])
async def test_a_reply_beyond_the_limit_is_cut_off(extra: bytes) -> None:
    async with _server(lambda _: b"HTTP/1.1 200 OK\r\n" + extra + b"x" * 1001) as client:
        with pytest.raises(ReplyTooLarge, match="1000 bytes"):
            await client.post(CHAT, ask("hello"))


async def test_a_reply_of_exactly_the_limit_is_kept() -> None:
    async with _server(lambda _: b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000) as client:
        assert len((await client.post(CHAT, ask("hello"))).body) == 1000


async def test_after_a_large_reply_was_cut_off_the_next_call_gets_its_own_answer(stub: Stub) -> None:
    client = client_of(stub, max_reply_bytes=2000)
    with pytest.raises(ReplyTooLarge):
        await client.post(CHAT, ask("[[stub size=3000000]]"))
    reply = await client.post(CHAT, ask("small"))
    assert answer_of(chat("small")).encode() in reply.body
    await client.close()


async def test_cancelling_a_call_ends_the_request_at_the_engine(stub: Stub, client: Client) -> None:
    await stub.set_mode("hang")
    call = asyncio.create_task(client.post(CHAT, ask("hello")))
    await eventually(lambda: stub.in_flight == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: stub.aborted == 1)


async def test_closing_ends_calls_under_way_and_refuses_new_ones(stub: Stub) -> None:
    await stub.set_mode("hang")
    client = client_of(stub)
    call = asyncio.create_task(client.post(CHAT, ask("hello")))
    await eventually(lambda: stub.in_flight == 1)
    await client.close()
    with pytest.raises(OutcomeUnknown):
        await call
    with pytest.raises(NotSent):
        await client.post(CHAT, ask("hello"))


async def test_redirects_are_not_followed() -> None:
    answer = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with _server(lambda _: answer) as client:
        assert (await client.post(CHAT, ask("hello"))).status == 307


@pytest.mark.parametrize(
    ("sent", "kept"), [(b"req-1", "req-1"), (b"r\xc3\xa9q", None), (b"", None), (b"x" * 300, None)]
)
async def test_the_engines_request_id_is_kept_if_it_is_plain(sent: bytes, kept: str | None) -> None:
    answer = b"HTTP/1.1 200 OK\r\nX-Request-Id: " + sent + b"\r\nContent-Length: 2\r\n\r\n{}"
    async with _server(lambda _: answer) as client:
        assert (await client.post(CHAT, ask("hello"))).request_id == kept


async def test_retry_after_comes_with_the_reply(stub: Stub, client: Client) -> None:
    reply = await client.post(CHAT, ask("[[stub status=429 retry-after=7]]"))
    assert (reply.status, reply.retry_after) == (429, 7.0)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("1e9", LONGEST_RETRY_AFTER),
        ("inf", LONGEST_RETRY_AFTER),
        ("nan", None),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 1970 00:17:00 GMT", 20.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2970 00:00:00 GMT", LONGEST_RETRY_AFTER),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_bounded(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value, now=1000.0) == seconds


async def test_errors_hold_neither_the_key_nor_the_address() -> None:
    client = Client("http://nowhere.invalid:8000", wall=lambda: 0.0, timeout=5.0, max_reply_bytes=1, key="sk-secret")
    with pytest.raises(EngineError) as caught:
        await client.post(CHAT, b"{}")
    assert "sk-secret" not in str(caught.value) + repr(client)
    assert "nowhere" not in str(caught.value)
    await client.close()
